"""Figures for people say what is: counters, where every expert is, and what the volumes did."""

from __future__ import annotations

from paramstore.core.residency import Copy
from paramstore.core.schema import Schema
from paramstore.engine.report import commit_progress, namespace_stats, residency
from paramstore.engine.tables.counters import CommitProgress
from paramstore_testkit.disks.machine import Machine
from paramstore_testkit.stores.small_planner import SmallPlanner
from paramstore_testkit.stores.small_store import SCHEMA, create, keys_of, lease, run, train

A, B, C, D = ((0, expert) for expert in range(4))


def test_counters_say_what_happened_and_what_is_now() -> None:
    async def scenario() -> None:
        store = Machine().start()
        view = await create(store)
        await store.evict(view, None, None)
        held = await lease(store, view, [A, B])
        await train(store, view, [A])
        stats = namespace_stats(view.namespace, 0.0)
        assert {name: stats[name] for name in ("committed_step", "steps", "commits", "applies", "broken", "views", "keys")} == {
            "committed_step": 0, "steps": [0], "commits": 1, "applies": 1, "broken": None, "views": 1, "keys": 4,
        }  # fmt: skip
        assert (stats["has_writer"], stats["changed"], stats["leased_slots"]) == (True, 1, 2)
        assert (stats["records_updated"], stats["records_written"]) == (1, 4)
        assert stats["state_bytes"] == 4 * SCHEMA.record_bytes == 4 * stats["record_bytes"]  # type: ignore[operator]
        param, optim = stats["param"], stats["optim"]
        assert isinstance(param, dict)
        assert isinstance(optim, dict)
        assert {name: param[name] for name in ("misses", "hits", "resident", "retired", "waiting")} == {
            "misses": 2, "hits": 0, "resident": 3, "retired": 1, "waiting": 0,
        }  # fmt: skip
        assert param["slots"] - param["free"] == 3
        assert (optim["resident"], optim["dirty"], optim["slot_bytes"]) == (1, 1, SCHEMA.record_bytes)
        store.access.release(view, held.lease_id)
        assert namespace_stats(view.namespace, 0.0)["leased_slots"] == 0

    run(scenario())


def test_a_commit_under_way_tells_how_far_it_is_and_how_long_the_rest_takes() -> None:
    small = SmallPlanner(working_slots=4)
    namespace = small.namespace
    small.update(A, B, C)
    assert commit_progress(namespace, 0.0) is None
    cut = small.cut()
    cut.progress = CommitProgress(7, 100.0, 5000)
    namespace.stats.bytes_written = 5000
    expected = {"step": 7, "records": 3, "records_left": 3, "bytes_left": 3 * SCHEMA.record_bytes, "seconds": 2.0, "eta_s": None}
    assert commit_progress(namespace, 102.0) == expected
    cut.unwritten -= 1
    namespace.stats.bytes_written += SCHEMA.record_bytes
    expected = {"step": 7, "records": 3, "records_left": 2, "bytes_left": 2 * SCHEMA.record_bytes, "seconds": 4.0, "eta_s": 8.0}
    assert commit_progress(namespace, 104.0) == expected


def test_what_commits_published_and_what_was_written_for_it_are_counted() -> None:
    async def scenario() -> None:
        store = Machine().start()
        view = await create(store)
        for step in (1, 2):
            await train(store, view, [A, B])
            await store.write_back(view, None)
            await store.committer.commit(view, step, b"")
        stats = namespace_stats(view.namespace, 0.0)
        assert stats["bytes_committed"] == stats["bytes_written"] == (4 + 2 + 2) * SCHEMA.record_bytes
        await train(store, view, [A])
        await store.write_back(view, None)
        await train(store, view, [A])
        await store.committer.commit(view, 3, b"")
        stats = namespace_stats(view.namespace, 0.0)
        assert (stats["bytes_committed"], stats["bytes_written"]) == (9 * SCHEMA.record_bytes, 10 * SCHEMA.record_bytes)

    run(scenario())


