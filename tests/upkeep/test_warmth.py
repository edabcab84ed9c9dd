"""Warmth: what policies have counted is there for the next daemon, and keeping it disturbs nobody."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from paramstore.config import PolicyConfig
from paramstore.core.key import ExpertKey
from paramstore.core.visits import ring_visits
from paramstore.engine.planner.arenas import close_arenas
from paramstore.engine.report import residency
from paramstore.engine.store import Store
from paramstore.engine.tables.namespace import NamespaceState
from paramstore.fsck import check
from paramstore.policy.schedule import Schedule
from paramstore.storage.format.counts import pack_counts
from paramstore.upkeep import warmth as warmth_module
from paramstore.upkeep.hint_file import Threads
from paramstore.upkeep.warmth import INTERVAL_S, Warmth, counts_path
from paramstore_testkit.disks.machine import MIB, Machine
from paramstore_testkit.stores.assembled import config, with_store
from paramstore_testkit.stores.small_host import OPAQUE
from paramstore_testkit.stores.small_store import create, keys_of, lease, reader, run, train, turns
from paramstore_testkit.stores.warmed import (
    HOT,
    STORE,
    Disk,
    HangingDisk,
    Killed,
    Rest,
    heat_after,
    lfu,
    lived,
    namespace_of,
    opened,
    started,
    warmth_of,
)

STEPS = ["pack_counts", "unlink", "open", "write", "flush", "fsync", "close", "replace"]


# --- from one daemon to the next


def test_the_next_daemon_goes_on_from_what_was_counted(tmp_path: Path) -> None:
    async def scenario() -> None:
        await lived(tmp_path)
        assert counts_path(tmp_path).stat().st_mode & 0o777 == 0o600
        assert await heat_after(tmp_path) == [2.0, 3.0]
        await lived(tmp_path)
        assert await heat_after(tmp_path) == [4.0, 6.0]
        assert os.listdir(tmp_path) == ["counts"]

    run(scenario())


def test_the_counts_of_a_layer_outlast_the_session_that_declared_its_order(tmp_path: Path) -> None:
    async def scenario() -> None:
        heat = []
        for _ in range(2):
            namespace = namespace_of()
            warmth, _ = await started(tmp_path, namespace)
            policy, _ = opened(namespace, lambda: Schedule(lfu))
            assert isinstance(policy, Schedule)
            policy.declare(ring_visits((1, 3)))
            heat.append(policy.heat(HOT))
            policy.record_all([HOT, (3, 0), (1, 1), (3, 0), HOT, (3, 0)])
            heat.append(policy.heat(HOT))
            policy.declare(())
            await warmth.close()
        assert heat[0] == 0.0
        assert heat[2] == pytest.approx(heat[1])
        assert heat[3] < heat[2] + (1 - heat[2]) / 2  # the older visits count

    run(scenario())


def test_a_namespace_that_nobody_opens_keeps_its_counts(tmp_path: Path) -> None:
    async def scenario() -> None:
        await lived(tmp_path)
        closed, other = namespace_of(), namespace_of("other")
        warmth, _ = await started(tmp_path, closed, other)
        opened(other)[0].record(HOT)
        await warmth.close()
        assert await heat_after(tmp_path) == [2.0, 3.0]
        assert await heat_after(tmp_path, namespace_of("other")) == [1.0, 0.0]

    run(scenario())


def test_arenas_that_open_again_go_on_from_what_was_last_read(tmp_path: Path) -> None:
    async def scenario() -> None:
        namespace, rest = namespace_of(), Rest()
        warmth, _ = await started(tmp_path, namespace, rest=rest)
        opened(namespace)[0].record(HOT)
        await turns()
        await rest.end()
        close_arenas(namespace)
        assert [policy.heat(HOT) for policy in opened(namespace)] == [1.0, 0.0]
        await warmth.close()

    run(scenario())


@pytest.mark.parametrize(
    "changed", [namespace_of("other"), namespace_of(layers=(1, 2)), namespace_of(layers=(1,)), namespace_of(epoch=3)]
)
def test_counts_of_what_is_no_more_are_dropped(tmp_path: Path, changed: NamespaceState) -> None:
    async def scenario() -> None:
        await lived(tmp_path)
        before = counts_path(tmp_path).stat().st_size
        warmth, _ = await started(tmp_path, changed)
        assert changed.kept_counts == {}
        opened(changed)[0].record((1, 1))
        await warmth.close()
        assert await heat_after(tmp_path, namespace_of(epoch=9)) == [0.0, 0.0]
        assert counts_path(tmp_path).stat().st_size <= before

    run(scenario())


def test_counts_from_before_a_reopening_or_rollback_are_kept(tmp_path: Path) -> None:
    async def scenario() -> None:
        await lived(tmp_path)
        assert await heat_after(tmp_path, namespace_of(epoch=5)) == [2.0, 3.0]

    run(scenario())


@pytest.mark.slow
def test_after_a_restart_what_was_cold_before_it_is_evicted_first(tmp_path: Path) -> None:
    settings = config(tmp_path, host_budget_bytes=6 * MIB, piece_bytes=MIB, policy=PolicyConfig(name="decayed_lfu"))
    hot, cold = [(0, expert) for expert in range(4)], [(0, expert) for expert in range(4, 16)]

    async def use(store: Store, keys: list[ExpertKey]) -> dict[str, object]:
        view = await reader(store)
        for key in keys:
            store.access.release(view, (await lease(store, view, [key])).lease_id)
        return residency(view.namespace)

    async def live(store: Store) -> None:
        assert len(keys_of(await create(store, schema=OPAQUE, experts=16))) == 16
        await use(store, hot * 20 + cold)

    async def heat(store: Store) -> object:
        return (await use(store, []))["heat"]

    async def resident(store: Store) -> set[ExpertKey]:
        param = (await use(store, hot + cold))["param"]
        assert isinstance(param, list)
        return {key for key, state in zip(hot + cold, param, strict=True) if state != "absent"}

    with_store(settings, live)
    assert with_store(settings, heat) == pytest.approx([20.0] * 4 + [1.0] * 12, abs=1.0)
    found = with_store(settings, resident)
    assert set(hot) < found < {*hot, *cold}
    counts_path(tmp_path).unlink()
    assert with_store(settings, heat) == [0.0] * 16
    assert with_store(settings, resident).isdisjoint(hot)


@pytest.mark.slow
def test_fsck_ignores_the_counts_and_a_catalog_made_anew_is_no_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    settings, volumes = config(tmp_path), [str(tmp_path / "volume")]

    async def live(store: Store) -> None:
        await create(store)

    with_store(settings, live)
    before = counts_path(tmp_path).read_bytes()
    assert not check.check(tmp_path, volumes).findings
    shutil.rmtree(tmp_path / "catalog")
    assert check.rebuild(tmp_path, volumes).is_rebuilt
    assert counts_path(tmp_path).read_bytes() == before

    async def kept(store: Store) -> bool:
        return bool(store.namespaces["moe"].kept_counts)

    assert with_store(settings, kept)
    assert caplog.messages == []


# --- what is no file of ours


def truncated(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def damaged(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def empty(path: Path) -> None:
    path.write_bytes(b"")


def foreign(path: Path) -> None:
    path.write_bytes(pack_counts(b"t" * 16, ()))


def huge(path: Path) -> None:
    os.truncate(path, 1 << 40)


def link(path: Path) -> None:
    path.rename(path.parent / "outside")
    path.symlink_to("outside")


def second_name(path: Path) -> None:
    os.link(path, path.parent / "outside")


def fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("spoil", [truncated, damaged, empty, foreign, huge, link, second_name, fifo, directory])
def test_any_other_file_is_a_cold_start_that_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, spoil: Callable[[Path], None]
) -> None:
    monkeypatch.setattr(warmth_module, "COUNTS_BYTES_MAX", 1 << 16)

    async def scenario() -> None:
        await lived(tmp_path)
        spoil(counts_path(tmp_path))
        outside = tmp_path / "outside"
        before = outside.read_bytes() if outside.exists() else b""
        assert await heat_after(tmp_path) == [0.0, 0.0]
        assert len(caplog.messages) == 1
        assert f"{counts_path(tmp_path)} is not used, so the policies start cold: " in caplog.text
        if spoil is not directory:
            await lived(tmp_path)
            assert await heat_after(tmp_path) == [2.0, 3.0]
        assert (outside.read_bytes() if outside.exists() else b"") == before

    run(scenario())


def test_no_file_is_a_cold_start_of_which_nothing_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="paramstore"):
        run(Warmth(tmp_path, {}, store_uuid=STORE, pause=asyncio.sleep).start())
    assert caplog.messages == []


# --- when it is written


def test_it_is_written_every_ten_seconds_if_something_was_used(tmp_path: Path) -> None:
    async def scenario() -> None:
        rest, namespace = Rest(), namespace_of()
        warmth, disk = await started(tmp_path, namespace, rest=rest)
        param, _ = opened(namespace)
        await turns()
        disk.calls.clear()
        written = []
        for uses in (1, 0, 0, 3, 0):
            param.record_all([HOT] * uses)
            await turns()
            assert disk.calls == []
            await rest.end()
            written.append(disk.calls == STEPS)
            disk.calls.clear()
        assert written == [True, False, False, True, False]
        assert rest.asked_s == [INTERVAL_S] * 6 == [10.0] * 6
        await warmth.close()
        assert disk.calls == []
        assert await heat_after(tmp_path) == [4.0, 0.0]

    run(scenario())


def test_nothing_is_read_or_written_where_it_was_not_started(tmp_path: Path) -> None:
    async def scenario() -> None:
        disk = Disk()
        await warmth_of(tmp_path, namespace_of(), disk=disk).close()
        assert disk.calls == []

    run(scenario())


def test_the_end_waits_for_the_write_under_way_and_then_writes_the_rest(tmp_path: Path) -> None:
    async def scenario() -> None:
        namespace, rest = namespace_of(), Rest()
        warmth = warmth_of(tmp_path, namespace, disk=Threads(), rest=rest)
        await warmth.start()
        param, _ = opened(namespace)
        param.record(HOT)
        await turns()
        rest.over.set()
        while not (tmp_path / "counts.new").exists() and not counts_path(tmp_path).exists():
            await asyncio.sleep(0)
        param.record(HOT)
        await warmth.close()
        assert await heat_after(tmp_path) == [2.0, 0.0]

    run(scenario())


# --- crashes and disks


def test_a_kill_at_any_moment_leaves_the_old_file_or_the_new_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        await lived(tmp_path)
        for killed_at, step in enumerate(STEPS):
            namespace, disk = namespace_of(), Disk(killed_at)
            opened(namespace)[0].record(HOT)
            before = counts_path(tmp_path).read_bytes()
            with pytest.raises(Killed):
                await warmth_of(tmp_path, namespace, disk=disk)._write()
            assert disk.calls[: killed_at + 1] == STEPS[: killed_at + 1], step
            assert counts_path(tmp_path).read_bytes() == before, step
            assert await heat_after(tmp_path) == [2.0, 3.0], step
        await lived(tmp_path)  # over what the kills have left
        assert await heat_after(tmp_path) == [4.0, 6.0]

    run(scenario())
    assert caplog.messages == []


@pytest.mark.parametrize("failing", [errno.ENOSPC, errno.EROFS, errno.EIO])
def test_a_disk_that_takes_no_file_is_told_once_and_tried_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, failing: int
) -> None:
    async def scenario() -> None:
        for step in STEPS[1:]:
            caplog.clear()
            await lived(tmp_path, uses=1)
            before, namespace, disk = counts_path(tmp_path).read_bytes(), namespace_of(), Disk()
            opened(namespace)[0].record_all([HOT] * 3)
            warmth = warmth_of(tmp_path, namespace, disk=disk)
            for _ in range(3):
                disk.calls.clear()
                disk.fails_at, disk.error = STEPS.index(step), OSError(failing, os.strerror(failing))
                await warmth._write()
                assert counts_path(tmp_path).read_bytes() == before, step
                assert not (tmp_path / "counts.new").exists(), step
            assert len(caplog.messages) == 1, step
            assert os.strerror(failing) in caplog.text
            disk.fails_at = None
            await warmth._write()
            assert counts_path(tmp_path).read_bytes() != before, step
            counts_path(tmp_path).unlink()

    run(scenario())


def test_counts_that_are_too_many_are_told_once_and_not_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paramstore.storage.format.counts.COUNTS_BYTES_MAX", 100)

    async def scenario() -> None:
        await lived(tmp_path)
        assert os.listdir(tmp_path) == []

    run(scenario())
    assert ["a file has at most 100" in message for message in caplog.messages] == [True]


def test_a_disk_that_hangs_delays_start_and_end_for_no_longer_than_their_bound(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warmth_module, "DISK_TIMEOUT_S", 0.01)

    async def scenario() -> None:
        namespace = namespace_of()
        warmth = warmth_of(tmp_path, namespace, disk=HangingDisk())
        await warmth.start()
        opened(namespace)[0].record(HOT)
        await warmth.close()

    run(scenario())
    first, second = caplog.messages
    assert "start cold: the disk did not answer" in first
    assert "not written in 0.01 s" in second


def test_a_bug_in_keeping_the_counts_reaches_the_log_and_nobody_else(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        namespace = namespace_of()
        warmth, disk = await started(tmp_path, namespace)
        opened(namespace)[0].record(HOT)
        disk.fails_at = len(disk.calls)
        await warmth.close()

    run(scenario())
    assert caplog.messages == ["keeping the counts of the policies failed"]


def test_commits_and_applies_wait_for_no_write(tmp_path: Path) -> None:
    async def scenario() -> None:
        machine, disk, rest = Machine(policy="decayed_lfu"), HangingDisk(), Rest()
        store = machine.start()
        warmth = Warmth(tmp_path, store.namespaces, store_uuid=store.store_uuid, threads=disk, pause=rest)
        warmth._task = asyncio.ensure_future(warmth._run())
        view = await create(store)
        rest.over.set()
        while not disk.calls:
            await asyncio.sleep(0)
        await train(store, view)
        await store.committer.commit(view, 1, b"")
        assert (view.namespace.steps.committed_step, disk.calls) == (1, 1)
        warmth._task.cancel()
        await machine.service.close()

    run(scenario())


def test_a_call_in_a_thread_gives_its_result_or_its_error() -> None:
    threads = Threads()
    assert threads.submit(divmod, 7, 2).result(10) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        threads.submit(divmod, 7, 0).result(10)
