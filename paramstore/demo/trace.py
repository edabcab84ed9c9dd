"""The record of every training step of the demo, for the progress bar, the report and the picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paramstore.demo.traffic import Traffic

NOTHING = Traffic()


@dataclass(frozen=True, slots=True)
class StepTrace:
    """One step: its loss in nats a byte, its wall time, and what moved meanwhile (nothing, for the reference)."""

    step: int
    loss: float
    seconds: float
    traffic: Traffic = NOTHING


def total_traffic(traces: Sequence[StepTrace]) -> Traffic:
    """Sums what moved in all of these steps."""
    return sum((trace.traffic for trace in traces), start=NOTHING)


def equal_losses(one: Sequence[StepTrace], other: Sequence[StepTrace]) -> bool:
    """True if both are traces of the same steps, at least one, and every loss agrees bit for bit."""
    return bool(one) and [(t.step, t.loss) for t in one] == [(t.step, t.loss) for t in other]
