"""bench/bench_hits.py: what is asked of `schedule` in decoding, and of dispatches that do not fit."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

from paramstore.core.trace import TraceEventKind

SCRIPTS = Path(__file__).parents[2] / "bench"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("bench_hits")


def test_hits_are_of_every_trace_but_the_one_that_repeats_itself(script: Any) -> None:
    recorded = [file.stem for file in (SCRIPTS / "traces").glob("*.trace")]
    assert sorted((*script.TRACES, "generate")) == sorted(recorded)


@pytest.mark.parametrize(
    ("name", "share", "rates", "holds"),
    [
        ("decode-1", 0.10, {"schedule": 0.35, "lru": 0.30, "belady": 0.99}, True),
        ("decode-1", 0.10, {"schedule": 0.35, "lru": 0.30, "belady": 1.01}, False),
        ("decode-1", 0.25, {"schedule": 0.54, "lru": 0.30, "belady": 1.0}, False),
        ("decode-1", 0.50, {"schedule": 0.74, "lru": 0.30, "belady": 1.0}, False),
        ("decode-1", 0.75, {"schedule": 0.29, "lru": 0.30, "belady": 1.0}, True),
        ("decode-1", 0.75, {"schedule": 0.27, "lru": 0.30, "belady": 1.0}, False),
        ("decode-4", 0.10, {"schedule": 0.31, "lru": 0.0, "ring": 0.34, "belady": 0.4}, False),
        ("decode-16", 0.10, {"schedule": 0.0, "lru": 0.30, "belady": 0.4}, True),
        ("decode-16", 0.25, {"schedule": 0.27, "lru": 0.30, "belady": 0.4}, False),
    ],
)
def test_schedule_is_near_the_best_that_knows_no_future_and_far_enough_towards_belady(
    script: Any, name: str, share: float, rates: dict[str, float], holds: bool
) -> None:
    assert script.decode_holds(name, share, rates) is holds


def test_a_dispatch_that_does_not_fit_has_nine_tenths_of_the_most_hits_under_every_policy(script: Any) -> None:
    row = script.bypass_row()
    assert row["holds"]
    assert row["ratios"].keys() == set(script.SLOT_POLICIES)
    assert all(0.9 <= ratio <= 1 for ratio in row["ratios"].values())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["decode-1", "decode-4", "decode-16"])
def test_the_beginning_of_a_decode_trace_holds_at_every_size(script: Any, name: str) -> None:
    trace = script.beginning(script.load(name), script.QUICK_USES)
    assert trace.events[-1].kind is TraceEventKind.STEP
    for share in script.SHARES:
        arenas, slots = script.row_of(trace, share), script.slots_row_of(trace, share)
        assert slots["policies"].keys() == {*script.SLOT_POLICIES, *script.BESIDE, "belady"}
        for row, rates in ((arenas, _arena_rates(arenas)), (slots, _slot_rates(slots))):
            assert row["holds"], (share, rates)
            assert rates["belady"] >= max(rates.values())
            assert row["ratio"] == pytest.approx(rates["schedule"] / rates["belady"])


def test_the_figures_that_are_kept_hold_and_are_those_of_the_page(script: Any) -> None:
    report = json.loads(max((SCRIPTS / "results").glob("hits-*.json")).read_text())
    cells = {(name, share) for name in script.TRACES for share in script.SHARES}
    assert {(row["trace"], row["share"]) for row in report["rows"]} == cells
    assert {(row["trace"], row["share"]) for row in report["slots"]} == {cell for cell in cells if cell[0].startswith("decode")}
    assert all(row["holds"] for row in (*report["rows"], *report["slots"], report["bypass"]))
    assert report["decode_model"] == json.loads((SCRIPTS / "traces" / "decode.json").read_text())
    page = (SCRIPTS / "README.md").read_text().replace("\n", " ")
    for name in script.TRACES:
        assert " / ".join(f"{row['ratio']:.3f}" for row in report["rows"] if row["trace"] == name) in page, name


def _arena_rates(row: dict[str, Any]) -> dict[str, float]:
    return {name: found["param_hit_rate"] for name, found in row["policies"].items()}


def _slot_rates(row: dict[str, Any]) -> dict[str, float]:
    return {name: found["hits"] / row["uses"] for name, found in row["policies"].items()}
