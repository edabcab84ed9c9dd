"""Ranks in processes of their own, against a real daemon: sums, mismatches, deaths in every phase, a job that starts again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import paramstore_client as ps
from paramstore.core.key import ExpertKey
from paramstore_testkit.processes.daemon_process import DaemonProcess
from paramstore_testkit.processes.rank_process import RankProcess, gradient

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("in_time")]

Serve = Callable[..., DaemonProcess]
Value = dict[str, torch.Tensor]
SHAPE = (64, 64)
KEY, OTHER = (0, 1), (1, 2)
HOST = ("--host-budget", "64MiB")
"""And no limit of gradients: by default each rank may push every expert."""


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[RankProcess]]:
    """Three processes that can be ranks."""
    made: list[RankProcess] = []
    try:
        for number in range(3):
            made.append(RankProcess(tmp_path_factory.mktemp(f"rank{number}")))
        yield made
    finally:
        for process in made:
            process.close()


@pytest.fixture(autouse=True)
def no_rank_outlives_its_test(processes: list[RankProcess]) -> Iterator[None]:
    yield
    for process in processes:
        process.kill()


def started(daemon: DaemonProcess, processes: list[RankProcess], *, restart: int = 0) -> list[int]:
    """Opens the namespace as one group, as torchrun would have started it; gives the epoch that each rank sees."""
    for process in processes:
        process.start(daemon.address, {"TORCHELASTIC_RUN_ID": "job", "TORCHELASTIC_RESTART_COUNT": str(restart)})
    return together(processes, "open", lambda rank: {"rank": rank, "world_size": len(processes)})


def together(processes: list[RankProcess], what: str, arguments: Callable[[int], dict[str, Any]] = lambda _: {}) -> list[Any]:
    """Tells all ranks the same, then hears them all."""
    for rank, process in enumerate(processes):
        process.tell(what, **arguments(rank))
    return [process.answer() for process in processes]


class Oracle:
    """Torch's own AdamW, of one key's values."""

    def __init__(self, value: torch.Tensor) -> None:
        self.master = value.clone().requires_grad_()
        self.optimizer = torch.optim.AdamW([self.master], lr=0.1, fused=True)

    def step(self, seeds: list[int]) -> list[float]:
        summed = gradient(seeds[0], SHAPE)
        for seed in seeds[1:]:
            summed = summed + gradient(seed, SHAPE)
        self.master.grad = summed
        self.optimizer.step()
        return self.values()

    def values(self) -> list[float]:
        return list(self.master.detach().flatten().tolist())


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_train_bitwise_as_torch_does_with_gradients_summed_in_rank_order(
    size: int, directory: Path, serve: Serve, processes: list[RankProcess], value_of: Callable[[ExpertKey], Value]
) -> None:
    daemon, ranks = serve(directory, *HOST).start(), processes[:size]
    assert len(set(started(daemon, ranks))) == 1
    shared, single = Oracle(value_of(KEY)["w"]), Oracle(value_of(OTHER)["w"])
    for step in (2, 3, 4):
        seeds = [10 * step + rank for rank in range(size)]
        for rank in reversed(range(size)):
            ranks[rank].ask("push", keys=[KEY], seed=seeds[rank])
        ranks[1].ask("push", keys=[OTHER], seed=seeds[0])
        norms = together(ranks, "norm")
        assert len(set(norms)) == 1
        together(ranks, "begin_apply")
        expected, alone = shared.step(seeds), single.step([seeds[0]])
        for process in ranks:
            assert process.ask("values", key=KEY) == expected
            assert process.ask("values", key=OTHER) == alone
        assert [found["records"] for found in together(ranks, "wait")] == [2] * size
        assert len({str(found) for found in together(ranks, "commit", lambda _, step=step: {"step": step})}) == 1
    with ps.connect(daemon.address) as store, store.open_namespace("moe") as reader:
        assert reader.view_step == 4
        assert reader.read(KEY)["w"].flatten().tolist() == shared.values()


def test_ranks_that_call_different_things_are_told_and_go_on_after_a_rollback(
    directory: Path, serve: Serve, processes: list[RankProcess], value_of: Callable[[ExpertKey], Value]
) -> None:
    ranks, daemon = processes[:2], serve(directory, *HOST).start()
    started(daemon, ranks)
    ranks[0].ask("push", keys=[KEY], seed=1)
    for rank, process in enumerate(ranks):
        process.tell("apply", lr=0.1 + rank)
    for process in ranks:
        with pytest.raises(ps.StepMismatch, match=r"rank 0 called apply\(lr=0.1\), rank 1 called apply\(lr=1.1\): nothing ran"):
            process.answer()
    with pytest.raises(ps.StepMismatch):
        ranks[1].ask("push", keys=[KEY], seed=1)
    assert pending(daemon) == 1, "nothing ran"
    together(ranks, "rollback", lambda _: {"step": 1})
    assert pending(daemon) == 0
    for rank, process in enumerate(ranks):
        process.ask("push", keys=[KEY], seed=5 + rank)
    assert together(ranks, "apply") == [1, 1]
    assert ranks[0].ask("values", key=KEY) == Oracle(value_of(KEY)["w"]).step([5, 6]), "what was pushed before is gone"


def pending(daemon: DaemonProcess) -> int:
    with ps.connect(daemon.address) as store:
        return int(store.stats()["namespaces"]["moe"]["pending_gradients"])


def test_an_apply_that_is_refused_to_all_ranks_leaves_what_each_has_pushed(
    directory: Path, serve: Serve, processes: list[RankProcess], value_of: Callable[[ExpertKey], Value]
) -> None:
    ranks, daemon = processes[:2], serve(directory, *HOST).start()
    started(daemon, ranks)
    together(ranks, "prepare", lambda _: {"step": 2})
    together(ranks, "push", lambda rank: {"keys": [KEY], "seed": 1 + rank})
    together(ranks, "begin_apply")
    together(ranks, "push", lambda rank: {"keys": [KEY], "seed": 3 + rank})
    for process in ranks:
        with pytest.raises(ps.StepPrepared):
            process.ask("wait")
    assert pending(daemon) == 1
    together(ranks, "finalize", lambda _: {"step": 2})
    assert together(ranks, "apply") == [1, 1]
    oracle = Oracle(value_of(KEY)["w"])
    oracle.master.grad = (gradient(1, SHAPE) + gradient(3, SHAPE)) + (gradient(2, SHAPE) + gradient(4, SHAPE))
    oracle.optimizer.step()
    assert ranks[0].ask("values", key=KEY) == oracle.values()


PHASES = ["opened", "pushed", "in apply", "applied", "in commit", "committed"]


def reach(phase: str, ranks: list[RankProcess]) -> None:
    """Brings both ranks so far; in a call means that rank 1 has called, and rank 0 has not."""
    if phase == "opened":
        return
    for rank, process in enumerate(ranks):
        process.ask("push", keys=[KEY], seed=rank)
    if phase == "pushed":
        return
    if phase == "in apply":
        ranks[1].ask("begin_apply")
        return
    together(ranks, "apply")
    if phase == "in commit":
        ranks[1].ask("begin_commit", step=2)
    elif phase == "committed":
        together(ranks, "commit", lambda _: {"step": 2})


@pytest.mark.parametrize("phase", PHASES)
def test_a_rank_that_is_killed_is_named_to_the_others_and_the_job_starts_again_at_the_committed_step(
    phase: str, directory: Path, serve: Serve, processes: list[RankProcess], value_of: Callable[[ExpertKey], Value]
) -> None:
    daemon, old = serve(directory, *HOST).start(), processes[:2]
    (epoch, _) = started(daemon, old)
    reach(phase, old)
    old[1].kill()
    with pytest.raises(ps.RankLost, match="rank 1 is gone: the session of its process"):
        old[0].ask("norm")
    assert len(old[0].ask("values", key=OTHER)) == SHAPE[0] * SHAPE[1], "leases go on"
    new = [processes[1], processes[2]]
    assert started(daemon, new, restart=1) == [epoch + 1] * 2, "one rollback for both"
    for what, arguments in (("push", {"keys": [OTHER], "seed": 9}), ("commit", {"step": 9}), ("norm", {})):
        with pytest.raises(ps.WriterFenced):
            old[0].ask(what, **arguments)
    oracle = Oracle(value_of(KEY)["w"])
    if phase == "committed":
        oracle.step([0, 1])
    assert together(new, "committed_step") == [2 if phase == "committed" else 1] * 2
    assert new[0].ask("values", key=KEY) == oracle.values()
    for rank, process in enumerate(new):
        process.ask("push", keys=[KEY], seed=5 + rank)
    assert together(new, "apply") == [1, 1]
    assert new[1].ask("values", key=KEY) == oracle.step([5, 6])
    assert together(new, "commit", lambda _: {"step": 3})[0]["records"] == 1


def test_a_daemon_that_is_killed_serves_the_same_group_again_after_its_restart(
    directory: Path, serve: Serve, processes: list[RankProcess], value_of: Callable[[ExpertKey], Value]
) -> None:
    daemon, ranks = serve(directory, *HOST).start(), processes[:2]
    started(daemon, ranks)
    for rank, process in enumerate(ranks):
        process.ask("push", keys=[KEY], seed=rank)
    together(ranks, "apply")
    ranks[0].ask("begin_commit", step=2)
    daemon.kill()
    for process, what in ((ranks[0], "wait"), (ranks[1], "norm")):
        with pytest.raises(ps.StoreUnavailable):
            process.ask(what)
    serve(directory, *HOST).start()
    together(ranks, "reconnect")
    together(ranks, "open", lambda rank: {"rank": rank, "world_size": 2})
    assert together(ranks, "committed_step") == [1, 1]
    oracle = Oracle(value_of(KEY)["w"])
    assert ranks[1].ask("values", key=KEY) == oracle.values()
    for rank, process in enumerate(ranks):
        process.ask("push", keys=[KEY], seed=rank)
    together(ranks, "apply")
    assert ranks[0].ask("values", key=KEY) == oracle.step([0, 1])
