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


@pytest.mark.parametrize(("fast_reads", "holds"), [(54, True), (53, False)])
def test_a_row_stands_beside_the_hottest_that_fit(script: Any, fast_reads: int, holds: bool) -> None:
    alike, apart = (script.Counted(100, reads, 60, 70, 0.25, classes) for reads, classes in ((50, (0, 0)), (fast_reads, (1, 0))))
    row = script.row_of("imported", SCHEMA, alike, apart)
    assert row.holds is holds
    assert (row.limit, row.parts["by_free_share"], row.parts["most_read"]) == (0.6, 0.5, 0.7)


@pytest.mark.parametrize("classes", [((0, 1), (1, 0)), ((0, 0), (0, 0))])
def test_volumes_that_were_not_told_apart_as_they_should_end_the_run(script: Any, classes: tuple[Any, Any]) -> None:
    alike, apart = (script.Counted(100, 50, 60, 70, 0.25, each) for each in classes)
    with pytest.raises(StepMismatch, match="run it on an idle machine"):
        script.row_of("imported", SCHEMA, alike, apart)
