"""The rows of expert-parallel layers: pairs beside what is asked, time as speed, counts as they are."""

from __future__ import annotations

import pytest

from paramstore.bench.pairs import Pair, Pairs, Sample
from paramstore_bench.moe.found import Compared
from paramstore_bench.moe.rows import layer_row, service_rows
from paramstore_bench.moe.sizes import Sizes
from paramstore_bench.moe.task import Part

SIZES = Sizes(experts=8, width=4, inner=4, tokens=16, top_k=2, skew=1.0)


def sample(seconds: float, update_s: float, count: float) -> Sample:
    return Sample(64, seconds, parts={"update_s": update_s, "pushed_bytes": 10 * count, "leased": count})


def found(*pairs: tuple[Sample, Sample]) -> Compared:
    return Compared(Pairs(tuple(Pair(*pair) for pair in pairs)), {"y": 0.0}, {"sent_bytes": 7.0})


def test_a_job_is_judged_by_what_it_pushes_and_leases_and_by_its_time() -> None:
    pairs = (sample(1.0, 0.5, 25), sample(1.2, 0.8, 100)), (sample(1.0, 0.5, 27), sample(1.2, 1.0, 100))
    rows = list(service_rows(SIZES, found(*pairs)))
    assert [(row.name, row.ratio, row.holds) for row in rows] == [
        ("gradients pushed", 0.26, True),
        ("experts leased", 0.26, True),
        ("gradient norm and apply", pytest.approx(1.8), True),
        ("training step", 1.2, True),
    ]
    assert [(row.value, row.limit) for row in rows[:2]] == [(260, 1000), (26, 100)]
    assert (rows[2].ratio_min, rows[2].ratio_max) == (1.6, 2.0)
    assert rows[3].parts["ours_update_s"] == 0.5
    short = list(service_rows(SIZES, found((sample(1.0, 0.5, 27), sample(1.1, 0.8, 100)))))
    assert [row.holds for row in short] == [False] * 4


@pytest.mark.parametrize(
    ("part", "seconds", "holds"),
    [
        (Part.BARE, 1.049, True), (Part.BARE, 1.051, False), (Part.LOADED, 1.051, False), (Part.CAPACITY, 0.333, True),
        (Part.CAPACITY, 0.334, False),
    ],
)  # fmt: skip
def test_a_layer_is_judged_by_its_time_beside_another(part: Part, seconds: float, holds: bool) -> None:
    row = layer_row(part, SIZES, found((Sample(64, seconds), Sample(64, 1.0))))
    assert row.holds is holds
    assert (row.limit, row.parts["ours_s"], row.parts["sent_bytes"], row.parts["difference_y"]) == (64.0, seconds, 7.0, 0.0)
