"""Snapshots and rollbacks through a real daemon, over its death: what a user keeps and goes back to."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import paramstore_client as ps
from paramstore.core.key import ExpertKey
from paramstore_testkit.processes.daemon_process import DaemonProcess

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("in_time")]

Serve = Callable[..., DaemonProcess]
Values = dict[ExpertKey, torch.Tensor]
OPTIONS = ps.AdamW(lr=0.1)


def values(namespace: ps.Namespace) -> Values:
    found = {}
    for layer in namespace.layers:
        keys = [key for key in namespace.space if key[0] == layer]
        with namespace.acquire(keys) as lease:
            found.update({key: lease[key]["w"].clone() for key in keys})
    return found


def train(namespace: ps.Namespace, step: int) -> Values:
    """One step on every record; gives the values it is committed with."""
    generator = torch.Generator().manual_seed(step)
    namespace.push({key: {"w": torch.randn(64, 64, generator=generator)} for key in namespace.space})
    namespace.apply(OPTIONS)
    made = values(namespace)
    namespace.commit(step, b"extra of %d" % step).wait()
    return made


def equal(found: Values, expected: Values) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[key], expected[key]) for key in found)


def test_a_snapshot_outlives_commits_its_taker_and_the_daemon_until_it_is_dropped(directory: Path, serve: Serve) -> None:
    daemon = serve(directory).start()
    with ps.connect(daemon.address) as store, store.open_namespace("moe", mode="write") as trainer:
        kept = train(trainer, 2)
        with trainer.snapshot(2) as view:
            assert (view.mode, view.view_step) == ("read", 2)
            for step in (3, 4, 5):
                train(trainer, step)
            assert equal(values(view), kept), "it stands still while training goes on"
        assert trainer.steps() == [2, 4, 5]
        assert trainer.snapshots() == [2]
        with pytest.raises(ps.StepDropped, match="step 3 of namespace 'moe' is not retained"):
            trainer.snapshot(3)
    daemon.kill()
    with ps.connect(serve(directory).start().address) as store, store.open_namespace("moe") as reader:
        assert reader.snapshots() == [2]
        assert reader.extra(2) == b"extra of 2"
        with store.open_namespace("moe", at=2, min_lease_slots=4) as view:
            assert equal(values(view), kept)
        reader.drop_snapshot(2)  # a reader may: it changes no record
        assert reader.steps() == [4, 5]
        with pytest.raises(ps.StepDropped, match="step 2"):
            store.open_namespace("moe", at=2)
        with pytest.raises(ps.StepDropped, match="step 4 of namespace 'moe' is no snapshot"):
            reader.drop_snapshot(4)


def test_training_goes_back_to_an_older_step_and_on_from_there(directory: Path, serve: Serve) -> None:
    daemon = serve(directory, "--host-budget", "64MiB", "--config", str(retaining(directory, 4))).start()
    with ps.connect(daemon.address) as store, store.open_namespace("moe", mode="write") as trainer:
        first = {step: train(trainer, step) for step in (2, 3, 4)}
        reader = store.open_namespace("moe", at=4)
        held = reader.acquire([(0, 0)])
        trainer.rollback(2)
        assert trainer.steps() == [1, 2]
        assert equal(values(trainer), first[2])
        assert torch.equal(held[0, 0]["w"], first[4][0, 0]), "what is leased stays"
        with pytest.raises(ps.StepDropped):
            reader.acquire([(0, 1)])
        assert reader.refresh() == 2
        assert equal(train(trainer, 3), first[3]), "the same gradients make the same bits"
        held.release()
        trainer.snapshot(3).close()
        with pytest.raises(ps.StepFailed, match="step 3 is a snapshot"):
            trainer.rollback(2)
    daemon.kill()
    with ps.connect(serve(directory).start().address) as store, store.open_namespace("moe", mode="write") as trainer:
        assert trainer.steps() == [1, 2, 3]
        assert equal(values(trainer), first[3])
        assert equal(train(trainer, 4), first[4])
        train(trainer, 5)
        assert trainer.steps() == [3, 4, 5], "this daemon retains two: what is more went with its first commit, but the snapshot"


def gradients(namespace: ps.Namespace, seed: int) -> dict[ExpertKey, dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return {key: {"w": torch.randn(64, 64, generator=generator)} for key in namespace.space}


def test_what_is_refused_leaves_its_gradients_pending_and_the_next_apply_takes_them_bitwise(directory: Path, serve: Serve) -> None:
    with ps.connect(serve(directory).start().address) as store, store.open_namespace("moe", mode="write") as trainer:
        trainer.prepare(2).wait()
        trainer.push(gradients(trainer, 1))
        unread = trainer.apply(OPTIONS)
        trainer.push(gradients(trainer, 2))
        with pytest.raises(ps.StepPrepared):
            unread.wait()
        with pytest.raises(ps.StepPrepared):
            trainer.apply(OPTIONS).wait()
        with pytest.raises(ps.StepDropped):
            trainer.rollback(77)
        other = store.create_namespace("other", trainer.schema, layers=2, experts=4)
        other.initialize(lambda key: {"w": torch.ones(64, 64)})  # takes what upload memory is free
        trainer.push(gradients(trainer, 3))
        assert store.stats()["namespaces"]["moe"]["pending_gradients"] == 8
        trainer.finalize(2).wait()
        assert trainer.apply(OPTIONS).wait()["records"] == 8
        found = values(trainer)
        trainer.rollback(2)
        for seed in (1, 2, 3):
            trainer.push(gradients(trainer, seed))
        trainer.apply(OPTIONS)
        assert equal(found, values(trainer))


def test_what_is_refused_can_be_aborted_and_an_apply_that_failed_has_consumed(directory: Path, serve: Serve) -> None:
    with ps.connect(serve(directory).start().address) as store, store.open_namespace("moe", mode="write") as trainer:
        free_bytes = trainer._area.free_bytes
        trainer.push(gradients(trainer, 1))
        trainer.apply(OPTIONS).wait()
        before = free_bytes()
        trainer.prepare(2).wait()
        trainer.push(gradients(trainer, 2))
        with pytest.raises(ps.StepPrepared):
            trainer.apply(OPTIONS).wait()
        assert trainer.abort() == 8
        assert free_bytes() == before
        assert store.stats()["namespaces"]["moe"]["pending_gradients"] == 0
        trainer.finalize(2).wait()
        assert trainer.apply(OPTIONS).wait()["records"] == 0
        trainer.push(gradients(trainer, 3))
        fenced = trainer.apply(OPTIONS)
        with store.open_namespace("moe", mode="write"):  # stops the apply, or comes after it
            fenced.settled_within(10.0)
            assert free_bytes() == before


def retaining(directory: Path, steps: int) -> Path:
    path = directory.parent / "paramstore.toml"
    path.write_text(f"retained_steps = {steps}\n")
    return path


def test_a_reader_that_moves_to_a_step_knows_the_newest_one_also_after_a_rollback(directory: Path, serve: Serve) -> None:
    daemon = serve(directory).start()
    with ps.connect(daemon.address) as store, store.open_namespace("moe", mode="write") as trainer:
        reader = store.open_namespace("moe")
        for step in (2, 3):
            train(trainer, step)
        assert (reader.refresh(3), reader.committed_step) == (3, 3)
        assert (reader.refresh(2), reader.committed_step) == (2, 3), "it went back by itself"
        trainer.rollback(2)
        assert (reader.refresh(2), reader.view_step, reader.committed_step) == (2, 2, 2)
