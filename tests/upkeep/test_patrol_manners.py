"""The patrol beside everything else: it gives way, tells damage once, ends when the store does."""

from __future__ import annotations

import asyncio
import logging
from random import Random
from typing import Any

import pytest

from paramstore.engine.capacity import prefill
from paramstore.engine.store import Store
from paramstore.engine.tables.namespace import View
from paramstore.errors import TicketCancelled
from paramstore.testing.volumes import Fault, FaultyVolume
from paramstore.upkeep import patrol as patrol_module
from paramstore.upkeep.patrol import DAY_S, RETRY_S
from paramstore_testkit.disks.machine import Machine
from paramstore_testkit.stores.patrolled import Patrolled, Stats
from paramstore_testkit.stores.small_store import EXPERTS, create, run, train, turns
from paramstore_testkit.trial import telling

KEY = (0, 1)


def damage(machine: Machine, view: View, key: tuple[int, int] = KEY, step: int = 0) -> None:
    located = view.namespace.steps.ledger.at(key, step)
    assert located is not None
    machine.disks[located.extent.volume].corrupt(located.extent.offset_bytes)


def errors_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]


# --- beside others


def test_a_verify_that_somebody_asks_for_goes_first_and_the_patrol_goes_on_afterwards() -> None:
    async def scenario() -> None:
        machine = Machine()
        await create(machine.start())
        patrolled = Patrolled(machine)
        patrolled.ends_at_s = 4 * DAY_S
        patrolled.patrol.start()
        await turns(100)
        before = len(patrolled.records_read())
        assert before == 2
        scrub = patrolled.scrubber.start(None, None, None)
        patrolled.ends_at_s = 0.0
        result = await patrolled.scrubber.wait(scrub)
        assert result["records"] == EXPERTS
        assert len(patrolled.records_read()) == before + EXPERTS
        await patrolled.patrol.close()

    run(scenario())


def test_while_a_verify_runs_the_patrol_reads_nothing() -> None:
    async def scenario() -> None:
        machine = Machine()
        await create(machine.start())
        patrolled = Patrolled(machine)
        slow = asyncio.Event()
        asked: list[Any] = []

        async def ask() -> None:
            if not asked and patrolled.clock.now_s() > DAY_S:
                asked.append(patrolled.scrubber.start(None, None, None))
                patrolled.scrubber._running = asked[0]

        plan = patrolled.scrubber.plan

        async def slowly(scrub: Any) -> Any:
            if scrub in asked:
                await slow.wait()
            return await plan(scrub)

        patrolled.scrubber.plan = slowly  # type: ignore[method-assign]
        patrolled.meanwhile = ask
        patrolled.ends_at_s = 30 * DAY_S
        patrolled.patrol.start()
        await turns(300)
        assert asked
        assert len(patrolled.records_read()) == 1
        slow.set()
        assert (await patrolled.scrubber.wait(asked[0]))["records"] == EXPERTS
        await turns(300)
        last: Any = patrolled.patrol.stats()["last"]
        assert (last["state"], last["records"]) == ("done", EXPERTS)
        await patrolled.patrol.close()

    run(scenario())


def test_no_two_pieces_are_ever_under_way() -> None:
    async def scenario() -> None:
        machine = Machine()
        store = machine.start()
        await create(store)
        patrolled = Patrolled(machine, scrub_days=1e-9)
        assert machine.workers is not None
        await turns()  # the room for the next commit is made
        machine.workers.pause()
        patrolled.patrol.start()
        await turns()
        assert machine.workers.waiting == 1
        scrub = patrolled.scrubber.start(None, None, None)
        await turns()
        assert machine.workers.waiting == 1
        patrolled.scrubber.cancel(scrub, TicketCancelled("enough"))
        await turns()
        assert machine.workers.waiting == 1
        await patrolled.patrol.close()
        again = patrolled.scrubber.start(None, None, None)
        await turns()
        assert machine.workers.waiting == 1
        machine.workers.resume()
        assert (await patrolled.scrubber.wait(again))["records"] == EXPERTS

    run(scenario())


def test_it_has_the_lowest_class_and_pins_nothing_between_records() -> None:
    async def scenario() -> None:
        machine = Machine()
        store = machine.start()
        await create(store)
        patrolled = Patrolled(machine)
        seen: list[Any] = []

        async def look() -> None:
            assert not store.transfers._planner.space.pins
            assert store.transfers.runner.is_idle

        patrolled.meanwhile = look
        submit = store.transfers.runner.submit
        store.transfers.runner.submit = lambda transfer: (seen.append(transfer.urgency), submit(transfer))[1]  # type: ignore[method-assign]
        await patrolled.until(20)
        assert len(seen) > EXPERTS
        assert set(seen) == {max(type(seen[0]))}

    run(scenario())


def test_the_zero_fill_comes_to_its_end_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill, "PAUSE_S", 0.0)

    async def scenario() -> None:
        machine = Machine()
        store = machine.start()
        await create(store)
        patrolled = Patrolled(machine, scrub_days=1e-9)
        patrolled.patrol.start()
        while not patrolled.records_read():
            await asyncio.sleep(0)
        assert store._volumes._prefill._has_unwritten(0)
        store._volumes._prefill.start()
        before = len(patrolled.reads)
        while store._volumes._prefill._has_unwritten(0):
            await asyncio.sleep(0)
        assert len(patrolled.reads) > before
        await patrolled.patrol.close()

    run(scenario())


