"""bench/bench_balance.py: which batches a placement is chosen by, what a row says, and the figures that are kept."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

from paramstore.bench.report.rows import decode
from paramstore.core.balancing import ANTI_CORRELATION, AS_IT_IS, GREEDY, choose_placement
from paramstore.core.placement import Placement
from paramstore.core.trace import unpack_trace

SCRIPTS = Path(__file__).parents[2] / "bench"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("bench_balance")


def test_a_placement_is_chosen_by_two_thirds_and_measured_on_the_rest(script: Any) -> None:
    """Experts 0 and 1 are as loaded as 8 others together until the last third, and idle in it."""
    seen, unseen = [16, 16] + [2] * 14, [0, 0] + [6] * 14
    layer = script.judge([seen] * 6 + [unseen] * 3)
    assert layer.chosen == GREEDY == choose_placement([seen] * 6, Placement.in_order(16, 8)).name
    assert layer.shares == pytest.approx({AS_IT_IS: 1 / 7, GREEDY: 1 / 7, ANTI_CORRELATION: 1 / 7})
    assert layer.least == 1 / 8
    assert script.judge([seen] * 9).least == 16 / 60


@pytest.mark.parametrize(("name", "value", "holds"), [("train", 0.3, True), ("train", 0.31, False), ("generate", 0.21, False)])
def test_the_choice_is_no_worse_than_in_order_and_the_trace_that_repeats_itself_is_spread(
    script: Any, name: str, value: float, holds: bool
) -> None:
    layers = [
        script.Layer({AS_IT_IS: 0.3, GREEDY: share, ANTI_CORRELATION: 0.5}, GREEDY, 0.125) for share in (value - 0.1, value + 0.1)
    ]
    row = script.row_of(name, layers, counted=True)
    assert (row.holds, row.limit, row.ratio) == (holds, 0.3, pytest.approx(value / 0.3))
    assert (row.parts["layers_greedy"], row.parts["worst_layer"], row.note) == (2, pytest.approx(value + 0.1), "tokens")
    assert row.parts["layers_worse_than_in_order"] == 1


def test_layers_of_a_trace_are_told_apart(script: Any) -> None:
    trace = unpack_trace((SCRIPTS / "traces" / "decode-16.trace").read_bytes())
    histories = list(script.histories(trace))
    assert len({repr(history) for history in histories}) == len(trace.header.layers)
    assert {len(history) for history in histories} == {trace.steps}


def test_the_figures_that_are_kept_hold_and_are_those_of_the_page(script: Any) -> None:
    report = decode(max((SCRIPTS / "results").glob("balance-*.json")).read_bytes())
    assert sorted(row.case for row in report.rows) == sorted(file.stem for file in (SCRIPTS / "traces").glob("*.trace"))
    assert all(row.holds for row in report.rows)
    page = (SCRIPTS / "README.md").read_text()
    for row in report.rows:
        shares = (row.limit, row.parts["greedy"], row.parts["anti_correlation"], row.value, row.parts["least"])
        assert f"| `{row.case}` | {row.note} | {' | '.join(f'{share:.3f}' for share in shares if share is not None)} |" in page
