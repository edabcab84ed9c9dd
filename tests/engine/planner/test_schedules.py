"""Whose order of visits an arena goes by, and what a declared order saves on a disk."""

from __future__ import annotations

import pytest

from paramstore.core.key import ExpertKey, KeySpace
from paramstore.core.schema import Schema
from paramstore.core.visits import Visits, apply_visits, ring_visits, training_visits
from paramstore.engine.planner.schedules import declare_schedule
from paramstore.engine.store import Store
from paramstore.engine.tables.namespace import View
from paramstore.errors import ConfigError, WriterFenced
from paramstore.policy.lru import Lru
from paramstore.policy.schedule import Schedule
from paramstore.sim.world import World
from paramstore_testkit.disks.machine import Machine
from paramstore_testkit.stores.small_planner import SmallPlanner
from paramstore_testkit.stores.small_store import initialize, keys_of, lease, run, train

TRAINING, RING = training_visits([0]), ring_visits([0])
APPLY = apply_visits([0])


def small() -> SmallPlanner:
    return SmallPlanner(policy=lambda: Schedule(Lru))


def in_force(planner: SmallPlanner) -> tuple[Visits, Visits]:
    param, working = planner.param_arena.policy, planner.working_arena.policy
    assert isinstance(param, Schedule)
    assert isinstance(working, Schedule)
    return param.visits, working.visits


def test_each_arena_gets_its_own_cycle_and_loses_it_with_the_view() -> None:
    planner = small()
    writer = planner.writer()
    assert in_force(planner) == ((), ())
    declare_schedule(writer, param=TRAINING, optim=APPLY)
    assert in_force(planner) == (TRAINING, APPLY)
    planner.planner.views.close(writer)
    assert in_force(planner) == ((), ())


def test_the_writer_counts_before_readers_and_of_these_the_last() -> None:
    planner = small()
    writer, one, other = planner.writer(), planner.reader(), planner.reader()
    declare_schedule(other, param=RING, optim=())
    declare_schedule(writer, param=TRAINING, optim=APPLY)
    declare_schedule(one, param=RING * 2, optim=())
    assert in_force(planner) == (TRAINING, APPLY)
    declare_schedule(writer, param=(), optim=())
    assert in_force(planner) == (RING * 2, ())
    planner.planner.views.close(one)
    assert in_force(planner) == (RING, ())


def test_a_new_writer_ends_what_the_fenced_one_declared() -> None:
    planner = small()
    declare_schedule(planner.writer(), param=TRAINING, optim=APPLY)
    planner.writer()
    assert in_force(planner) == ((), ())


def test_another_policy_ignores_the_order() -> None:
    planner = SmallPlanner(policy=Lru)
    declare_schedule(planner.writer(), param=TRAINING, optim=APPLY)
    assert isinstance(planner.param_arena.policy, Lru)


@pytest.mark.parametrize("order", [[(0, 0), (1, 0)], [(1, 0), (0, 0)]])
def test_an_update_makes_no_copy_that_would_go_first(order: list[ExpertKey]) -> None:
    policy = Schedule(Lru)
    world = World(
        SCHEMA, KeySpace.of(2, 1), param_slots=1, working_slots=2, param_policy=lambda _: policy, working_policy=lambda _: Lru()
    )
    writer = world.open(is_writer=True)
    declare_schedule(writer, param=training_visits(range(2)), optim=())
    for key in ((0, 0), (1, 0), (1, 0), (0, 0)):
        world.lease(writer, [key])
    world.begin_apply(order)
    for key in order:
        world.update(world.hold(key))
    assert list(world.namespace.residency.copies) == [(0, 0)], "forward needs layer 0 first, whichever was updated last"
    assert policy.victims(2, lambda name: False) is None, "what was not made is not held"


# --- on a disk

LAYERS, EXPERTS = 8, 4
SCHEMA = Schema.adamw({"w": (256, 128)}, param_dtype="float32")


