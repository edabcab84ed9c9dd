"""The picture of a sweep: a curve for each policy, and time only from a rate that was given."""

from __future__ import annotations

from pathlib import Path

import pytest

from paramstore.core.schema import Schema
from paramstore.core.trace import Trace, TraceEvent, TraceEventKind, TraceHeader
from paramstore.errors import ConfigError
from paramstore.sim.picture import STYLES, Cost, draw
from paramstore.sim.sweep import POLICIES, READER, Point

HEADER = TraceHeader("t", Schema.param({"w": ((2, 2), "float32")}).describe(), [0], 8, "by hand")
TRACE = Trace(HEADER, (TraceEvent(TraceEventKind.STEP, 0, ()),) * 4)


def point(policy: str, slots: int, misses: int) -> Point:
    return Point(READER, policy, slots, slots / 8, 100, misses, misses * 1000, slots * 500, {})


def test_a_step_takes_its_bytes_at_the_rate_and_its_arithmetic() -> None:
    assert Cost(1000.0, "given").step_s(point("lru", 2, 20), 4) == 5.0
    assert Cost(1000.0, "given", 0.25).step_s(point("lru", 2, 20), 4) == 5.25


def test_every_policy_has_a_colour_and_a_marker_of_its_own() -> None:
    assert {name for names in POLICIES.values() for name in names} == STYLES.keys()
    assert len({colour for colour, _, _ in STYLES.values()}) == len(STYLES)
    assert len({marker + line for _, marker, line in STYLES.values()}) == len(STYLES)


def test_a_trace_without_steps_says_nothing_of_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'t' marks no step"):
        draw(Trace(HEADER, ()), [point("lru", 2, 20)], tmp_path / "a.png", None)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cost", "words"),
    [(None, "MiB moved in a step"), (Cost(1e6, "1MB/s"), "loads of a step, ms (modelled from counts)"),
     (Cost(1e6, "1MB/s", 0.003), "latency of a step, ms (modelled from counts)")],
)  # fmt: skip
def test_the_axis_says_what_is_counted_and_what_is_modelled(tmp_path: Path, cost: Cost | None, words: str) -> None:
    import matplotlib as mpl

    points = [point(name, slots, 100 // slots) for slots in (2, 4) for name in POLICIES[READER]]
    with mpl.rc_context({"svg.fonttype": "none"}):
        draw(TRACE, points, tmp_path / "a.svg", cost)
    text = (tmp_path / "a.svg").read_text()
    for said in (words, "miss rate", "memory of the slots, MiB", "% of the 8 experts", *POLICIES[READER]):
        assert said in text, said
    assert ("at 1MB/s" in text) is (cost is not None)
    assert ("as counted: no time is modelled" in text) is (cost is None)
    assert "--load-rate" not in text
