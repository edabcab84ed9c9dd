"""A volume that does not answer: its commit fails in time, publishes nothing, and the volume is trusted no more."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Hashable
from functools import partial
from typing import Any

import pytest

from paramstore.engine.steps.proof import Prover
from paramstore.engine.transfers.runner import volume_lane
from paramstore.engine.transfers.workers import outcome_of
from paramstore.errors import StepFailed, VolumeError
from paramstore.testing.workers import InlineWorkers
from paramstore_testkit.stores.commit_site import Site, on_site
from paramstore_testkit.stores.small_store import keys_of, reader, train, versions


class Hanging:
    """From now on workers of the volume run in threads of their own, and its flush does not return before `free` is set."""

    def __init__(self, site: Site, monkeypatch: pytest.MonkeyPatch, *, volume: int) -> None:
        self.free = threading.Event()
        loop, workers, lane_of_it = asyncio.get_running_loop(), site.machine.workers, volume_lane(volume)
        assert isinstance(workers, InlineWorkers)
        run, flush = workers.run, site.volumes[volume].flush

        def in_thread(lane: Hashable, function: Any, argument: Any, done: Any) -> None:
            if lane != lane_of_it:
                run(lane, function, argument, done)
                return
            work = partial(outcome_of, function, argument)
            threading.Thread(target=lambda: loop.call_soon_threadsafe(done, *work()), daemon=True).start()

        def hanging() -> None:
            assert self.free.wait(10.0)
            flush()

        self._runner = site.store.transfers.runner
        monkeypatch.setattr(workers, "run", in_thread)
        monkeypatch.setattr(site.volumes[volume], "flush", hanging)
        monkeypatch.setattr(site.store.committer._prover, "_flush_timeout_s", 0.05)

    async def end(self) -> None:
        """Lets the flush return, and waits until everybody has heard of it."""
        self.free.set()
        while not self._runner.is_idle:
            await asyncio.sleep(0)


async def all_written(site: Site) -> None:
    await site.store.write_back(site.view, None)


def test_a_commit_whose_flush_hangs_fails_publishes_nothing_and_fences_the_volume(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(site: Site) -> None:
        await all_written(site)
        hanging = Hanging(site, monkeypatch, volume=1)
        with pytest.raises(VolumeError, match=r"volume 1: no note and flush in 0.05 s \(flush_timeout_s\)"):
            await site.store.committer.commit(site.view, 1, b"")
        assert site.view.namespace.steps.ledger.steps() == [0]
        assert site.view.namespace.steps.cut is None
        assert "no note and flush" in str(site.store.transfers.space.fences.reason(1))
        assert site.store.transfers.space.fences.reason(0) is None
        with pytest.raises(StepFailed, match=r"a flush of volume 1 failed: .* rollback\(\) is the way on"):
            await site.store.committer.commit(site.view, 1, b"")
        assert await versions(site.store, await reader(site.store)) == [0] * 4, "what is committed can be read"
        await hanging.end()

    on_site(scenario)


def test_a_flush_that_returns_after_all_changes_nothing_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(site: Site) -> None:
        await all_written(site)
        hanging = Hanging(site, monkeypatch, volume=0)
        free = site.free_note_slots
        with pytest.raises(VolumeError):
            await site.store.committer.commit(site.view, 1, b"")
        assert site.free_note_slots == free - 1, "its note may still be written there"
        await hanging.end()
        assert site.view.namespace.steps.ledger.steps() == [0]
        assert site.view.namespace.writing.broken is not None
        monkeypatch.undo()
        view = await site.reopened()
        assert view.namespace.steps.committed_step == 0
        await train(site.store, view)
        await site.store.committer.commit(view, 1, b"")
        assert await versions(site.store, view) == [1] * len(keys_of(view))

    on_site(scenario)


def test_a_flush_in_time_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(site: Site) -> None:
        monkeypatch.setattr(Prover, "_distrust", lambda *_: pytest.fail("nothing failed"))
        await site.store.committer.commit(site.view, 1, b"")
        assert site.view.namespace.steps.committed_step == 1

    on_site(scenario)


def test_a_note_that_waits_for_its_turn_on_a_busy_volume_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(site: Site) -> None:
        await all_written(site)
        monkeypatch.setattr(Prover, "_distrust", lambda *_: pytest.fail("the volume answers"))
        monkeypatch.setattr(site.store.committer._prover, "_flush_timeout_s", 0.02)
        workers, runner = site.machine.workers, site.store.transfers.runner
        assert isinstance(workers, InlineWorkers)
        workers.pause()
        commit = asyncio.ensure_future(site.store.committer.commit(site.view, 1, b""))
        for _ in range(5):  # five times the limit, in which others' transfers end
            await asyncio.wait([commit], timeout=0.01)
            runner.finished += 1
        workers.resume()
        await commit
        assert site.view.namespace.steps.committed_step == 1

    on_site(scenario)
