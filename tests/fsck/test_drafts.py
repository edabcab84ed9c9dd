"""A half-finished initialization is no damage, comes back as what it is, and is never made whole."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from paramstore.errors import CatalogError, StepFailed
from paramstore.fsck.check import Report, examine
from paramstore.fsck.rebuild import check_rebuildable, new_contents, restore_notes
from paramstore.fsck.swap import fill
from paramstore.storage.catalog.base import DRAFT_STEP, Contents
from paramstore.testing.catalogs import MemoryCatalog
from paramstore_testkit.disks.machine import Machine
from paramstore_testkit.stores.drafted_store import SOURCE, drafted, opened, put
from paramstore_testkit.stores.memory_disk import disks_of, survey_of
from paramstore_testkit.stores.scrub_site import damage
from paramstore_testkit.stores.small_store import EXPERTS, SCHEMA, first_values, run

ALL = range(EXPERTS)


async def crashed(experts: Iterable[int], *, more: Iterable[int] = (), lives: int = 1) -> Machine:
    """A machine whose power failed while a namespace was initialised: these experts are in its draft, one life each time after
    the first, and `more` were put since."""
    machine = Machine(seed=3, volume_count=2)
    chosen = list(experts)
    for life in range(lives):
        store = machine.start()
        view, _, _ = await opened(store)
        for expert in chosen[life::lives]:
            await put(store, view, [(0, expert)])
            await store.committer.save_draft(view, SOURCE)
        if life == lives - 1:
            await put(store, view, [(0, expert) for expert in more])
        await machine.crash(keeps_random_writes=True)
    return machine


def rebuilt(machine: Machine, contents: Contents | None = None) -> Report:
    report = examine(survey_of(machine), contents)
    check_rebuildable(report.found, report.proofs)
    restore_notes(report.found, report.proofs, disks_of(machine.volumes))
    assert report.found.store is not None
    machine.catalog = machine.durable = MemoryCatalog(store_uuid=report.found.store)
    fill(machine.catalog, new_contents(report.found, report.proofs, contents))
    return report


@pytest.mark.parametrize(("experts", "more"), [((0, 2), ()), ((0, 2), (1,)), (ALL, ()), ((1,), (0, 2, 3))])
def test_a_draft_is_clean(experts: Iterable[int], more: Iterable[int]) -> None:
    async def scenario() -> None:
        machine = await crashed(experts, more=more)
        report = examine(survey_of(machine), machine.catalog.load())
        assert (report.findings, report.lost) == ([], [])

    run(scenario())


@pytest.mark.slow
@pytest.mark.parametrize("lives", [1, 3])
@pytest.mark.parametrize("experts", [(0, 2, 3), ALL])
@pytest.mark.parametrize("with_catalog", [False, True])
def test_a_rebuilt_draft_is_the_same_draft_and_nobody_can_open_it(experts: Iterable[int], lives: int, with_catalog: bool) -> None:
    async def scenario() -> None:
        machine = await crashed(experts, lives=lives)
        report = rebuilt(machine, machine.catalog.load() if with_catalog else None)
        assert sorted(report.proofs["moe"].steps) == [DRAFT_STEP]
        store = machine.start()
        assert store.admission.list_namespaces()[0]["committed_step"] is None
        with pytest.raises(StepFailed, match="no committed step yet"):
            await store.admission.open("moe", mode="read", at=None, host_bytes=None)
        view, present, extra = await opened(store)
        assert (present, extra) == ([(0, expert) for expert in experts], SOURCE)
        await put(store, view, [(0, expert) for expert in ALL if expert not in experts])
        await store.initializer.end(view)
        await store.committer.commit(view, 0, b"")
        assert await first_values(store, view) == [0.0, 1.0, 2.0, 3.0]
        await machine.crash()
        report = examine(survey_of(machine), machine.catalog.load())
        assert (report.findings, sorted(report.proofs["moe"].steps)) == ([], [0])

    run(scenario())


def test_a_draft_with_a_damaged_record_is_lost_and_said_so() -> None:
    async def scenario() -> None:
        machine = Machine(seed=5)
        view = await drafted(machine.start())
        located = view.namespace.steps.ledger.at((0, 2), DRAFT_STEP)
        assert located is not None
        await machine.crash()
        damage(machine, located, SCHEMA.stored.fields[0].offset_bytes)
        report = examine(survey_of(machine), machine.catalog.load())
        assert [finding.key for finding in report.findings] == [(0, 2)]
        with pytest.raises(CatalogError, match="no step of moe is proven"):
            rebuilt(machine)

    run(scenario())


def test_where_the_newest_draft_or_the_first_commit_is_not_whole_the_draft_before_it_comes_back() -> None:
    async def scenario(*, is_committed: bool) -> None:
        machine = Machine(seed=7)
        store = machine.start()
        view = await drafted(store, (0,))
        await put(store, view, [(0, 1), (0, 2), (0, 3)])
        await (store.committer.commit(view, 4, b"") if is_committed else store.committer.save_draft(view, SOURCE))
        located = view.namespace.steps.ledger.at((0, 2), 4)
        assert located is not None
        await machine.crash()
        damage(machine, located, SCHEMA.stored.fields[0].offset_bytes)
        report = rebuilt(machine)
        assert sorted(report.proofs["moe"].steps) == [DRAFT_STEP]
        assert [(finding.step, finding.key) for finding in report.lost] == ([(4, (0, 2))] if is_committed else [])
        _, present, extra = await opened(machine.start())
        assert (present, extra) == ([(0, 0)], SOURCE)

    run(scenario(is_committed=False))
    run(scenario(is_committed=True))


def test_a_draft_that_lacks_a_record_it_had_is_not_taken_for_a_smaller_one() -> None:
    async def scenario() -> None:
        machine = Machine(seed=6)
        view = await drafted(machine.start())
        located = view.namespace.steps.ledger.at((0, 2), DRAFT_STEP)
        assert located is not None
        await machine.crash()
        machine.disks[0].write(located.extent.offset_bytes, [memoryview(bytearray(located.extent.length_bytes))])
        machine.disks[0].flush()
        with pytest.raises(CatalogError, match="no step of moe is proven"):
            rebuilt(machine)

    run(scenario())
