"""Updates stream through a few slots, in an order that saves reads; a failure half-way breaks the namespace, nothing less."""

from __future__ import annotations

import asyncio
from functools import partial
from math import sqrt
from typing import Any

import pytest
import torch

from paramstore.core.key import ExpertKey
from paramstore.core.schema import Schema
from paramstore.engine.records.update import LOOKAHEAD_RECORDS, _all_or_first_error
from paramstore.engine.store import Store
from paramstore.engine.tables.namespace import NamespaceState, View
from paramstore.engine.tables.requests import Urgency
from paramstore.engine.transfers import arithmetic
from paramstore.errors import ParamStoreError, StepFailed
from paramstore.optim.tensors import field_tensor
from paramstore_testkit.disks.machine import Machine, PlainSegment
from paramstore_testkit.stores.small_store import OPTIONS, SCHEMA, create, first_values, keys_of, push, run, train, turns, versions
from paramstore_testkit.stores.update_site import Site, on_site

UPDATE_WORKERS = 2
"""Of the machine."""


# --- the stream


def test_records_in_memory_are_updated_among_the_others_each_part_in_backward_order() -> None:
    async def scenario(site: Site) -> None:
        keys = keys_of(site.view)
        resident = [keys[5], keys[2]]
        await site.store.access.wait_prefetch(site.store.access.prefetch(site.view, resident, "optim", None))
        await train(site.store, site.view)
        assert [key for key in site.updated if key in resident] == resident
        absent = [key for key in site.updated if key not in resident]
        assert absent == [key for key in reversed(keys) if key not in resident]
        assert set(site.updated[-2:]).isdisjoint(resident), "they do not wait for the volumes"

    on_site(scenario)


@pytest.mark.parametrize("slots", [7, 9])
def test_what_is_in_memory_waits_there_for_its_turn_while_the_rest_streams_past_it(slots: int) -> None:
    async def scenario(site: Site) -> None:
        site.leave_slots(slots)
        await train(site.store, site.view)
        for _ in range(3):
            site.updated.clear()
            answer = await train(site.store, site.view)
            assert len(site.updated) == 12
            assert answer["bytes_read"] == (12 - slots) * SCHEMA.record_bytes, "no resident record was evicted before its turn"
            assert answer["bytes_written"] == (12 - slots) * SCHEMA.record_bytes, "and none was written before it"

    on_site(scenario)


def test_the_volumes_are_busy_before_the_last_resident_record_is_updated() -> None:
    async def scenario(site: Site) -> None:
        site.leave_slots(7)
        await train(site.store, site.view)
        resident, before = set(site.namespace.residency.resident), len(site.updated)
        await train(site.store, site.view)
        writing = [site.writing[number] for number in range(before, before + 12) if site.updated[number] in resident]
        assert writing[0] == 0
        assert writing[-1] > 0, "slots come free already"

    on_site(scenario)


def test_an_open_apply_leaves_itself_slots_when_it_is_closed() -> None:
    async def scenario(site: Site) -> None:
        site.leave_slots(9)
        await train(site.store, site.view)
        absent, *rest = [key for key in keys_of(site.view) if key not in site.namespace.residency.resident]
        begun = asyncio.ensure_future(site.store.applies.begin(site.view, OPTIONS, 1.0))
        await turns()
        claims = site.namespace.writing.open_apply
        assert claims is not None
        site.pause()
        push(site.store, site.view, [*site.namespace.residency.resident, *rest])
        site.store.applies.push(site.view, [(absent, PlainSegment(SCHEMA.gradient_bytes), 0)], is_last=True)
        await turns()
        ended = asyncio.ensure_future(site.store.applies.end(site.view))
        await turns(1)
        assert 0 < len(claims.awaited & site.namespace.residency.resident.keys()) <= 9 - UPDATE_WORKERS - LOOKAHEAD_RECORDS
        site.resume()
        await ended
        await begun

    on_site(scenario)


