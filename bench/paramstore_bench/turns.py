"""Measures how long one turn of the daemon's event loop takes at most, while a namespace of many small records is committed and
rolled back as a whole. Everybody else's requests wait for that turn.

The store runs in this process, with its real threads, volume and catalog; a turn's time is what the loop's thread computed in it,
so that waiting for a core or for another thread does not count.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from paramstore.bench.context import Bench
from paramstore.bench.report.rows import SUBJECT, Row, Target, judged
from paramstore.config import Config
from paramstore.core.optimizers import AdamW
from paramstore.core.schema import Schema
from paramstore.daemon.assembly import assemble
from paramstore.engine.store import Store
from paramstore.engine.tables.namespace import View

KEYS = 131_072
LAYERS = 64
FILLS_AT_ONCE = 8
TURN_TARGET_MS = 10.0
SCHEMA = Schema.adamw({"w": (8,)}, param_dtype="bfloat16")
"""Schema of records of a few KiB: what a turn does for a key does not depend on the record's size."""


class Turns:
    """Times the loop's turns, from when it is made until `end`."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._began_s = time.thread_time()
        self._is_over = False
        self.count = 0
        self.longest_s = 0.0
        self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        now_s = time.thread_time()
        self.count += 1
        self.longest_s, self._began_s = max(self.longest_s, now_s - self._began_s), now_s
        if not self._is_over:
            self._loop.call_soon(self._turn)

    async def end(self) -> None:
        self._is_over = True
        await asyncio.sleep(0)


async def longest_turns(directory: Path, *, keys: int, tell: Callable[[str], None]) -> dict[str, tuple[float, float, int]]:
    """For a whole commit of initial values, one of trained ones and a rollback: seconds of its longest turn, seconds in all, and
    turns."""
    found: dict[str, tuple[float, float, int]] = {}

    async def timed(name: str, call: Awaitable[object]) -> None:
        tell(f"turns of {name}")
        turns, began_s = Turns(), time.perf_counter()
        await call
        await turns.end()
        found[name] = turns.longest_s, time.perf_counter() - began_s, turns.count

    service = await assemble(Config(dir=directory, host_budget_bytes=3 << 30, prefill=False, scrub_days=0.0))
    try:
        store = service.store
        view = await store.admission.create(
            "moe", SCHEMA.describe(), layers=list(range(LAYERS)), experts=keys // LAYERS, host_bytes=None
        )
        tell("initial values")
        await _initialize(store, view)
        await timed("commit of initial values", store.committer.commit(view, 0, b""))
        for step in (1, 2):
            tell(f"training, step {step}")
            await _train(store, view)
            await timed(f"commit of step {step}", store.committer.commit(view, step, b""))
        tell("training what is rolled back")
        await _train(store, view)
        await timed("rollback to step 2", store.rollback(view, 2))
        await timed("rollback to step 1", store.rollback(view, 1))
    finally:
        service.store.stop_applies()
        await service.close()
    return found


async def _initialize(store: Store, view: View) -> None:
    values = memoryview(bytearray(SCHEMA.initial_bytes))
    keys = list(view.namespace.keys)

    async def fill(first: int) -> None:
        for key in keys[first::FILLS_AT_ONCE]:
            await store.initializer.put(view, key, values)

    await store.initializer.begin(view)
    await asyncio.gather(*map(fill, range(FILLS_AT_ONCE)))
    await store.initializer.end(view)


async def _train(store: Store, view: View) -> None:
    _, gradient = store.uploads.open(view, SCHEMA.gradient_bytes, [view])
    store.applies.push(view, [(key, gradient, 0) for key in view.namespace.keys])
    await store.applies.apply(view, AdamW(lr=0.1), 1.0)
    store.uploads.drop(view)
    gradient.close()


def measure_turns(bench: Bench, *, keys: int = KEYS) -> list[Row]:
    """Measures the longest turns. Where the service runs in a process of its own it runs within `garbage.tables_spared`, and so
    should the caller."""
    with bench.folder("turns") as directory:
        found = asyncio.run(longest_turns(directory, keys=keys, tell=bench.tell))
    return [
        judged(
            Row(
                name="longest turn of the loop", case=name, subject=SUBJECT, value=1e3 * longest_s, unit="ms",
                record_bytes=SCHEMA.record_bytes, target=Target("value", "<=", TURN_TARGET_MS),
                parts={"keys": float(keys), "turns": float(count), "seconds": seconds},
            )
        )
        for name, (longest_s, seconds, count) in found.items()
    ]  # fmt: skip
