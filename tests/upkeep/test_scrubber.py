"""The scrubber finds every damaged record and names it, and refuses what cannot be verified."""

from __future__ import annotations

from typing import Any

import pytest

from paramstore.core.schema import Schema
from paramstore.errors import (
    CapacityError,
    ConfigError,
    ParamStoreError,
    UnknownKey,
    UnknownNamespace,
)
from paramstore.testing.volumes import Fault, FaultyVolume
from paramstore.upkeep import progress
from paramstore.upkeep.progress import FINDINGS_MAX
from paramstore_testkit.disks.machine import Machine, PlainSegment
from paramstore_testkit.stores.scrub_site import KEY, OTHER, RECORD_BYTES, damage, located_at, verify
from paramstore_testkit.stores.settling import cut_of, settle_cut
from paramstore_testkit.stores.small_store import EXPERTS, SCHEMA, create, keys_of, run, train

# --- what it finds


def test_a_whole_store_has_no_findings_and_every_record_was_read() -> None:
    async def scenario() -> None:
        machine = Machine()
        store = machine.start()
        view = await create(store)
        await train(store, view, [KEY])
        await store.committer.commit(view, 1, b"")
        result = await verify(machine)
        assert (result["found"], result["findings"], result["state"]) == (0, [], "done")
        assert result["records"] == result["records_total"] == EXPERTS + 1  # the older step still names KEY's first version
        assert result["bytes_read"] == result["bytes_total"] == (EXPERTS + 1) * RECORD_BYTES

    run(scenario())


@pytest.mark.parametrize(
    ("offset_bytes", "reason"),
    [(0, "no record header"), (40, "checksum"), (600, "checksum"), (SCHEMA.stored.fields[0].offset_bytes, "chunk 0"),
     (SCHEMA.stored.fields[-1].offset_bytes, "chunk 5")],
)  # fmt: skip
def test_damage_anywhere_in_a_record_is_found_and_named(offset_bytes: int, reason: str) -> None:
    async def scenario() -> None:
        machine = Machine()
        store = machine.start()
        view = await create(store, step=7)
        located = located_at(view, KEY, 7)
        damage(machine, located, offset_bytes)
        result = await verify(machine)
        (finding,) = result["findings"]
        assert result["found"] == 1
        assert reason in finding.pop("reason")
        assert finding == {
            "namespace": "moe", "key": KEY, "steps": (7,), "epoch": located.identity.epoch, "version": located.identity.version,
            "volume": located.extent.volume, "offset_bytes": located.extent.offset_bytes,
        }  # fmt: skip
        assert result["records"] == EXPERTS

    run(scenario())


def test_records_of_an_inference_schema_are_covered() -> None:
    async def scenario() -> None:
        machine = Machine()
        store = machine.start()
        view = await create(store, schema=Schema.param({"w": ((5, 3), "int8"), "v": ((7,), "float32")}))
        damage(machine, located_at(view, KEY, 0), view.namespace.schema.stored.fields[1].offset_bytes)
        result = await verify(machine)
        assert [finding["key"] for finding in result["findings"]] == [KEY]
        assert result["records"] == EXPERTS

    run(scenario())


def test_bytes_that_belong_to_no_chunk_mean_nothing() -> None:
    async def scenario() -> None:
        machine = Machine()
        store = machine.start()
        view = await create(store)
        field = SCHEMA.stored.fields[0]
        damage(machine, located_at(view, KEY, 0), field.offset_bytes + field.length_bytes)
        assert (await verify(machine))["found"] == 0

    run(scenario())


def test_a_record_that_lies_where_another_should_is_found() -> None:
    async def scenario() -> None:
        machine = Machine()
        store = machine.start()
        view = await create(store)
        source, target = (located_at(view, key, 0).extent for key in (KEY, OTHER))
        image = PlainSegment(RECORD_BYTES).view(0, RECORD_BYTES)
        machine.disks[0].read(source.offset_bytes, (image,))
        machine.disks[0].write(target.offset_bytes, (image,))
        (finding,) = (await verify(machine))["findings"]
        assert finding["key"] == OTHER
        assert "another record lies there: key (0, 1), expected (0, 2)" in finding["reason"]

    run(scenario())