def test_only_what_was_pushed_is_updated() -> None:
    async def scenario(site: Site) -> None:
        keys = keys_of(site.view)
        answer = await train(site.store, site.view, keys[3:6])
        assert answer["records"] == 3
        assert answer["bytes_read"] == 3 * SCHEMA.record_bytes
        assert await versions(site.store, site.view) == [0, 0, 0, 1, 1, 1, *[0] * 6]
        assert await site.store.applies.apply(site.view, OPTIONS, 1.0) == {"records": 0, "bytes_read": 0, "bytes_written": 0}

    on_site(scenario)


def test_no_more_records_are_under_way_than_the_pipeline_is_deep() -> None:
    async def scenario(site: Site) -> None:
        site.pause()
        training = asyncio.ensure_future(train(site.store, site.view))
        await turns()
        assert len(site.namespace.residency.resident) == UPDATE_WORKERS + LOOKAHEAD_RECORDS
        site.resume()
        await training

    on_site(scenario)


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_an_apply_over_many_records_streams_through_few_slots(slots: int) -> None:
    async def scenario(site: Site) -> None:
        site.leave_slots(slots)
        for _ in range(2):
            answer = await train(site.store, site.view)
            assert answer["records"] == 12
        assert max(site.in_slots) <= slots
        assert await versions(site.store, site.view) == [2] * 12

    on_site(scenario, wait_timeout_s=5.0)


def test_slots_are_cleaned_ahead_of_the_records_that_will_need_them() -> None:
    async def scenario(site: Site) -> None:
        site.leave_slots(8)
        planner = site.store.transfers._planner.working
        begin_write, urgencies = planner.begin_write, list[Urgency]()

        def watched(namespace: NamespaceState, working: Any, urgency: Urgency) -> bool:
            urgencies.append(urgency)
            return begin_write(namespace, working, urgency)

        planner.begin_write = watched  # type: ignore[method-assign]
        await train(site.store, site.view)
        assert urgencies
        assert set(urgencies) == {Urgency.WRITE_BACK}, "no load had to wait for a write"

    on_site(scenario)


def test_the_param_of_a_new_version_is_there_as_soon_as_the_update_is() -> None:
    async def scenario(site: Site) -> None:
        await train(site.store, site.view)
        before = site.namespace.stats.bytes_read
        assert await first_values(site.store, site.view) == pytest.approx([number - 0.5 for number in range(12)])
        assert site.namespace.stats.bytes_read == before
        assert site.namespace.stats.param.misses == 0

    on_site(scenario)


def test_the_last_records_of_an_apply_are_shared_by_the_workers_and_come_out_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    wide = Schema.adamw({"w": (3, 5000), "v": (7,)}, param_dtype="float32")
    spans: list[object] = []

    def noting(*arguments: Any, **options: Any) -> None:
        spans.append(options.get("spans"))
        arithmetic.update(*arguments, **options)

    async def scenario() -> None:
        images = []
        for piece_elements in (1 << 30, 4096):
            spans.clear()
            cut = partial(arithmetic.cut_update, piece_elements=piece_elements)
            monkeypatch.setattr("paramstore.engine.records.update.cut_update", cut)
            store = Machine(host_budget_bytes=64 << 20).start()
            view = await create(store, schema=wide, experts=5)
            await train(store, view)
            images.append([await record(store, view, key) for key in keys_of(view)])
            whole = spans.count(None)
            assert whole == 5 - UPDATE_WORKERS, "as long as there is one for every worker"
            assert len(spans) - whole == UPDATE_WORKERS * (1 if piece_elements > 4096 else 4)
        assert images[0] == images[1]

    monkeypatch.setattr("paramstore.engine.records.update.update", noting)
    run(scenario())


async def record(store: Store, view: View, key: ExpertKey) -> bytes:
    """The stored fields, header excepted: its epoch and place differ."""
    schema = view.namespace.schema
    target = PlainSegment(schema.record_bytes).view(0, schema.record_bytes)
    await store.reading.read(view, key, target)
    return bytes(target[schema.stored.header_bytes :])


