"""What ranks found when they set two layers side by side; what differs, or sends other rows than it should, is no finding."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from paramstore.bench.pairs import Pairs
from paramstore.errors import StepMismatch

ROUNDING = 1e-5


class Compared(msgspec.Struct, frozen=True):
    """Two layers side by side. differences: by name, of the largest element; 0: equal bits. facts: bytes and counts."""

    pairs: Pairs
    differences: dict[str, float]
    facts: dict[str, float]


def check_sent(sent: float, expected: float) -> None:
    """Raises StepMismatch unless as many bytes of rows were sent as have to be."""
    if sent != expected:
        raise StepMismatch(f"{sent:.0f} bytes of rows went to other ranks, the routing says {expected:.0f}")


def check_equal(differences: Mapping[str, float]) -> None:
    """Raises StepMismatch, naming what differs, unless two layers are equal but for rounding."""
    if apart := {name: value for name, value in differences.items() if not value <= ROUNDING}:
        raise StepMismatch(f"the layers differ by more than {ROUNDING:g} of the largest element: {apart}")
