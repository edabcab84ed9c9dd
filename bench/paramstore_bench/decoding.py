"""Judges decoding and prefill with a part of the experts in host memory, beside the same model with all of them in memory.

A token cannot be faster than its arithmetic and the bytes that its experts lack. In decoding the next layer's experts are not known
before its router has run, so the two come one after the other: the limit is their sum. A prompt uses most experts of a layer, whose
loads can lie beside the arithmetic: the limit is the slower of the two. Lacking bytes are those that demand found absent, whatever
else was read; the rate is that of raw O_DIRECT reads of records beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from torch import Tensor

from paramstore.bench.report.rows import SUBJECT, Row, Target, judged
from paramstore.errors import StepMismatch

DECODE = "decode"
SHARES = (1.0, 0.5, 0.25, 0.1)
RESIDENT_TARGETS = {(DECODE, 1): 0.95, (DECODE, 2): 0.90}
"""Asked share of the speed in memory where everything is resident, by work and threads. Prefill: `PREFILL_TARGET`."""
PREFILL_TARGET = 0.85
ROOFLINE_TARGET = 0.85
"""Asked share of the limit's speed where not everything is resident."""


@dataclass(frozen=True, slots=True)
class Work:
    """What is timed. prompt: its tokens; new: tokens that are decoded behind it, 0 where the prompt itself is timed."""

    prompt: int
    new: int = 0

    @property
    def name(self) -> str:
        return DECODE if self.new else f"prefill of {self.prompt} tokens"

    @property
    def tokens(self) -> int:
        return self.new or self.prompt


@dataclass(frozen=True, slots=True)
class Answer:
    """One timed run. logits: of the last position of each forward. lacking_bytes, read_bytes: what demand lacked, and all reads."""

    seconds: float
    logits: Tensor
    lacking_bytes: float = 0.0
    read_bytes: float = 0.0


@dataclass(frozen=True, slots=True)
class PairedAnswer:
    """One of ours beside the same in memory. rate: bytes a second of raw reads in the same round."""

    ours: Answer
    memory: Answer
    rate: float

    def limit_s(self, work: Work) -> float:
        """The least time of ours: arithmetic and lacking bytes, one after the other or beside each other."""
        reading_s = self.ours.lacking_bytes / self.rate
        return self.memory.seconds + reading_s if work.new else max(self.memory.seconds, reading_s)


def check_logits(ours: Answer, memory: Answer, *, what: str) -> None:
    """Raises StepMismatch where one bit of the logits differs."""
    if not ours.logits.equal(memory.logits):
        raise StepMismatch(f"{what}: the logits are not those of the model in memory")


def row_of(
    work: Work, share: float, threads: int, pairs: Sequence[PairedAnswer], *, record_bytes: int, facts: dict[str, float]
) -> Row:
    """Makes the row of one cell: where everything is resident beside memory, else beside the limit."""
    is_resident = share == max(SHARES)
    if is_resident:
        bound = RESIDENT_TARGETS.get((work.name, threads), PREFILL_TARGET)
        limits, against = [pair.memory.seconds for pair in pairs], "the model in memory"
    else:
        bound = ROOFLINE_TARGET
        limits = [pair.limit_s(work) for pair in pairs]
        against = "arithmetic and lacking bytes" + ("" if work.new else ", the slower of the two")
    ratios = [limit_s / pair.ours.seconds for limit_s, pair in zip(limits, pairs, strict=True)]
    parts = {
        "of_memory": median(pair.memory.seconds / pair.ours.seconds for pair in pairs),
        "ours_s": median(pair.ours.seconds for pair in pairs), "memory_s": median(pair.memory.seconds for pair in pairs),
        "lacking_bytes": median(pair.ours.lacking_bytes for pair in pairs),
        "read_bytes": median(pair.ours.read_bytes for pair in pairs),
        "raw_bytes_per_s": median(pair.rate for pair in pairs), **facts,
    }  # fmt: skip
    row = Row(
        name=work.name, case=f"{share:.0%} of the experts in host memory, {threads} threads", subject=SUBJECT, unit="tokens/s",
        record_bytes=record_bytes, value=median(work.tokens / pair.ours.seconds for pair in pairs), against=against,
        limit=median(work.tokens / limit_s for limit_s in limits), ratio=median(ratios),
        ratio_min=min(ratios), ratio_max=max(ratios), target=Target("ratio", ">=", bound), parts=parts,
    )  # fmt: skip
    return judged(row)


def peer_row_of(
    share: float, threads: int, pairs: Sequence[tuple[Answer, Answer]], *, tokens: int, record_bytes: int, bound: float
) -> Row:
    """Makes the row of decoding beside a peer. pairs: (ours, the peer's) of the same tokens."""
    ratios = [peer.seconds / ours.seconds for ours, peer in pairs]
    row = Row(
        name=f"{DECODE} beside accelerate", case=f"{share:.0%} of the experts in host memory, {threads} threads", subject=SUBJECT,
        unit="tokens/s", record_bytes=record_bytes, value=median(tokens / ours.seconds for ours, _ in pairs),
        against="accelerate's disk_offload of as many layers, the page cache of its files dropped before each token",
        limit=median(tokens / peer.seconds for _, peer in pairs), ratio=median(ratios), ratio_min=min(ratios),
        ratio_max=max(ratios), target=Target("ratio", ">=", bound),
        parts={"ours_s": median(ours.seconds for ours, _ in pairs), "peer_s": median(peer.seconds for _, peer in pairs)},
    )  # fmt: skip
    return judged(row)
