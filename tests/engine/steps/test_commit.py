"""What a commit does in which order, and what others may do beside it."""

from __future__ import annotations

import asyncio

import pytest

from paramstore.errors import CapacityError, CatalogError, StepDropped, StepFailed, VolumeError
from paramstore.storage.catalog.base import Change
from paramstore.storage.format.notes import read_note, read_superblock
from paramstore.storage.format.structures import NotedStep, combine_roots, pack_description
from paramstore_testkit.disks.machine import Machine
from paramstore_testkit.stores.commit_site import Event, RecordingVolume, Site, fail, on_site
from paramstore_testkit.stores.small_store import OPTIONS, create, initialize, keys_of, push, run, train, turns, versions

# --- order


def test_records_come_before_notes_notes_before_flushes_and_all_of_them_before_the_transaction() -> None:
    async def scenario(site: Site) -> None:
        await site.store.committer.commit(site.view, 1, b"")
        stages = [stage for stage, _ in site.events]
        assert stages.count("record") == 4
        assert stages.count("flush") == 2
        assert stages.count("apply") == 1
        assert stages[-1] == "apply", "the room for the next commit is made when this one has returned"
        await turns()
        assert site.events[-1][0] == "reserve"
        last_record = max(at for at, stage in enumerate(stages) if stage == "record")
        assert stages.index("note") > last_record
        for index in (0, 1):
            own = [stage for stage, volume in site.events if volume == index]
            assert own.index("flush") == len(own) - 1
            assert own[-2] == "note"

    on_site(scenario)


def test_the_catalog_has_room_before_any_data_is_written() -> None:
    async def scenario(site: Site) -> None:
        few = keys_of(site.view)[:1]
        await site.store.committer.commit(site.view, 1, b"")
        await train(site.store, site.view, few)
        site.events.clear()
        await site.store.committer.commit(site.view, 2, b"")
        assert site.events[0][0] == "record", "there has been room since the commit before, which was larger"
        await train(site.store, site.view)
        site.events.clear()
        await site.store.committer.commit(site.view, 3, b"")
        assert site.events[0][0] == "reserve", "for more records than the last commit had"

    on_site(scenario)


def test_a_commit_asks_for_room_anew_when_it_could_not_be_made_ahead() -> None:
    async def scenario(site: Site) -> None:
        await site.store.committer.commit(site.view, 1, b"")
        await turns()
        site.catalog.failing = "reserve"
        await train(site.store, site.view)
        await site.store.committer.commit(site.view, 2, b"")  # there was room for this one, there is none for the next
        await train(site.store, site.view)
        site.events.clear()
        with pytest.raises(CatalogError, match="reserve fails as planned"):
            await site.store.committer.commit(site.view, 3, b"")
        assert not site.events, "nothing was written"
        site.catalog.failing = None
        assert (await site.store.committer.commit(site.view, 3, b""))["records"] == 4

    on_site(scenario)


def test_room_made_ahead_that_another_transaction_may_have_used_is_not_counted_on() -> None:
    async def scenario(site: Site) -> None:
        await site.store.committer.commit(site.view, 1, b"")
        assert site.events[-1][0] == "apply", "the room for the next commit is not made yet, and nobody waits for it"
        await site.store._transactions.apply_change(Change())
        await train(site.store, site.view)
        assert "reserve" in dict(site.events[1:]), "it was made meanwhile"
        site.events.clear()
        await site.store.committer.commit(site.view, 2, b"")
        assert site.events[0][0] == "reserve"

    on_site(scenario)


def test_every_volume_bears_the_note_and_is_flushed_even_if_it_has_no_record_of_the_commit() -> None:
    async def scenario(site: Site) -> None:
        await site.store.committer.commit(site.view, 1, b"")
        site.events.clear()
        await train(site.store, site.view, keys_of(site.view)[:1])
        await site.store.committer.commit(site.view, 5, b"")
        assert {volume for stage, volume in site.events if stage == "record"} < {0, 1}
        assert {volume for stage, volume in site.events if stage == "flush"} == {0, 1}
        row = site.view.namespace.steps.ledger.step(5)
        for volume in site.volumes.values():
            note = read_note(volume, read_superblock(volume), row.note_slot)
            assert (note.namespace, note.step, note.parent, note.record_count) == ("moe", 5, 1, 1)
            assert (note.sequence, note.epoch) == (row.sequence, site.view.namespace.epoch)
            assert not site.machine.disks[volume.index].unflushed

    on_site(scenario)


