"""Judges a trainer beside a reader that follows its commits, against the same trainer beside the same decoding from plain memory.

In both the reader decodes as many tokens behind each commit, while the trainer makes and commits its next step: what the trainer
loses is what following costs it, by the daemon's work and the reader's loads. Where the reader was not at every commit nothing is
judged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from paramstore.bench.report.rows import SUBJECT, Row, Target, judged
from paramstore.errors import StepMismatch

RATIO_MIN = 0.95
"""The least share of the trainer's speed that must be left: it loses 5 % at most."""


@dataclass(frozen=True, slots=True)
class Decoded:
    """Work of a reader behind one commit. step: where it stood then, None in memory; changed_bytes: of experts that were others at
    the last step that it moved to."""

    tokens: int
    seconds: float
    step: int | None = None
    changed_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Turn:
    """Some steps of the trainer, one reader beside it. step_s: seconds of each step and its commit. committed: the step that was
    committed when each began. decoded: what the reader did beside each."""

    step_s: Sequence[float]
    committed: Sequence[int]
    decoded: Sequence[Decoded]

    @property
    def seconds(self) -> float:
        return sum(self.step_s)


def check_turns(following: Turn, memory: Turn) -> None:
    """Raises StepMismatch where the reader has missed a commit, or the two readers have not decoded as much."""
    for step, work in zip(following.committed, following.decoded, strict=True):
        if work.step is None or work.step < step:
            raise StepMismatch(f"the reader stood on step {work.step} when step {step} was committed: it is to follow each of them")
    counts = [[work.tokens for work in turn.decoded] for turn in (following, memory)]
    if counts[0] != counts[1]:
        raise StepMismatch(f"following {counts[0]} tokens were decoded, from memory {counts[1]}")


def row_of(threads: int, pairs: Sequence[tuple[Turn, Turn]], *, tokens: int, record_bytes: int, facts: dict[str, float]) -> Row:
    """Makes the row of one number of the trainer's threads. pairs: (following, from memory). tokens: of one training step."""
    ratios = [memory.seconds / following.seconds for following, memory in pairs]
    steps = [second for following, _ in pairs for second in following.step_s]
    limits = [second for _, memory in pairs for second in memory.step_s]
    parts = {
        "ours_step_s": median(steps), "memory_step_s": median(limits),
        "ours_decode_s": median(work.seconds for following, _ in pairs for work in following.decoded),
        "memory_decode_s": median(work.seconds for _, memory in pairs for work in memory.decoded),
        "tokens_per_commit": median(work.tokens for following, _ in pairs for work in following.decoded),
        "changed_bytes": median(work.changed_bytes for following, _ in pairs for work in following.decoded), **facts,
    }  # fmt: skip
    return judged(
        Row(
            name="training beside a reader", case=f"a commit a step, {threads} threads", subject=SUBJECT, unit="tokens/s",
            record_bytes=record_bytes, value=tokens / median(steps), limit=tokens / median(limits),
            against="the same beside decoding from memory", ratio=median(ratios), ratio_min=min(ratios), ratio_max=max(ratios),
            target=Target("ratio", ">=", RATIO_MIN), parts=parts,
        )
    )  # fmt: skip
