"""The rows on checksums: rates of one thread over whole chunks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from paramstore.bench.context import Bench
from paramstore.bench.plan import MIB, Plan
from paramstore.testing.clock import ManualClock
from paramstore_bench.checksums import measure_checksums


class Ticking(ManualClock):
    """A second passes between two looks."""

    def now_s(self) -> float:
        self.advance(1.0)
        return super().now_s()


def test_a_rate_is_the_median_of_the_rounds(tmp_path: Path) -> None:
    xxh3, sums = measure_checksums(Bench(replace(Plan.quick(), rounds=3), tmp_path, clock=Ticking()), image_bytes=2 * MIB)
    assert (xxh3.name, xxh3.holds, sums.name, sums.holds) == ("checksums", None, "device sums", False)
    for row in (xxh3, sums):
        assert (row.unit, row.value) == ("GB/s", 2 * MIB / 1e9)
        assert row.parts == {"min_gb_s": row.value, "max_gb_s": row.value, "image_bytes": 2 * MIB}
