"""Judges decoding and prefill with a part of the experts in host memory, beside the same model with all of them in memory.

A token cannot be faster than its arithmetic and the bytes that its experts lack. In decoding the next layer's experts are not known
before its router has run, so the two come one after the other: the limit is their sum. A prompt uses most experts of a layer, whose
loads can lie beside the arithmetic: the limit is the slower of the two, and arithmetic alone in a ring whose layers compute longer
than the next one loads. Reads cost the arithmetic beside them memory bandwidth and time of a core, so the machine may not have that
limit to give: what it has is timed too, the model in memory beside raw reads of as many bytes, and told with the row. Lacking bytes
are those of used experts that did not stand when the clock started; the rate is that of raw O_DIRECT reads of records beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from torch import Tensor
from torch.nn import functional

from paramstore.bench.report.rows import SUBJECT, Row, Target, judged
from paramstore.errors import StepMismatch

DECODE = "decode"
SHARES = (1.0, 0.5, 0.25, 0.1)
AUTO, RING = "auto", "ring"
RESIDENT_TARGETS = {(DECODE, 1): 0.95, (DECODE, 2): 0.90}
"""Asked share of the speed in memory where everything is resident, by work and threads. Prefill: `PREFILL_TARGET`."""
LEAST_COSINE = 0.98
"""Between a peer's logits and those of the model in memory: its kernels round elsewhere, in fp32 for where its weights lie too."""
PREFILL_TARGET = 0.85
ROOFLINE_TARGET = 0.85
"""Asked share of the limit's speed where not everything is resident."""
HIDDEN_TARGETS = {1: 0.95, 2: 0.90}
"""Asked share of the speed in memory where loads are hidden, by threads."""
COPIES_TARGET = 1.06
"""Most reads of an expert for each of its uses, where loads are hidden."""


@dataclass(frozen=True, slots=True)
class Work:
    """What is timed. prompt: its tokens; new: tokens that are decoded behind it, 0 where the prompt itself is timed. hides_loads:
    whether each layer computes the prompt longer than the next one loads."""

    prompt: int
    new: int = 0
    hides_loads: bool = False

    @property
    def name(self) -> str:
        return DECODE if self.new else f"prefill of {self.prompt} tokens"

    @property
    def tokens(self) -> int:
        return self.new or self.prompt


@dataclass(frozen=True, slots=True)
class Cell:
    """What is measured: a work, with a share of the experts in host memory, and so many threads."""

    work: Work
    share: float
    threads: int
    residency: str = AUTO

    @property
    def case(self) -> str:
        where = f"{self.share:.0%} of the experts in host memory, {self.threads} threads"
        return where if self.residency == AUTO else f"{where}, {self.residency}"

    @property
    def is_beside_memory(self) -> bool:
        """Whether the speed of the model in memory can be had."""
        return self.share == max(SHARES) or self.work.hides_loads

    @property
    def target(self) -> float:
        """The asked share of the speed that can be had."""
        if self.work.hides_loads:
            return HIDDEN_TARGETS[self.threads]
        return RESIDENT_TARGETS.get((self.work.name, self.threads), PREFILL_TARGET) if self.is_beside_memory else ROOFLINE_TARGET


@dataclass(frozen=True, slots=True)
class Used:
    """What became of a run's uses of experts. Counts of experts; absent: neither there nor on their way when their layer began;
    late: on their way. lacking_bytes: of those that did not stand when the clock started; read_bytes: all reads, with those that
    the run had begun and were over behind it."""

    uses: float = 0.0
    absent: float = 0.0
    late: float = 0.0
    lacking_bytes: float = 0.0
    read_bytes: float = 0.0


@dataclass(frozen=True, slots=True)
class Answer:
    """One timed run. logits: of the last position of each forward."""

    seconds: float
    logits: Tensor
    used: Used = Used()


@dataclass(frozen=True, slots=True)
class PairedAnswer:
    """One of ours beside the same in memory. rate: bytes a second of raw reads in the same round. both_s: of a prompt that lacks
    bytes, the same in memory while as many raw bytes are read, until both are over."""

    ours: Answer
    memory: Answer
    rate: float
    both_s: float | None = None

    def limit_s(self, cell: Cell) -> float:
        """The least time of ours: arithmetic and lacking bytes, one after the other or beside each other."""
        if cell.is_beside_memory:
            return self.memory.seconds
        reading_s = self.ours.used.lacking_bytes / self.rate
        return self.memory.seconds + reading_s if cell.work.new else max(self.memory.seconds, reading_s)


def check_logits(ours: Answer, memory: Answer, *, what: str) -> None:
    """Raises StepMismatch where one bit of the logits differs."""
    if not ours.logits.equal(memory.logits):
        raise StepMismatch(f"{what}: the logits are not those of the model in memory")


