"""Rows of raw and peers, on records so small that only their shape means anything."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from paramstore.bench.baseline import measure_baseline
from paramstore.bench.context import Bench
from paramstore.bench.limits import pages
from paramstore.bench.limits.pages import Slab
from paramstore.bench.pairs import Sample
from paramstore.bench.plan import MIB, Plan, RecordSize
from paramstore.bench.report.plot import READ, WRITE
from paramstore.errors import VolumeError


class HalfSpeed:
    """A peer whose every sample takes a second."""

    name = "half speed"

    def __init__(self, directory: Path, slab: Slab, *, record_bytes: int, record_count: int) -> None:
        self._bytes = record_bytes
        assert slab.length_bytes >= record_bytes * record_count
        assert list(directory.iterdir()) == []

    def read(self, order: Sequence[int]) -> Sample:
        return Sample(len(order) * self._bytes, 1.0)

    def write(self, order: Sequence[int]) -> Sample:
        return Sample(len(order) * self._bytes, 1.0)

    def close(self) -> None:
        pass


@pytest.mark.slow
def test_every_kind_of_memory_and_every_peer_gets_a_read_and_a_write_row(tmp_path: Path) -> None:
    plan = replace(Plan.quick(), set_bytes=4 * MIB)
    try:
        rows = measure_baseline(Bench(plan, tmp_path, peers=(HalfSpeed,)), RecordSize(2 * MIB))
    except VolumeError as error:
        pytest.skip(str(error))

    assert [(row.subject, row.case, row.name) for row in rows] == [
        *((("raw"), str(kind), name) for kind in pages.available_kinds() for name in (READ, WRITE)),
        ("half speed", "", READ),
        ("half speed", "", WRITE),
    ]
    assert all(row.ratio is not None and row.ratio_min <= row.ratio <= row.ratio_max for row in rows)  # type: ignore[operator]
    assert list(tmp_path.iterdir()) == []