def test_a_commit_without_changes_is_a_step_all_the_same() -> None:
    async def scenario(site: Site) -> None:
        await site.store.committer.commit(site.view, 1, b"")
        site.events.clear()
        answer = await site.store.committer.commit(site.view, 2, b"nothing new")
        assert (answer["records"], answer["bytes_written"]) == (0, 0)
        assert [stage for stage, _ in site.events].count("flush") == 2
        assert site.view.namespace.steps.ledger.steps() == [1, 2]
        assert site.view.namespace.steps.ledger.step(2).extra == b"nothing new"

    on_site(scenario)


def test_work_called_after_a_commit_is_not_in_it() -> None:
    async def scenario(site: Site) -> None:
        push(site.store, site.view, keys_of(site.view))
        commit = asyncio.ensure_future(site.store.committer.commit(site.view, 1, b""))
        await turns(1)
        later = asyncio.ensure_future(train_pending(site))
        await asyncio.gather(commit, later)
        assert (await site.reopened()).namespace.steps.committed_step == 1
        assert await versions(site.store, site.store.namespaces["moe"].views[0]) == [1, 1, 1, 1]

    async def train_pending(site: Site) -> None:
        await site.store.applies.apply(site.view, OPTIONS, 1.0)

    on_site(scenario)


# --- failures


# --- beside a commit


def test_a_step_that_the_commit_under_way_drops_cannot_be_opened_any_more() -> None:
    async def scenario(site: Site) -> None:
        await site.store.committer.commit(site.view, 1, b"")
        await train(site.store, site.view)
        commit = asyncio.ensure_future(site.store.committer.commit(site.view, 2, b""))
        while not site.view.namespace.steps.closing_steps:
            await asyncio.sleep(0)
        assert site.view.namespace.steps.ledger.steps() == [0, 1], "it is there still"
        with pytest.raises(StepDropped, match="step 0 of 'moe' is being dropped"):
            await site.store.admission.open("moe", mode="read", at=0, host_bytes=None)
        reader = await site.store.admission.open("moe", mode="read", at=1, host_bytes=None)
        await commit
        assert site.view.namespace.steps.ledger.steps() == [1, 2]
        assert site.view.namespace.steps.closing_steps == frozenset()
        assert await versions(site.store, reader) == [1, 1, 1, 1]

    on_site(scenario)


def test_a_step_that_would_have_closed_can_be_opened_again_after_the_commit_failed() -> None:
    async def scenario(site: Site) -> None:
        await site.store.committer.commit(site.view, 1, b"")
        fail(site, "apply")
        with pytest.raises(CatalogError):
            await site.store.committer.commit(site.view, 2, b"")
        reader = await site.store.admission.open("moe", mode="read", at=0, host_bytes=None)
        assert await versions(site.store, reader) == [0, 0, 0, 0]

    on_site(scenario)


def test_one_commit_of_a_namespace_is_under_way_at_a_time_and_they_end_in_call_order() -> None:
    async def scenario(site: Site) -> None:
        ended: list[int] = []

        async def commit(step: int) -> None:
            await site.store.committer.commit(site.view, step, b"")
            ended.append(step)

        await asyncio.gather(*(commit(step) for step in (3, 5, 8)))
        assert ended == [3, 5, 8]
        assert site.view.namespace.steps.ledger.steps() == [5, 8]

    on_site(scenario)


def test_a_rollback_waits_for_the_commit_under_way() -> None:
    async def scenario(site: Site) -> None:
        commit = asyncio.ensure_future(site.store.committer.commit(site.view, 1, b""))
        await turns(1)
        await site.store.rollback(site.view, 1)
        assert commit.done()
        assert await versions(site.store, site.view) == [1, 1, 1, 1]
        with pytest.raises(StepDropped, match="step 7 of namespace 'moe' is not retained; the steps are: 0, 1"):
            await site.store.rollback(site.view, 7)

    on_site(scenario)


