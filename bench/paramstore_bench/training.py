"""Judges training throughput with a part of the states in host memory, beside training with everything in memory.

A step of ours cannot be faster than its bytes through the device, nor than the same step with everything in memory: the roofline
is the slower of the two. A cell holds its target if it reaches the asked share of the in-memory rate, or, where the device is
the slower one, the asked share of the roofline, whichever is lower. Bytes are those that the daemon moved in the steps, rates
those of raw I/O beside them.
The default update rule, `exact`, does what the model in memory does, and must have its losses; `touched` stands beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from paramstore.bench.report.rows import SUBJECT, Row, Target, judged
from paramstore.errors import CapacityError, StepMismatch

TARGETS = {1.0: 0.95, 0.5: 0.85, 0.25: 0.75, 0.1: 0.60}
"""Asked share of the in-memory tokens a second, for each host budget as a share of the states."""
ROOFLINE_TARGET = 0.85
EXACT, TOUCHED = "exact", "touched"
RULES = (EXACT, TOUCHED)
TRAINING = "training"
"""Name of the rows that are drawn."""


@dataclass(frozen=True, slots=True)
class Phases:
    """Seconds of one training step."""

    forward_s: float
    backward_s: float
    step_s: float

    @property
    def seconds(self) -> float:
        return self.forward_s + self.backward_s + self.step_s


@dataclass(frozen=True, slots=True)
class PairedStep:
    """One step of ours beside the same one in memory. io_s: the time of its bytes at the device's rate.

    Ours is one of several in a row: an update goes on while the next forward begins.
    """

    ours: Phases
    memory: Phases
    io_s: float
    moved_bytes: float

    @property
    def ratio(self) -> float:
        """Our tokens a second over those in memory."""
        return self.memory.seconds / self.ours.seconds

    @property
    def roofline_ratio(self) -> float:
        """The most that `ratio` could be, given the device."""
        return self.memory.seconds / max(self.memory.seconds, self.io_s)

    @property
    def efficiency(self) -> float:
        """Our rate over the roofline's."""
        return self.ratio / self.roofline_ratio


def target_of(share: float, steps: Sequence[PairedStep]) -> float:
    """The asked ratio of a cell: its share; where the device bounds the step, the share of the roofline if that is lower."""
    roofline = median(step.roofline_ratio for step in steps)
    return min(TARGETS[share], ROOFLINE_TARGET * roofline) if roofline < 1.0 else TARGETS[share]


def row_of(
    share: float, steps: Sequence[PairedStep], *, tokens: int, record_bytes: int, facts: dict[str, float], rule: str = EXACT
) -> Row:
    """Makes the row of one cell. share: the host budget as a share of the states. facts: the daemon's figures, for `parts`."""
    ratios = [step.ratio for step in steps]
    phases = {
        f"{who}_{phase}": median(getattr(getattr(step, who), phase) for step in steps)
        for who in ("ours", "memory") for phase in ("forward_s", "backward_s", "step_s", "seconds")
    }  # fmt: skip
    roofline_s = [max(step.memory.seconds, step.io_s) for step in steps]
    parts = {
        **phases, **facts, "io_s": median(step.io_s for step in steps), "moved_bytes": median(step.moved_bytes for step in steps),
        "roofline_tokens_per_s": tokens / median(roofline_s), "efficiency": median(step.efficiency for step in steps),
    }  # fmt: skip
    return judged(
        Row(
            name=TRAINING, case=f"host budget {share:.0%} of the states" + ("" if rule == EXACT else f", {rule}"),
            subject=SUBJECT, record_bytes=record_bytes,
            unit="tokens/s", value=tokens / phases["ours_seconds"], limit=tokens / phases["memory_seconds"],
            against="everything in memory, fused AdamW", ratio=median(ratios), ratio_min=min(ratios), ratio_max=max(ratios),
            target=Target("ratio", ">=", target_of(share, steps)) if rule == EXACT else None, parts=parts,
        )
    )  # fmt: skip


def check_losses(ours: Sequence[float], memory: Sequence[float], *, what: str) -> None:
    """Raises StepMismatch, naming the first step that differs, unless the two runs had equal losses, bit for bit."""
    for number, (mine, theirs) in enumerate(zip(ours, memory, strict=True)):
        if mine != theirs:
            raise StepMismatch(f"{what}: the loss of step {number} is {mine!r}, in memory {theirs!r}; exact promises the same")


def check_host_peak(peak_bytes: int, budget_bytes: int, *, what: str) -> None:
    """Raises CapacityError if the kernel ever counted more host memory than the budget."""
    if peak_bytes > budget_bytes:
        raise CapacityError(f"{what}: {peak_bytes} bytes of host memory by the kernel's count, the host budget is {budget_bytes}")