def test_every_step_is_covered_and_a_finding_names_those_that_need_the_record() -> None:
    async def scenario() -> None:
        machine = Machine(volume_bytes=16 << 20)
        store = machine.start()
        view = await create(store)
        reader = await store.admission.open("moe", mode="read", at=0, host_bytes=None)
        for step in (1, 2, 3):
            await train(store, view, [KEY] if step != 2 else [OTHER])
            await store.committer.commit(view, step, b"")
        assert view.namespace.steps.ledger.steps() == [0, 2, 3]
        damage(machine, located_at(view, KEY, 0), 0)
        damage(machine, located_at(view, OTHER, 3), 0)
        found = {finding["key"]: finding["steps"] for finding in (await verify(machine))["findings"]}
        assert found == {KEY: (0,), OTHER: (2, 3)}
        store.close_view(reader)

    run(scenario())


def test_a_whole_record_that_no_step_has_published_is_covered() -> None:
    async def scenario() -> None:
        machine = Machine()
        store = machine.start()
        view = await create(store)
        await train(store, view, [KEY])
        await store.write_back(view, [KEY])
        uncommitted = view.namespace.residency.working[KEY].uncommitted
        assert uncommitted is not None
        damage(machine, uncommitted, SCHEMA.stored.fields[1].offset_bytes)
        (finding,) = (await verify(machine))["findings"]
        assert (finding["key"], finding["steps"], finding["version"]) == (KEY, (), uncommitted.identity.version)
        assert finding["offset_bytes"] == uncommitted.extent.offset_bytes

    run(scenario())


def test_records_of_a_prepared_step_are_covered() -> None:
    async def scenario() -> None:
        machine = Machine()
        store = machine.start()
        view = await create(store)
        await train(store, view, [KEY])
        await store.committer.prepare(view, 1, b"")
        located = view.namespace.steps.ledger.at(KEY, 1)
        assert located is not None
        damage(machine, located, 600)
        result = await verify(machine)
        assert (result["records"], result["superseded"]) == (EXPERTS + 1, 0)
        assert [(one["key"], one["steps"], one["offset_bytes"]) for one in result["findings"]] == [
            (KEY, (), located.extent.offset_bytes),
        ]  # fmt: skip

    run(scenario())


def test_what_the_commit_under_way_will_publish_is_covered_though_a_newer_write_replaced_it() -> None:
    async def scenario() -> None:
        machine = Machine()
        store = machine.start()
        view = await create(store)
        namespace = view.namespace
        await train(store, view, [KEY])
        await store.write_back(view, [KEY])
        cut = cut_of(store.transfers._planner, namespace)
        await train(store, view, [KEY])
        await store.write_back(view, [KEY])
        (in_cut,) = cut.located().values()
        assert namespace.residency.working[KEY].uncommitted != in_cut
        damage(machine, in_cut, 0)
        result = await verify(machine, keys=[KEY], namespace="moe")
        (finding,) = result["findings"]
        assert result["records"] == 3
        assert (finding["steps"], finding["version"]) == ((), in_cut.identity.version)
        settle_cut(store.transfers._planner, namespace, is_published=False)
        assert (await verify(machine))["found"] == 0

    run(scenario())


@pytest.mark.parametrize(
    ("fault", "experts"),
    [*((Fault("read", nth), [nth - 1]) for nth in range(1, EXPERTS + 1)), (Fault("read", 2, forever=True), [1, 2, 3])],
)
def test_a_read_error_is_a_finding_and_the_scrub_goes_on(fault: Fault, experts: list[int]) -> None:
    async def scenario() -> None:
        machine = Machine()
        store = machine.start()
        view = await create(store)
        faulty = FaultyVolume(machine.disks[0], [fault])
        machine.service.scrubber._volumes = {0: faulty}
        result = await verify(machine)
        assert [finding["key"] for finding in result["findings"]] == [(0, expert) for expert in experts]
        assert all("fails as planned" in finding["reason"] for finding in result["findings"])
        assert result["records"] == EXPERTS == faulty.calls["read"]
        assert result["bytes_read"] == result["bytes_total"] == (EXPERTS - len(experts)) * RECORD_BYTES
        assert view.namespace.writing.broken is None
        assert store.transfers.traffic[0].failures == len(experts)
        assert not store.transfers._planner.space.pins

    run(scenario())