def check_near(peer: str, found: Tensor, expected: Tensor) -> None:
    """Raises StepMismatch where a peer's logits are not those of the model, but for rounding."""
    cosine = float(functional.cosine_similarity(expected.flatten().float(), found.flatten().float(), dim=0))
    if cosine < LEAST_COSINE:
        raise StepMismatch(f"{peer} computes another model: its logits have a cosine of {cosine:.3f} to the model's")


def row_of(cell: Cell, pairs: Sequence[PairedAnswer], *, record_bytes: int, facts: dict[str, float]) -> Row:
    """Makes the row of one cell: where loads cost nothing beside memory, else beside the limit."""
    work = cell.work
    against = "arithmetic and lacking bytes" + ("" if work.new else ", the slower of the two")
    limits = [pair.limit_s(cell) for pair in pairs]
    ratios = [limit_s / pair.ours.seconds for limit_s, pair in zip(limits, pairs, strict=True)]
    parts = {
        "of_memory": median(pair.memory.seconds / pair.ours.seconds for pair in pairs),
        "ours_s": median(pair.ours.seconds for pair in pairs), "memory_s": median(pair.memory.seconds for pair in pairs),
        "lacking_bytes": median(pair.ours.used.lacking_bytes for pair in pairs),
        "read_bytes": median(pair.ours.used.read_bytes for pair in pairs),
        "raw_bytes_per_s": median(pair.rate for pair in pairs), **_beside_reads(pairs), **_counts(pairs, record_bytes), **facts,
    }  # fmt: skip
    row = Row(
        name=work.name, case=cell.case, subject=SUBJECT, unit="tokens/s", record_bytes=record_bytes,
        value=median(work.tokens / pair.ours.seconds for pair in pairs),
        against="the model in memory" if cell.is_beside_memory else against,
        limit=median(work.tokens / limit_s for limit_s in limits), ratio=median(ratios),
        ratio_min=min(ratios), ratio_max=max(ratios), target=Target("ratio", ">=", cell.target), parts=parts,
    )  # fmt: skip
    return judged(row)


def count_rows_of(cell: Cell, pairs: Sequence[PairedAnswer], *, record_bytes: int) -> list[Row]:
    """Makes the rows of a cell that hides its loads: what was absent though everything ahead had time to come, and how often an
    expert was read for one use."""
    parts = _counts(pairs, record_bytes)
    found = [
        ("experts absent", "experts of a prompt", max(pair.ours.used.absent for pair in pairs), 0.0),
        ("reads of an expert", "reads a use", parts["copies_per_use"], COPIES_TARGET),
    ]
    rows = [
        Row(
            name=f"{cell.work.name}: {name}", case=cell.case, subject=SUBJECT, unit=unit, value=value, record_bytes=record_bytes,
            target=Target("value", "<=", bound), parts=parts,
        ) for name, unit, value, bound in found
    ]  # fmt: skip
    return [judged(row) for row in rows]


def _beside_reads(pairs: Sequence[PairedAnswer]) -> dict[str, float]:
    timed = [(pair.both_s, pair.ours.seconds) for pair in pairs if pair.both_s is not None]
    if not timed:
        return {}
    return {
        "memory_beside_reads_s": median(both_s for both_s, _ in timed),
        "of_memory_beside_reads": median(both_s / ours_s for both_s, ours_s in timed),
    }


def _counts(pairs: Sequence[PairedAnswer], record_bytes: int) -> dict[str, float]:
    used = [pair.ours.used for pair in pairs]
    return {
        "absent": median(one.absent for one in used), "late": median(one.late for one in used),
        "uses": median(one.uses for one in used),
        "copies_per_use": median(one.read_bytes / record_bytes / max(1.0, one.uses) for one in used),
    }  # fmt: skip


def peer_row_of(
    cell: Cell, pairs: Sequence[tuple[Answer, Answer]], *, peer: str, against: str, record_bytes: int, bound: float | None
) -> Row:
    """Makes the row of decoding beside a peer. pairs: (ours, the peer's) of the same tokens. bound: how many times the peer's speed
    is asked; None where nothing is."""
    ratios = [theirs.seconds / ours.seconds for ours, theirs in pairs]
    tokens = cell.work.tokens
    row = Row(
        name=f"{DECODE} beside {peer}", case=cell.case, subject=SUBJECT, unit="tokens/s", record_bytes=record_bytes,
        value=median(tokens / ours.seconds for ours, _ in pairs), against=against,
        limit=median(tokens / theirs.seconds for _, theirs in pairs), ratio=median(ratios), ratio_min=min(ratios),
        ratio_max=max(ratios), target=None if bound is None else Target("ratio", ">=", bound),
        parts={"ours_s": median(ours.seconds for ours, _ in pairs), "peer_s": median(theirs.seconds for _, theirs in pairs)},
    )  # fmt: skip
    return judged(row)