# --- what it says


def test_what_is_damaged_is_logged_once_as_an_error_with_its_place(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)

    async def scenario() -> None:
        machine = Machine()
        store = machine.start()
        view = await create(store, step=7)
        damage(machine, view, KEY, 7)
        machine.disks[0].corrupt(0)
        patrolled = Patrolled(machine)
        stats = await patrolled.until(14 + 8)
        assert (stats["last"]["found"], stats["running"]["found"]) == (2, 2)
        assert stats["last"]["findings"][0]["key"] == KEY
        assert stats["last"]["copy_findings"][0]["kind"] == "superblock"

    run(scenario())
    copy, record = errors_in(caplog)
    assert copy.startswith("patrol: superblock, copy 0, volume 0, offset 0: ")
    assert record.startswith("patrol: moe (0, 1), step 7, volume 0, offset ")
    mine = [one for one in caplog.records if one.name == patrol_module.__name__]
    assert len(mine) == 2 + 1  # and a line at the end of the pass


def test_damage_that_went_and_came_again_is_told_again(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        machine = Machine()
        store = machine.start()
        view = await create(store)
        patrolled = Patrolled(machine)
        located = view.namespace.steps.ledger.at(KEY, 0)
        assert located is not None
        flips: list[int] = []

        async def flip() -> None:
            passed = int(patrolled.clock.now_s() / (14 * DAY_S))
            if len(flips) <= passed:
                flips.append(passed)
                damage(machine, view)  # the second flip mends the first

        patrolled.meanwhile = flip
        await patrolled.until(3 * 14 - 1)

    run(scenario())
    assert [one for one in errors_in(caplog) if "(0, 1)" in one] == 2 * [errors_in(caplog)[0]]


def test_a_volume_that_cannot_be_read_ends_no_pass_and_changes_no_pace(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        machine = Machine()
        store = machine.start()
        await create(store)
        faulty = FaultyVolume(machine.disks[0], [])
        machine.volumes = {0: faulty}
        patrolled = Patrolled(machine)
        faulty.plan = (Fault("read", faulty.calls["read"] + 1, forever=True),)
        stats = await patrolled.until(13.9)
        assert (stats["last"]["found"], stats["last"]["state"]) == (EXPERTS + 4, "done")
        times = patrolled.records_read()
        assert times[EXPERTS - 1] - times[0] > 10 * DAY_S

    run(scenario())
    assert len(errors_in(caplog)) == EXPERTS + 4


def test_a_bug_ends_the_pass_and_the_next_one_is_tried(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        machine = Machine()
        await create(machine.start())
        patrolled = Patrolled(machine)
        hashing, patrolled.scrubber._hashing = patrolled.scrubber._hashing, None  # type: ignore[assignment]

        async def mend() -> None:
            if patrolled.clock.now_s() > RETRY_S:
                patrolled.scrubber._hashing = hashing

        patrolled.meanwhile = mend
        stats = await patrolled.until(1.0)
        assert stats["last"]["state"] == "failed"
        assert stats["running"]["records"] == 1

    run(scenario())
    assert caplog.text.count("a pass of the patrol failed") == 1


def test_the_end_of_the_store_waits_for_no_device() -> None:
    async def scenario() -> None:
        machine = Machine()
        store = machine.start()
        await create(store)
        patrolled = Patrolled(machine)
        assert machine.workers is not None
        await turns()  # the room for the next commit is made
        machine.workers.pause()
        patrolled.patrol.start()
        await turns()
        assert machine.workers.waiting == 1
        await patrolled.patrol.close()
        assert patrolled.patrol._task is not None
        assert patrolled.patrol._task.cancelled()
        machine.workers.resume()

    run(scenario())


@pytest.mark.parametrize("seed", range(6))
def test_beside_random_training_it_finds_nothing(seed: int) -> None:
    async def scenario() -> None:
        random = Random(seed)
        machine = Machine(seed=seed, volume_count=1 + seed % 2, volume_bytes=20 << 20)
        store: Store = machine.start()
        view = await create(store)
        patrolled = Patrolled(machine, scrub_days=1e-9, start_at=random.random())
        patrolled.patrol.start()
        for step in range(1, 60):
            await train(store, view, [(0, random.randrange(EXPERTS))])
            if random.random() < 0.6:
                await store.committer.commit(view, step, b"x" * random.randrange(9000))
            elif random.random() < 0.3:
                await store.rollback(view, random.choice(view.namespace.steps.ledger.steps()))
        await turns(200)
        stats: Stats = patrolled.patrol.stats()
        assert stats["last"]["records"]
        for result in (stats["last"], stats["running"] or stats["last"]):
            assert (result["found"], result["findings"], result["copy_findings"]) == (0, [], [])
        await patrolled.patrol.close()

    with telling(lambda: f"seed {seed}"):
        run(scenario())