def test_a_rollback_that_is_given_up_while_it_waits_stops_no_later_apply() -> None:
    async def scenario(site: Site) -> None:
        turn = site.view.namespace.writing.turn
        await turn.acquire()
        waiting = asyncio.ensure_future(site.store.rollback(site.view, 0))
        await turns(3)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        turn.release()
        await train(site.store, site.view)
        assert await versions(site.store, site.view) == [2, 2, 2, 2]

    on_site(scenario)


def test_records_of_other_namespaces_that_lay_unpublished_on_a_volume_whose_flush_failed_are_not_trusted() -> None:
    async def scenario() -> None:
        events: list[Event] = []
        machine = Machine(seed=6, volume_bytes=24 << 20)
        volume = RecordingVolume(machine.disks[0], events)
        machine.volumes[0] = volume
        store = machine.start()
        written = await create(store, "written", host_bytes=8 << 20)
        clean = await create(store, "clean", host_bytes=8 << 20)
        await train(store, written)
        await store.write_back(written, None)
        await train(store, clean, keys_of(clean)[:1])
        volume.failing = "flush"
        with pytest.raises(VolumeError):
            await store.committer.commit(clean, 1, b"")
        volume.failing = ""
        with pytest.raises(StepFailed, match="a flush of volume 0 failed"):
            await store.committer.commit(written, 1, b"")
        await machine.kill()
        store = machine.start()
        written = await store.admission.open("written", mode="write", at=None, host_bytes=8 << 20)
        await train(store, written)
        await store.committer.commit(written, 1, b"")
        assert await versions(store, written) == [1, 1, 1, 1]

    run(scenario())


def test_initial_values_are_committed_like_any_others() -> None:
    async def scenario() -> None:
        machine = Machine(seed=7)
        store = machine.start()
        view = await create(store, step=None)
        await initialize(store, view)
        await store.committer.commit(view, 0, b"")
        await machine.crash()
        store = machine.start()
        view = await store.admission.open("moe", mode="write", at=None, host_bytes=None)
        assert await versions(store, view) == [0, 0, 0, 0]

    run(scenario())


def test_a_note_that_does_not_fit_fails_the_commit_alone_and_its_slot_is_free_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(site: Site) -> None:
        await train(site.store, site.view)
        free = site.store.committer._prover._note_slots.free_count
        with monkeypatch.context() as context:
            context.setattr("paramstore.storage.format.structures.NOTE_SLOT_BYTES", 4096)
            with pytest.raises(CapacityError, match="use less extra"):
                await site.store.committer.commit(site.view, 1, bytes(8192))
        assert site.store.committer._prover._note_slots.free_count == free
        await site.store.committer.commit(site.view, 1, bytes(64 << 10))
        assert site.view.namespace.steps.ledger.step(1).extra == bytes(64 << 10)

    on_site(scenario)


def test_a_note_says_all_that_the_catalog_says_of_its_step() -> None:
    async def scenario(site: Site) -> None:
        await site.store.committer.commit(site.view, 1, b"")
        await train(site.store, site.view, keys_of(site.view)[:2])
        await site.store.committer.commit(site.view, 4, b"more")
        contents = site.machine.catalog.load().namespaces["moe"]
        row = contents.steps[4]
        note = read_note(site.machine.disks[0], read_superblock(site.machine.disks[0]), row.note_slot)
        assert (note.step, note.parent, note.record_count, note.extra, note.applies) == (4, 1, 2, b"more", row.applies)
        assert note.state_root == combine_roots((key, rows[-1].located.root) for key, rows in contents.rows.items())
        assert note.steps == (NotedStep(1, contents.steps[1].sequence, contents.steps[1].note_slot, False),)
        assert note.description == pack_description(site.view.namespace.schema, site.view.namespace.keys)

    on_site(scenario)