async def opened(machine: Machine) -> tuple[Store, View]:
    store = machine.start()
    view = await store.admission.create(
        "moe", SCHEMA.describe(), layers=list(range(LAYERS)), experts=EXPERTS, host_bytes=machine.config.host_budget_bytes
    )
    await initialize(store, view)
    await store.committer.commit(view, 0, b"")
    await store.evict(view, None, None)
    return store, view


async def read_by(store: Store, view: View, work: list[list[ExpertKey]]) -> int:
    """Bytes read from the volume while the leases of `work` came and went, one after the other."""
    before = view.namespace.stats.bytes_read
    for keys in work:
        request = await lease(store, view, keys)
        store.access.release(view, request.lease_id)
    return view.namespace.stats.bytes_read - before


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["schedule", "lru"])
def test_a_scan_larger_than_the_arena_reads_only_what_does_not_fit(policy: str) -> None:
    read: list[int] = []

    async def scenario() -> None:
        store, view = await opened(Machine(volume_bytes=64 << 20, host_budget_bytes=6 << 20, policy=policy))
        slots = view.namespace.memory.param.planned_slots
        assert EXPERTS < slots < len(keys_of(view)), "a share of the experts fits"
        store.declare_schedule(view, ring_visits(range(LAYERS)), ())
        scan = [[(layer, expert) for expert in range(EXPERTS)] for layer in range(LAYERS)]
        await read_by(store, view, scan * 2)
        read.append(await read_by(store, view, scan))
        read.append(slots)

    run(scenario())
    bytes_read, slots = read
    each = SCHEMA.part("param").image_bytes
    if policy == "lru":
        assert bytes_read >= LAYERS * EXPERTS * each
    else:
        assert bytes_read <= (LAYERS * EXPERTS - slots + EXPERTS) * (each + SCHEMA.stored.header_bytes)


@pytest.mark.slow
def test_a_step_reads_and_writes_only_the_records_that_do_not_fit() -> None:
    async def scenario() -> None:
        store, view = await opened(Machine(volume_bytes=64 << 20, host_budget_bytes=10 << 20, policy="schedule"))
        slots = view.namespace.memory.working.planned_slots
        records = len(keys_of(view))
        assert slots < records
        store.declare_schedule(view, training_visits(range(LAYERS)), apply_visits(range(LAYERS)))
        for _ in range(2):
            await train(store, view)
        answer = await train(store, view)
        assert answer["bytes_read"] <= (records - slots) * SCHEMA.record_bytes
        assert answer["bytes_written"] <= (records - slots + 6) * SCHEMA.record_bytes, "and what the pipeline holds"

    run(scenario())


def test_what_is_no_order_is_refused_and_changes_nothing() -> None:
    async def scenario() -> None:
        store = Machine(policy="schedule").start()
        view = await store.admission.create("moe", SCHEMA.describe(), layers=[0], experts=4, host_bytes=None)
        store.declare_schedule(view, [(0, "routed")], ())
        with pytest.raises(ConfigError, match=r"optim_visits\[0\]=\(3, 'routed'\)"):
            store.declare_schedule(view, (), [(3, "routed")])
        assert view.declared is not None
        assert view.declared.param == RING
        view.is_fenced = True
        with pytest.raises(WriterFenced):
            store.declare_schedule(view, (), ())

    run(scenario())


def test_what_a_dead_writer_declared_ends_with_its_session_though_its_leases_stay() -> None:
    async def scenario() -> None:
        store = Machine(seed=1, policy="schedule").start()
        view = await store.admission.create("moe", SCHEMA.describe(), layers=[0], experts=2, host_bytes=None)
        await initialize(store, view)
        await store.committer.commit(view, 0, b"")
        store.declare_schedule(view, TRAINING, APPLY)
        await lease(store, view, keys_of(view))
        arena = view.namespace.memory.param
        assert isinstance(arena.policy, Schedule)
        assert arena.policy.visits == TRAINING
        store.end_writing(view, reason="is gone")
        assert (arena.policy.visits, len(view.leased)) == ((), 2)

    run(scenario())