def test_findings_beyond_the_limit_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    assert FINDINGS_MAX >= EXPERTS
    monkeypatch.setattr(progress, "FINDINGS_MAX", 1)

    async def scenario() -> None:
        machine = Machine()
        store = machine.start()
        view = await create(store)
        for key in keys_of(view):
            damage(machine, located_at(view, key, 0), 0)
        result = await verify(machine)
        assert (result["found"], len(result["findings"])) == (EXPERTS, 1)

    run(scenario())


def test_who_asked_for_a_verify_gets_all_its_findings_though_the_figures_describe_a_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "STATS_FINDINGS_MAX", 1)

    async def scenario() -> None:
        machine = Machine()
        view = await create(machine.start())
        for key in keys_of(view):
            damage(machine, located_at(view, key, 0), 0)
        result = await verify(machine)
        assert [finding["key"] for finding in result["findings"]] == keys_of(view)
        assert machine.service.scrubber.stats()["last"] == {**result, "findings": result["findings"][-1:]}

    run(scenario())


def test_a_bug_in_a_worker_is_no_finding_but_the_end(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        machine = Machine()
        store = machine.start()
        await create(store)
        machine.service.scrubber._hashing = None  # type: ignore[assignment]
        with pytest.raises(ParamStoreError, match="internal error in a worker"):
            await verify(machine)
        last: Any = machine.service.scrubber.stats()["last"]
        assert last["state"] == "failed"

    run(scenario())
    assert "the scrub failed" in caplog.text


# --- what it is asked


def test_a_namespace_or_some_keys_of_it_can_be_chosen() -> None:
    async def scenario() -> None:
        machine = Machine(volume_bytes=24 << 20)
        store = machine.start()
        one, two = await create(store, "one", host_bytes=16 << 20), await create(store, "two", host_bytes=16 << 20)
        damage(machine, located_at(one, KEY, 0), 0)
        damage(machine, located_at(two, OTHER, 0), 0)
        assert (await verify(machine))["found"] == 2
        chosen = await verify(machine, namespace="two")
        assert [finding["key"] for finding in chosen["findings"]] == [OTHER]
        assert chosen["namespaces"] == ["two"]
        few = await verify(machine, namespace="two", keys=[KEY, KEY, (0, 0)])
        assert (few["found"], few["records"]) == (0, 2)

    run(scenario())


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("nowhere", None, None), UnknownNamespace), (("moe", [(0, EXPERTS)], None), UnknownKey),
        ((None, [KEY], None), ConfigError), (("moe", None, 0), ConfigError), (("moe", None, -1), ConfigError),
    ],
)  # fmt: skip
def test_what_cannot_be_verified_is_refused_and_nothing_begins(arguments: Any, error: type[ParamStoreError]) -> None:
    async def scenario() -> None:
        machine = Machine()
        store = machine.start()
        await create(store)
        with pytest.raises(error):
            machine.service.scrubber.start(*arguments)
        assert machine.service.scrubber.stats() == {"running": None, "last": None}

    run(scenario())


def test_there_is_one_scrub_at_a_time() -> None:
    async def scenario() -> None:
        machine = Machine()
        store = machine.start()
        await create(store)
        first = machine.service.scrubber.start(None, None, None)
        with pytest.raises(CapacityError, match="one at a time"):
            machine.service.scrubber.start("moe", None, None)
        assert (await machine.service.scrubber.wait(first))["records"] == EXPERTS
        assert (await verify(machine))["records"] == EXPERTS

    run(scenario())


def test_a_namespace_without_any_record_is_whole() -> None:
    async def scenario() -> None:
        machine = Machine()
        store = machine.start()
        await store.admission.create("empty", SCHEMA.describe(), layers=[0], experts=2, host_bytes=None)
        result = await verify(machine)
        assert (result["records"], result["bytes_read"], result["state"]) == (0, 0, "done")

    run(scenario())