def test_the_optimizer_step_of_a_record_counts_its_own_updates_and_the_apply_the_namespace_s() -> None:
    async def scenario(site: Site) -> None:
        keys = keys_of(site.view)
        await train(site.store, site.view, keys[:1])
        await train(site.store, site.view, keys[:2])
        first, second = (site.namespace.residency.working[key] for key in keys[:2])
        assert (first.optimizer_step, first.last_apply) == (2, 2)
        assert (second.optimizer_step, second.last_apply) == (1, 2)
        await site.store.committer.commit(site.view, 1, b"")
        await site.evict()
        await site.store.access.wait_prefetch(site.store.access.prefetch(site.view, keys[:2], "optim", None))
        again = [site.namespace.residency.working[key] for key in keys[:2]]
        assert [(working.optimizer_step, working.last_apply) for working in again] == [(2, 2), (1, 2)], "from the headers"

    on_site(scenario)


def test_the_gradient_norm_is_that_of_everything_pending_and_takes_nothing() -> None:
    async def scenario(site: Site) -> None:
        keys = keys_of(site.view)
        assert await site.store.applies.norm(site.view) == 0.0
        push(site.store, site.view, keys[:3])
        elements = SCHEMA.parameter_elements
        assert await site.store.applies.norm(site.view) == pytest.approx(sqrt(3 * elements))
        assert site.store.applies.abort(site.view) == 3

    on_site(scenario)


def test_the_gradient_scale_multiplies_the_gradient() -> None:
    async def scenario(site: Site) -> None:
        keys = keys_of(site.view)
        for key, scale in zip(keys[:2], (1.0, 4.0), strict=True):
            push(site.store, site.view, [key])
            await site.store.applies.apply(site.view, OPTIONS, scale)
        target = PlainSegment(SCHEMA.record_bytes).view(0, SCHEMA.record_bytes)
        averages = []
        for key in keys[:2]:
            await site.store.reading.read(site.view, key, target)
            averages.append(field_tensor(target, SCHEMA.stored.field("exp_avg/w")).clone())
        assert torch.equal(4 * averages[0], averages[1])

    on_site(scenario)


# --- beside a commit


def test_a_record_dirty_at_a_cut_is_written_before_its_next_update_even_if_the_commit_has_not_come_to_it() -> None:
    async def scenario(site: Site) -> None:
        keys = keys_of(site.view)
        await train(site.store, site.view)
        commit = asyncio.ensure_future(site.store.committer.commit(site.view, 1, b""))
        await turns(1)
        push(site.store, site.view, keys)
        second = asyncio.ensure_future(site.store.applies.apply(site.view, OPTIONS, 1.0))
        await asyncio.gather(commit, second)
        reader = await site.store.admission.open("moe", mode="read", at=1, host_bytes=None)
        assert await versions(site.store, reader) == [1] * 12
        assert await versions(site.store, site.view) == [2] * 12

    on_site(scenario)


def test_an_apply_that_finds_no_extent_waits_for_the_commit_under_way_that_will_free_some() -> None:
    async def scenario(site: Site) -> None:
        keys = keys_of(site.view)
        for step in (1, 2):
            await train(site.store, site.view, keys[:2])
            await site.store.committer.commit(site.view, step, b"")
        await train(site.store, site.view, keys[:2])
        space = site.store.transfers._planner.space
        while space.missing_bytes(2, SCHEMA.record_bytes, owner="moe") == 0:
            space.reserve(SCHEMA.record_bytes, owner="moe")
        push(site.store, site.view, keys[:2])
        commit = asyncio.ensure_future(site.store.committer.commit(site.view, 3, b""))
        await turns(1)
        apply = asyncio.ensure_future(site.store.applies.apply(site.view, OPTIONS, 1.0))
        await asyncio.gather(commit, apply)
        assert (await versions(site.store, site.view))[:3] == [4, 4, 0]

    on_site(scenario)