def test_write_amplification_is_what_was_written_for_each_byte_that_commits_published() -> None:
    async def scenario() -> None:
        store = Machine().start()
        view = await create(store, step=None)
        assert namespace_stats(view.namespace, 0.0)["write_amplification"] is None
        await store.committer.commit(view, 0, b"")
        notes = view.namespace.stats.note_bytes
        committed = 4 * SCHEMA.record_bytes
        assert namespace_stats(view.namespace, 0.0)["write_amplification"] == (committed + notes) / committed
        await train(store, view)
        await store.write_back(view, None)
        await train(store, view, [A])
        store.transfers.count_note(view.namespace, 0, 8192)
        await store.committer.commit(view, 1, b"")
        notes = view.namespace.stats.note_bytes
        assert notes >= 8192
        written = 9 * SCHEMA.record_bytes + notes
        assert namespace_stats(view.namespace, 0.0)["write_amplification"] == written / (2 * committed)
        assert store.transfers.traffic[0].bytes_written == written
        assert store.transfers.traffic[0].note_bytes == notes

    run(scenario())


def test_a_namespace_without_memory_has_figures_too() -> None:
    small = SmallPlanner()
    small.namespace.close_memory()
    stats = namespace_stats(small.namespace, 0.0)
    assert isinstance(stats["param"], dict)
    assert (stats["param"]["slots"], stats["param"]["planned_slots"], stats["param"]["free"]) == (0, 0, 0)
    assert set(residency(small.namespace)["param"]) == {"absent"}  # type: ignore[call-overload]


def test_residency_tells_the_state_of_every_key_in_key_order() -> None:
    small = SmallPlanner(param_slots=6, working_slots=3)
    view, reader = small.writer(), small.reader()
    small.leased(view, A)
    small.update(B)
    small.lease(reader, C)
    view.device_resident = frozenset({D})
    found = residency(small.namespace)
    assert (found["layers"], found["experts"]) == ([0], 4)
    assert found["optim"] == ["absent", "dirty", "absent", "absent"]
    assert found["param"] == ["ready", "ready", "loading", "absent"]
    assert found["hbm"] == [False, False, False, True]
    heat = found["heat"]
    assert isinstance(heat, list)
    assert heat[3] == 0.0 < min(heat[:3])


def test_of_several_copies_of_a_key_the_best_one_counts() -> None:
    small = SmallPlanner(param_slots=6)
    view = small.writer()
    held = small.leased(view, A)
    small.begin_apply(A)
    assert held.copies[0].state is Copy.RETIRED
    assert residency(small.namespace)["param"][0] == "retired"  # type: ignore[index]
    small.lease(view, A)
    assert residency(small.namespace)["param"][0] == "loading"  # type: ignore[index]


def test_a_param_schema_has_no_working_copies_to_tell_of() -> None:
    small = SmallPlanner(schema=Schema.param({"w": ((4,), "float32")}))
    assert residency(small.namespace)["optim"] == ["absent"] * 4


def test_the_whole_store_s_figures_name_every_tier_volume_queue_and_namespace() -> None:
    async def scenario() -> None:
        store = Machine(volume_count=2).start()
        view = await create(store)
        await train(store, view, keys_of(view))
        stats = await store.stats()
        assert stats["tiers"].keys() == {"host", "nvme"}  # type: ignore[union-attr]
        assert stats["volumes"].keys() == {"0", "1"}  # type: ignore[union-attr]
        volumes = stats["volumes"]
        assert isinstance(volumes, dict)
        assert sum(volume["writes"] for volume in volumes.values()) == 4
        assert sum(volume["failures"] for volume in volumes.values()) == 0
        assert stats["namespaces"].keys() == {"moe"}  # type: ignore[union-attr]
        assert {"cpu", "catalog", "background"} < stats["queues"].keys()  # type: ignore[union-attr]
        assert stats["daemon"]["accepts_writes"] is True  # type: ignore[index]

    run(scenario())
