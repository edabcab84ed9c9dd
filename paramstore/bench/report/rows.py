"""The report of a benchmark: rows with their limit, ratio, target and verdict, and the JSON they are kept in.

A row says what was measured (`value`, `unit`), what it stands beside (`against`, `limit`, in the same unit), their paired
ratio with its spread, and the target. `holds` follows from the median alone; `verdict` tells a miss that lies within the
spread of its own pairs (run it again) from one that does not. `parts` are what a row's time is made of.
"""

from __future__ import annotations

import math
from enum import StrEnum
from typing import Literal

import msgspec

SUBJECT = "paramstore"
"""`Row.subject` of our own figures; peers carry their own name, the baseline `raw`."""
RAW = "raw"


class Verdict(StrEnum):
    """Relation of a row to its target."""

    HOLDS = "holds"
    WITHIN_SPREAD = "within spread"
    SHORT = "short"
    NO_TARGET = "no target"


class Target(msgspec.Struct, frozen=True):
    """A bound on a row's ratio or on its value."""

    quantity: Literal["ratio", "value"]
    relation: Literal[">=", "<="]
    bound: float

    def is_met_by(self, measured: float) -> bool:
        return measured >= self.bound if self.relation == ">=" else measured <= self.bound

    def __str__(self) -> str:
        return f"{self.relation} {self.bound:.4g}"


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One measured figure. Without a limit `ratio` is None; without a target `holds` is None.

    name: the work; case: the variant of it; subject: who did it.
    parts: seconds, bytes or counts, named with their unit.
    """

    name: str
    subject: str
    case: str = ""
    value: float
    unit: str
    record_bytes: int | None = None
    against: str = ""
    limit: float | None = None
    ratio: float | None = None
    ratio_min: float | None = None
    ratio_max: float | None = None
    target: Target | None = None
    holds: bool | None = None
    parts: dict[str, float] = {}
    note: str = ""

    @property
    def verdict(self) -> Verdict:
        if self.target is None or self.holds is None:
            return Verdict.NO_TARGET
        if self.holds:
            return Verdict.HOLDS
        best = self.ratio_max if self.target.relation == ">=" else self.ratio_min
        is_close = self.target.quantity == "ratio" and best is not None and self.target.is_met_by(best)
        return Verdict.WITHIN_SPREAD if is_close else Verdict.SHORT


def judged(row: Row) -> Row:
    """Gives `row` with `holds` set from its target. A figure that is not finite never holds."""
    if row.target is None:
        return row
    measured = row.ratio if row.target.quantity == "ratio" else row.value
    holds = measured is not None and math.isfinite(measured) and row.target.is_met_by(measured)
    return msgspec.structs.replace(row, holds=holds)


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """A whole run. machine: see `machine.describe`; date: ISO 8601, UTC."""

    machine: dict[str, object]
    commit: str
    command: str
    date: str
    seconds: float
    rows: list[Row]

    @property
    def short_rows(self) -> list[Row]:
        """Rows whose target does not hold, in order."""
        return [row for row in self.rows if row.holds is False]


def encode(report: Report) -> bytes:
    """The report as indented JSON with a final newline."""
    return msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n"


def decode(data: bytes) -> Report:
    """Reads a report that `encode` wrote. Raises msgspec.DecodeError on anything else."""
    return msgspec.json.decode(data, type=Report)
