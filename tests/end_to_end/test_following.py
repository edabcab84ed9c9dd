"""A reader follows a training process through a real daemon: step by step, behind, over rollbacks, and to the daemon's death."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import paramstore_client as ps
from paramstore.core.key import ExpertKey
from paramstore_testkit.processes.daemon_process import DaemonProcess
from paramstore_testkit.processes.rank_process import RankProcess

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("in_time")]

Serve = Callable[..., DaemonProcess]
LIMIT_S = 20.0
MOVES = 200
FAST_MOVES = 40


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankProcess]:
    """A process that can train."""
    process = RankProcess(tmp_path_factory.mktemp("trainer"))
    yield process
    process.close()


@pytest.fixture
def daemon(directory: Path, serve: Serve) -> DaemonProcess:
    return serve(directory, PARAMSTORE_HELD_STEPS="2").start()  # for who computes with a step while commits go on


@pytest.fixture
def trainer(process: RankProcess, daemon: DaemonProcess) -> Iterator[RankProcess]:
    """The process, writing the daemon's namespace."""
    process.start(daemon.address, {})
    process.ask("open", rank=0, world_size=1)
    yield process
    process.kill()


@pytest.fixture
def reader(trainer: RankProcess, daemon: DaemonProcess) -> Iterator[ps.Namespace]:
    """A reader in this process, on step 1."""
    with ps.connect(daemon.address) as store, store.open_namespace("moe", min_lease_slots=8) as reader:
        yield reader


def commit(trainer: RankProcess, step: int, keys: list[ExpertKey]) -> None:
    """Has the trainer change `keys` and commit that."""
    trainer.ask("push", keys=keys, seed=step)
    trainer.ask("apply")
    trainer.ask("commit", step=step)


def run(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(scenario, LIMIT_S))


def values(reader: ps.Namespace, key: ExpertKey) -> list[float]:
    with reader.acquire([key]) as lease:
        return list(lease[key]["w"].flatten().tolist())


def test_a_reader_that_sleeps_through_many_commits_goes_on_with_the_newest(trainer: RankProcess, reader: ps.Namespace) -> None:
    told: list[int] = []
    awake = asyncio.Event()
    read = asyncio.Event()

    async def follow() -> None:
        async for step in reader.steps_as_they_come():
            moved = reader.refresh()
            told.append(step)
            assert moved == step
            assert moved.changed_keys == (1 if step == 2 else 3)
            for key in ((0, 0), (0, 1), (1, 2)):
                assert values(reader, key) == await asyncio.to_thread(trainer.ask, "values", key=key)
            read.set()
            await awake.wait()

    async def scenario() -> None:
        following = asyncio.create_task(follow())
        await asyncio.to_thread(commit, trainer, 2, [(0, 0)])
        await read.wait()
        for step in range(3, 15):
            await asyncio.to_thread(commit, trainer, step, [((0, 0), (0, 1), (1, 2))[step % 3]])
        assert told == [2]
        read.clear()
        awake.set()
        await read.wait()
        assert told == [2, 14]
        following.cancel()
        await asyncio.wait([following])

    run(scenario())


def test_a_thread_that_waits_is_told_of_commits_rollbacks_and_the_end(
    trainer: RankProcess, reader: ps.Namespace, daemon: DaemonProcess
) -> None:
    async def scenario() -> None:
        waiting = asyncio.create_task(asyncio.to_thread(reader.wait_for_step, None, LIMIT_S))
        await asyncio.to_thread(commit, trainer, 4, [(0, 0)])
        assert await waiting == 4
        assert reader.refresh() == 4
        waiting = asyncio.create_task(asyncio.to_thread(reader.wait_for_step, None, LIMIT_S))
        await asyncio.to_thread(trainer.ask, "rollback", step=1)
        assert await waiting == 1, "its own step is gone"
        assert reader.refresh() == 1
        steps = reader.steps_as_they_come(after=0)
        assert await anext(steps) == 1
        coming = asyncio.create_task(anext(steps))  # type: ignore[arg-type]  # it is a coroutine
        await asyncio.to_thread(commit, trainer, 4, [(0, 0)])
        assert await coming == 4
        coming = asyncio.create_task(anext(steps))  # type: ignore[arg-type]  # it is a coroutine
        await asyncio.sleep(0)
        daemon.kill()
        with pytest.raises(ps.StoreUnavailable):
            await coming

    run(scenario())


