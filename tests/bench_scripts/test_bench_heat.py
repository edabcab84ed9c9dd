"""bench/bench_heat.py: how the trace is cut, what a row says, and that a run whose volumes were not told apart gives none."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

from paramstore.core.schema import Schema
from paramstore.core.trace import TraceEventKind, unpack_trace
from paramstore.errors import StepMismatch

SCRIPTS = Path(__file__).parents[2] / "bench"
SCHEMA = Schema.param({"w": ((4,), "float32")})
TRAINED = Schema.adamw({"w": (4,)}, param_dtype="float32", updates="touched")


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("bench_heat")


def test_the_trace_is_cut_between_tokens_into_halves_of_as_many_uses(script: Any) -> None:
    trace = unpack_trace(script.TRACE.read_bytes())
    first, second = script.halves(trace, script.QUICK_USES)
    assert first.events + second.events == trace.events[: len(first.events) + len(second.events)]
    assert first.events[-1].kind is second.events[-1].kind is TraceEventKind.STEP
    uses = [sum(map(len, script.leases(half))) for half in (first, second)]
    assert uses[0] == pytest.approx(uses[1], rel=0.05)
    assert sum(uses) == pytest.approx(script.QUICK_USES, rel=0.05)


def counted(script: Any, fast_reads: int, classes: tuple[int, int]) -> Any:
    return script.Counted(100, fast_reads, hottest=60, beyond_memory=80, most_read=90, resident=0.25, classes=classes)


@pytest.mark.parametrize(("fast_reads", "holds"), [(54, True), (53, False)])
def test_an_import_stands_beside_the_hottest_that_fit(script: Any, fast_reads: int, holds: bool) -> None:
    row = script.row_of("imported", SCHEMA, counted(script, 50, (0, 0)), counted(script, fast_reads, (1, 0)))
    assert row.holds is holds
    assert (row.limit, row.parts["by_free_share"], row.parts["most_read"]) == (0.6, 0.5, 0.9)


@pytest.mark.parametrize(("alike_reads", "limit"), [(50, 0.8), (85, 0.85)])
def test_training_stands_beside_free_share_and_the_hottest_that_memory_leaves_too(
    script: Any, alike_reads: int, limit: float
) -> None:
    row = script.row_of("trained", TRAINED, counted(script, alike_reads, (0, 0)), counted(script, 73, (1, 0)))
    assert (row.limit, row.holds) == (limit, limit == 0.8)


def test_room_is_taken_by_what_fits_and_a_record_that_changes_takes_three_extents(script: Any) -> None:
    room = script.Room(4, changed={(0, 0), (0, 1)})
    heat = {(0, 0): 5.0, (0, 1): 4.0, (0, 2): 3.0, (0, 3): 2.0}
    assert room.hottest(heat) == {(0, 0), (0, 2)}
    assert room.hottest(heat, beyond=1) == {(0, 1), (0, 2)}


@pytest.mark.parametrize("classes", [((0, 1), (1, 0)), ((0, 0), (0, 0))])
def test_volumes_that_were_not_told_apart_as_they_should_end_the_run(script: Any, classes: tuple[Any, Any]) -> None:
    alike, apart = (counted(script, 50, each) for each in classes)
    with pytest.raises(StepMismatch, match="run it on an idle machine"):
        script.row_of("imported", SCHEMA, alike, apart)