def test_an_apply_that_no_volume_can_hold_says_so_before_it_has_changed_a_record() -> None:
    async def scenario(site: Site) -> None:
        space = site.store.transfers._planner.space
        while space.reserve(SCHEMA.record_bytes, owner="moe") is not None:
            pass
        with pytest.raises(StepFailed, match="bytes are missing on the volumes: add a volume"):
            await train(site.store, site.view)
        assert site.updated == []
        with pytest.raises(StepFailed, match=r"rollback\(\) is the way on"):
            push(site.store, site.view, keys_of(site.view))
        await site.store.rollback(site.view, 0)
        assert await versions(site.store, site.view) == [0] * 12

    on_site(scenario)


# --- failures


def test_an_apply_that_fails_half_way_breaks_the_namespace_and_leaves_no_slot_held() -> None:
    async def scenario(site: Site) -> None:
        site.leave_slots(4)
        site.corrupt(keys_of(site.view)[6], "exp_avg/w")
        with pytest.raises(StepFailed, match=r"apply on 'moe' failed: record \(0, 6\)"):
            await train(site.store, site.view)
        assert site.namespace.writing.broken is not None
        assert site.namespace.writing.broken.startswith("an apply failed: record (0, 6)")
        while not site.store.transfers.runner.is_idle:
            await asyncio.sleep(0)
        assert all(working.holders == 0 for working in site.namespace.residency.working.values())
        await site.store.rollback(site.view, 0)
        assert not site.namespace.residency.resident
        assert site.namespace.memory.working.slots.free_count == 4

    on_site(scenario, seed=5)


def test_the_first_error_of_several_updates_is_raised_and_none_hides_a_bug() -> None:
    async def fail(error: Exception) -> None:
        raise error

    def raised(*errors: Exception) -> BaseException:
        with pytest.raises((ParamStoreError, BaseExceptionGroup)) as found:
            asyncio.run(_all_or_first_error([fail(error) for error in errors]))
        return found.value

    first, second, bug = StepFailed("first"), StepFailed("second"), AssertionError("a bug")
    assert raised(first, second) is first
    group = raised(first, bug)
    assert isinstance(group, ExceptionGroup)
    assert group.exceptions == (bug,)


def test_what_is_called_after_a_failed_apply_is_refused_even_if_it_was_called_before_the_failure() -> None:
    async def scenario(site: Site) -> None:
        keys = keys_of(site.view)
        site.corrupt(keys[6], "exp_avg/w")
        push(site.store, site.view, keys)
        first = site.store.applies.apply(site.view, OPTIONS, 1.0)
        push(site.store, site.view, keys[:2])
        second = site.store.applies.apply(site.view, OPTIONS, 1.0)
        commit = site.store.committer.commit(site.view, 1, b"")
        outcomes = await asyncio.gather(*map(asyncio.ensure_future, (first, second, commit)), return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [StepFailed] * 3
        assert site.view.namespace.steps.ledger.steps() == [0]

    on_site(scenario)


def test_a_rollback_stops_an_apply_at_its_next_record() -> None:
    async def scenario(site: Site) -> None:
        push(site.store, site.view, keys_of(site.view))
        apply = asyncio.ensure_future(site.store.applies.apply(site.view, OPTIONS, 1.0))
        await turns(3)
        await site.store.rollback(site.view, 0)
        with pytest.raises(StepFailed, match="another writer took over"):
            await apply
        assert len(site.updated) < 12
        assert site.namespace.writing.broken is None
        assert await versions(site.store, site.view) == [0] * 12

    on_site(scenario)


# --- initial values


def test_updates_take_the_demand_class() -> None:
    async def scenario(site: Site) -> None:
        site.pause()
        training = asyncio.ensure_future(train(site.store, site.view))
        await turns()
        assert {transfer.urgency for _, transfer in site.store.transfers._under_way.values()} == {Urgency.DEMAND}
        site.resume()
        await training

    on_site(scenario)