def test_a_refresh_after_a_commit_of_a_few_keys_reads_these_alone_from_the_volume(
    trainer: RankProcess, reader: ps.Namespace, daemon: DaemonProcess
) -> None:
    with ps.connect(daemon.address) as store:
        def bytes_read() -> int:
            return sum(volume["bytes_read"] for volume in store.stats()["volumes"].values())

        before = bytes_read()
        for key in reader.space:
            values(reader, key)
        record_bytes = (bytes_read() - before) // len(reader.space)
        assert record_bytes >= 64 * 64 * 4
        changed: list[ExpertKey] = [(0, 3), (1, 0), (1, 1)]
        commit(trainer, 2, changed)
        reader.evict(changed).wait()  # what training has left of them in memory
        before = bytes_read()
        moved = reader.refresh()
        assert (moved, moved.changed_keys) == (2, 3)
        assert moved.changed_bytes == 3 * reader.schema.part("param").image_bytes
        assert bytes_read() == before
        for key in reader.space:
            assert values(reader, key) == trainer.ask("values", key=key)
        assert bytes_read() - before == 3 * record_bytes


def test_experts_and_dense_weights_are_of_one_step_at_each_of_hundreds_of_moves(daemon: DaemonProcess, tmp_path: Path) -> None:
    """A model follows another process's commits, which come as fast as it can make them, and tell their step in each weight."""
    from paramstore_client.hf.compat import modeling

    command = [sys.executable, "-m", "paramstore_testkit.processes.dense_trainer", daemon.address, "telling", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as trainer, ps.connect(daemon.address) as store:
        try:
            assert trainer.stdout is not None
            assert trainer.stdout.readline() == "ready\n"
            auto = modeling.transformers().AutoModelForCausalLM
            served = ps.hf.from_pretrained(auto, tmp_path / "saved", store=store, name="telling", mode="infer", expert_memory=4)
            reader = ps.hf.namespace(served)
            first = values_at(reader)
            begun = reader.view_step
            moved = [ps.hf.follow(served)]
            while len(moved) < MOVES:
                assert trainer.poll() is None
                followed = ps.hf.follow(served)
                if followed.has_moved:
                    moved.append(followed)
                    dense = {float(parameter.detach().flatten()[0]) for parameter in served.parameters()}
                    added = {round(now - then) + begun for now, then in zip(values_at(reader), first, strict=True)}
                    assert dense == added == {float(followed.step or 0)} == {float(reader.view_step or 0)}
        finally:
            trainer.kill()
    assert [one.step for one in moved] == sorted({one.step for one in moved})


def test_generate_beside_commits_that_come_faster_than_its_tokens_never_mixes_two_steps(
    daemon: DaemonProcess, tmp_path: Path
) -> None:
    """Each layer of each token finds the experts and the dense weights of one step, the newest by then or one just before."""
    from paramstore_client.hf.compat import modeling
    from paramstore_client.hf.model.binding import layer_of
    from paramstore_client.hf.model.layout import experts_modules

    command = [sys.executable, "-m", "paramstore_testkit.processes.dense_trainer", daemon.address, "fast", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as trainer, ps.connect(daemon.address) as store:
        try:
            assert trainer.stdout is not None
            assert trainer.stdout.readline() == "ready\n"
            auto = modeling.transformers().AutoModelForCausalLM
            served = ps.hf.from_pretrained(auto, tmp_path / "saved", store=store, name="fast", mode="infer", expert_memory=4)
            reader = ps.hf.namespace(served)
            begun, key = reader.view_step, reader.keys()[0]
            with reader.acquire([key]) as lease:
                field = next(iter(lease[key]))
                first = float(lease[key][field].flatten()[0])
            found: list[list[tuple[float, float]]] = []

            def look(module: torch.nn.Module, *_: Any) -> None:
                with layer_of(module).source.acquire([key]) as lease:
                    expert = round(float(lease[key][field].flatten()[0]) - first) + (begun or 0)
                found[-1].append((float(expert), float(next(served.parameters()).detach().flatten()[0])))

            layers = list(experts_modules(served).values())
            for module in layers:
                module.register_forward_pre_hook(look)
            served.register_forward_pre_hook(lambda *_: found.append([]))
            with ps.hf.following(served) as progress:
                while progress.move_count < FAST_MOVES:
                    served.generate(torch.ones(1, 4, dtype=torch.int64), max_new_tokens=8, min_new_tokens=8, do_sample=False)
                    assert trainer.poll() is None
        finally:
            trainer.kill()
    computed = [token for token in found if len(token) >= len(layers)]
    for token in computed:
        steps = {step for pair in token[-len(layers):] for step in pair}  # what lies before them was dropped, and computed again
        assert len(steps) == 1, token
    assert len({token[-1] for token in computed}) >= FAST_MOVES // 2


def values_at(reader: ps.Namespace) -> list[float]:
    """The first element of every expert's first field."""
    found = []
    for key in reader.space:
        with reader.acquire([key]) as lease:
            found.append(float(next(iter(lease[key].values())).flatten()[0]))
    return found
