"""The service: one set of figures and one end for the store and its upkeep."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from paramstore.errors import StoreUnavailable
from paramstore.upkeep.notes import NOTE, CopyFinding
from paramstore.upkeep.progress import FINDINGS_MAX, STATS_FINDINGS_MAX, Finding, Pace, Scrub
from paramstore_testkit.disks.machine import Machine
from paramstore_testkit.stores.small_store import create, run, turns


def test_it_patrols_as_it_is_set_and_says_so_in_its_figures() -> None:
    async def scenario() -> None:
        machine = Machine(scrub_days=14.0)
        machine.start()
        service = machine.service
        assert service.patrol._task is not None
        stats: Any = await service.stats()
        assert stats["patrol"] == {"scrub_days": 14.0, "running": None, "last": None, "last_ended_s": None}
        assert stats["verify"] == {"running": None, "last": None}
        await service.close()
        assert service.patrol._task.cancelled()

    run(scenario())


def test_its_figures_describe_a_few_findings_of_every_scrub_and_count_all() -> None:
    async def scenario() -> None:
        machine = Machine()
        machine.start()
        service, scrub = machine.service, Scrub([], None, Pace(None, 0.0), 0.0)
        for number in range(FINDINGS_MAX):
            scrub.findings.add_record(Finding("moe", (0, number), (1,), 0, 1, 0, 4096 * number, "damaged"))
            scrub.findings.add_copy(CopyFinding(NOTE, "moe", number, 0, 4096 * number, 0, "damaged"))
        service.scrubber._running = service.scrubber._last = service.patrol._running = service.patrol._last = scrub
        stats: Any = await service.stats()
        described = [stats[upkeep][which] for upkeep in ("verify", "patrol") for which in ("running", "last")]
        assert [one["found"] for one in described] == [2 * FINDINGS_MAX] * 4
        assert [len(one[kind]) for one in described for kind in ("findings", "copy_findings")] == [STATS_FINDINGS_MAX] * 8

    run(scenario())


def test_with_zero_days_it_does_not_patrol() -> None:
    async def scenario() -> None:
        machine = Machine(scrub_days=0.0)
        machine.start()
        assert machine.service.patrol._task is None
        await machine.service.close()

    run(scenario())


def test_its_end_ends_a_scrub() -> None:
    async def scenario() -> None:
        machine = Machine()
        await create(machine.start())
        scrubber = machine.service.scrubber
        waiting = asyncio.ensure_future(scrubber.wait(scrubber.start(None, None, 1)))
        await turns()
        await machine.service.close()
        with pytest.raises(StoreUnavailable, match="stopping"):
            await waiting

    run(scenario())


def test_it_stops_applies_before_the_upkeep_ends_and_closes_the_store_last(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        machine = Machine(scrub_days=14.0)
        store = machine.start()
        service, view = machine.service, await create(store)
        seen: list[tuple[str, int]] = []

        def note(owner: object, name: str) -> None:
            close = owner.close

            async def noted(*arguments: Any) -> None:
                seen.append((name, view.namespace.writing.stop_requests))
                await asyncio.sleep(0)
                await close(*arguments)

            monkeypatch.setattr(owner, "close", noted)

        note(service.scrubber, "scrubber")
        note(service.patrol, "patrol")
        note(store, "store")
        await service.close()
        assert seen == [("scrubber", 1), ("patrol", 1), ("store", 1)]

    run(scenario())
