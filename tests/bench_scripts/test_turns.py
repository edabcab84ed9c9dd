"""The rows on turns of the loop: each is of one call, counts its turns, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from paramstore.bench.context import Bench
from paramstore.bench.plan import Plan
from paramstore_bench.turns import LAYERS, TURN_TARGET_MS, Turns, measure_turns


@pytest.mark.slow
def test_each_call_has_its_longest_turn(tmp_path: Path) -> None:
    rows = measure_turns(Bench(Plan.quick(), tmp_path), keys=2 * LAYERS)
    assert [row.case for row in rows] == [
        "commit of initial values", "commit of step 1", "commit of step 2", "rollback to step 2", "rollback to step 1",
    ]  # fmt: skip
    for row in rows:
        assert row.unit == "ms"
        assert row.target is not None
        assert row.target.bound == TURN_TARGET_MS
        assert row.parts["turns"] > 1
        assert 0 < row.value <= 1e3 * row.parts["seconds"]
    assert list(tmp_path.iterdir()) == []


def test_the_longest_turn_is_that_of_who_computes_and_waiting_is_none() -> None:
    async def scenario() -> tuple[Turns, float]:
        turns = Turns()
        await asyncio.sleep(0)
        await asyncio.sleep(0.01)
        began_s = time.thread_time()
        while time.thread_time() - began_s < 0.005:
            pass
        spent_s = time.thread_time() - began_s
        await asyncio.sleep(0)
        await turns.end()
        return turns, spent_s

    turns, spent_s = asyncio.run(scenario())
    assert turns.longest_s >= spent_s
    assert turns.count >= 3
