"""The patrol: everything is checked once in `scrub_days`, at a gentle pace."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from paramstore.core.schema import Schema
from paramstore.engine.tables.namespace import View
from paramstore.upkeep import patrol as patrol_module
from paramstore.upkeep.patrol import BUSY_SHARE_MAX, BYTES_PER_S_MAX, DAY_S, QUIET_S, RETRY_S, patrol_start
from paramstore_testkit.disks.machine import Machine
from paramstore_testkit.stores.patrolled import Patrolled
from paramstore_testkit.stores.small_store import EXPERTS, SCHEMA, create, run, train

KEY = (0, 1)


# --- how fast


@pytest.mark.parametrize("scrub_days", [14.0, 1.0, 0.25])
def test_a_pass_is_spread_evenly_over_the_days_that_are_set(scrub_days: float) -> None:
    async def scenario() -> None:
        machine = Machine()
        await create(machine.start())
        patrolled = Patrolled(machine, scrub_days=scrub_days)
        stats = await patrolled.until(scrub_days * 2.6)
        times = patrolled.records_read()
        share_s = scrub_days * DAY_S / EXPERTS
        assert times == pytest.approx([QUIET_S + number * share_s for number in range(2 * EXPERTS + 3)], abs=1.0)
        assert (stats["last"]["records"], stats["last"]["found"], stats["last"]["state"]) == (EXPERTS, 0, "done")
        assert stats["last"]["copies"] == 4
        assert stats["running"]["records"] == 3

    run(scenario())


def test_every_record_is_read_again_within_a_pass() -> None:
    async def scenario() -> None:
        machine = Machine()
        await create(machine.start())
        patrolled = Patrolled(machine, start_at=0.6)
        keys: list[tuple[float, Any]] = []
        check_key = patrolled.scrubber.check_key

        async def noted(scrub: Any, planned: Any) -> None:
            keys.append((patrolled.clock.now_s(), planned[1]))
            await check_key(scrub, planned)

        patrolled.scrubber.check_key = noted  # type: ignore[method-assign]
        await patrolled.until(60)
        order = [key for _, key in keys]
        assert order[:5] == [(0, 2), (0, 3), (0, 0), (0, 1), (0, 2)]
        for key in order[:EXPERTS]:
            times = [at_s for at_s, one in keys if one == key]
            assert len(times) >= 4
            assert all(later - sooner <= 14 * DAY_S + 1 for sooner, later in pairwise(times))

    run(scenario())


@pytest.mark.parametrize(("schema", "experts"), [(SCHEMA, 256), (Schema.param({"w": ((1 << 20,), "uint8")}), 8)])
def test_it_never_reads_faster_than_its_limit_and_needs_few_pauses(schema: Schema, experts: int) -> None:
    async def scenario() -> None:
        machine = Machine(volume_bytes=60 << 20)
        await create(machine.start(), schema=schema, experts=experts)
        patrolled = Patrolled(machine, scrub_days=1e-9)  # as fast as it may
        await patrolled.until((QUIET_S + 0.6) / DAY_S)
        reads = [(at_s, length_bytes) for at_s, length_bytes in patrolled.reads if at_s > QUIET_S]
        total_bytes = sum(length_bytes for _, length_bytes in reads)
        assert total_bytes > BYTES_PER_S_MAX / 4
        seconds = reads[-1][0] - QUIET_S
        slack_s = patrol_module.PAUSE_MIN_S
        assert total_bytes <= BYTES_PER_S_MAX * (seconds + slack_s) * 1.01
        assert len(patrolled.pauses_s) < 3 + 1.5 * seconds / slack_s

    run(scenario())


@pytest.mark.parametrize(("experts", "read_s"), [(64, 0.01), (1, 1.0)])
def test_pieces_are_under_way_for_a_twentieth_of_the_time_at_most(experts: int, read_s: float) -> None:
    async def scenario() -> None:
        machine = Machine(volume_bytes=40 << 20)
        await create(machine.start(), experts=experts)
        patrolled = Patrolled(machine, scrub_days=1e-9)
        patrolled.read_s = lambda length_bytes: read_s  # 2.8 MB/s or less: slower than its limit of bytes
        await patrolled.until((QUIET_S + 2000 * read_s) / DAY_S)
        busy_s = read_s * len(patrolled.reads)
        seconds = patrolled.clock.now_s() - QUIET_S
        assert seconds > 1500 * read_s
        assert 0.8 * BUSY_SHARE_MAX < busy_s / seconds < 1.1 * BUSY_SHARE_MAX

    run(scenario())


def test_a_pass_that_takes_longer_than_set_is_told(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        machine = Machine()
        await create(machine.start())
        patrolled = Patrolled(machine, scrub_days=0.0001)
        patrolled.read_s = lambda length_bytes: 1.0
        await patrolled.until(0.01)

    run(scenario())
    assert "took longer than scrub_days=0.0001" in caplog.text


def test_a_record_is_read_in_one_go_however_slow_the_pass_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paramstore.upkeep.scrubber.PIECE_BYTES", 4096)

    async def scenario() -> None:
        machine = Machine()
        await create(machine.start())
        patrolled = Patrolled(machine)
        await patrolled.until(1.0)
        times = [at_s for at_s, length_bytes in patrolled.reads if length_bytes in (4096, 8192)]
        assert len(times) > 3
        assert times[-1] - times[0] < 0.1

    run(scenario())


# --- when


def test_it_keeps_still_at_first_and_is_off_at_zero_days() -> None:
    async def scenario() -> None:
        machine = Machine()
        await create(machine.start())
        patrolled = Patrolled(machine)
        await patrolled.until((QUIET_S - 1) / DAY_S)
        assert patrolled.reads == []
        off = Patrolled(machine, scrub_days=0.0)
        off.patrol.start()
        assert off.patrol._task is None
        assert off.patrol.stats() == {"scrub_days": 0.0, "running": None, "last": None, "last_ended_s": None}
        await off.patrol.close()

    run(scenario())


def test_daemons_begin_at_different_places() -> None:
    places = [patrol_start(bytes([store]) * 16, started_s) for store in range(8) for started_s in (0.0, 0.001, 60.0, 61.0)]
    assert all(0.0 <= place < 1.0 for place in places)
    assert len({int(place * 8) for place in places}) >= 6
    assert patrol_start(bytes(16), 1.5) == patrol_start(bytes(16), 1.5)


def test_a_namespace_that_came_or_grew_is_covered_by_the_next_pass() -> None:
    async def scenario() -> None:
        machine = Machine(volume_bytes=48 << 20)
        store = machine.start()
        one = await create(store, "one", host_bytes=16 << 20)
        patrolled = Patrolled(machine)
        came: list[View] = []

        async def come() -> None:
            if patrolled.clock.now_s() > DAY_S and not came:
                came.append(await create(store, "two", host_bytes=16 << 20))
                await train(store, one, [KEY])
                await store.committer.commit(one, 1, b"")

        patrolled.meanwhile = come
        stats = await patrolled.until(20)
        assert came
        assert (stats["last"]["namespaces"], stats["last"]["records"]) == (["one"], EXPERTS + 1)
        assert (stats["running"]["namespaces"], stats["running"]["records_total"]) == (["one", "two"], 2 * EXPERTS + 1)

    run(scenario())


def test_an_empty_store_is_looked_at_again_soon() -> None:
    async def scenario() -> None:
        machine = Machine()
        store = machine.start()
        patrolled = Patrolled(machine)

        async def come() -> None:
            if patrolled.clock.now_s() > 3 * RETRY_S and not store.namespaces:
                await create(store)

        patrolled.meanwhile = come
        await patrolled.until(1.0)
        assert patrolled.records_read()[0] < 5 * RETRY_S
        assert len(patrolled.pauses_s) < 10

    run(scenario())
