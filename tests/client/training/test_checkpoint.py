"""A manifest names a durable step of one store; loading it takes the experts back there, or says why not."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

import paramstore_client as ps
from paramstore.errors import SchemaMismatch, StepDropped, StepOutOfOrder
from paramstore_client.training import Experts, bind
from paramstore_client.training.checkpoint import Manifest
from paramstore_testkit.training.toy_moe import FIELDS, Pair, batch, make_stored, plain_loop


def train(pair: Pair, steps: int) -> None:
    plain_loop(pair.stored, pair.stored_optimizer, steps=steps)
    pair.stored_optimizer.zero_grad()


def masters(namespace: ps.Namespace) -> list[torch.Tensor]:
    return [namespace.read(key)["master/down"] for key in namespace.space]


def equal(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return all(map(torch.equal, left, right))


def test_the_manifest_is_small_and_plain(namespace: ps.Namespace) -> None:
    experts = bind(make_stored(namespace), namespace)
    manifest = experts.state_dict()
    assert manifest["step"] == 0
    assert manifest["namespace"] == namespace.name
    assert manifest["dtype"] == "float32"
    assert len(manifest["store"]) == 32
    assert all(isinstance(value, str | int) for value in manifest.values())


def test_what_was_saved_with_torch_save_is_trained_again_bit_for_bit(namespace: ps.Namespace) -> None:
    pair = Pair.make(namespace)
    train(pair, 2)
    pair.experts.commit(2)
    file = io.BytesIO()
    states = {"model": pair.stored, "optimizer": pair.stored_optimizer, "experts": pair.experts}
    torch.save({name: state.state_dict() for name, state in states.items()}, file)
    train(pair, 3)
    pair.experts.commit(5).wait()
    expected = masters(namespace)
    file.seek(0)
    saved = torch.load(file)
    for name, state in states.items():
        state.load_state_dict(saved[name])
    assert namespace.committed_step == 2
    assert not equal(masters(namespace), expected)
    train(pair, 3)
    assert equal(masters(namespace), expected)
    pair.experts.commit(5).wait()


def test_distributed_checkpoint_holds_it_as_a_stateful(namespace: ps.Namespace, tmp_path: Path) -> None:
    pair = Pair.make(namespace)
    train(pair, 2)
    pair.experts.commit(7)
    with pytest.warns(UserWarning, match="single process"):
        dcp.save({"model": pair.stored.state_dict(), "experts": pair.experts}, checkpoint_id=tmp_path)
    expected = masters(namespace)
    train(pair, 1)
    with pytest.raises(StepOutOfOrder, match=r"1 applies after its committed step 7.*experts.rollback\(\)"):
        pair.experts.state_dict()
    pair.experts.commit(8).wait()
    with pytest.warns(UserWarning, match="single process"):
        dcp.load({"model": pair.stored.state_dict(), "experts": pair.experts}, checkpoint_id=tmp_path)
    assert namespace.committed_step == 7
    assert equal(masters(namespace), expected)


def test_uncommitted_updates_are_refused_or_committed_on_request(namespace: ps.Namespace) -> None:
    pair = Pair.make(namespace)
    train(pair, 3)
    with pytest.raises(StepOutOfOrder, match=r"3 applies after its committed step 0: to save, call experts.commit\(step\)"):
        pair.experts.state_dict()
    pair.experts.commit_on_state_dict = True
    assert pair.experts.state_dict()["step"] == 3
    assert namespace.committed_step == 3


def test_rollback_drops_what_was_applied_since_the_commit(namespace: ps.Namespace) -> None:
    pair = Pair.make(namespace)
    before = masters(namespace)
    train(pair, 2)
    pair.stored(batch(0)).backward()
    pair.experts.rollback()
    assert equal(masters(namespace), before)
    assert namespace.pending_count == 0
    assert pair.experts.state_dict()["step"] == 0


def test_a_step_that_is_not_kept_is_refused_with_those_that_are(namespace: ps.Namespace) -> None:
    pair = Pair.make(namespace)
    manifest = pair.experts.state_dict()
    for step in (1, 2, 3):
        train(pair, 1)
        pair.experts.commit(step)
    with pytest.raises(StepDropped, match=r"step 0 .* is not kept; kept are 2, 3: .*retained_steps"):
        pair.experts.load_state_dict(manifest)
    assert namespace.committed_step == 3


def test_manifests_of_others_are_refused(namespace: ps.Namespace, new_namespace: Callable[..., ps.Namespace]) -> None:
    experts = bind(make_stored(namespace), namespace)
    manifest = experts.state_dict()
    other = new_namespace()
    with pytest.raises(SchemaMismatch, match="of namespace"):
        bind(make_stored(other), other).load_state_dict(manifest)
    for name, value in (("store", "0" * 32), ("layout", "other")):
        with pytest.raises(SchemaMismatch, match=f"of {name} '{value}'"):
            experts.load_state_dict({**manifest, name: value})
    with pytest.raises(SchemaMismatch, match="older copy"):
        experts.load_state_dict({**manifest, "epoch": namespace.epoch + 1})
    with pytest.raises(SchemaMismatch, match="format 9"):
        experts.load_state_dict({**manifest, "format": 9})
    with pytest.raises(SchemaMismatch, match="not a manifest"):
        experts.load_state_dict({"step": 1})


def test_a_namespace_without_a_commit_has_no_manifest(store: ps.Store) -> None:
    schema = ps.adamw_schema(FIELDS, param_dtype="float32")
    with store.create_namespace("fresh", schema, layers=1, experts=1) as fresh:
        experts = bind(torch.nn.Linear(1, 1), fresh)
        with pytest.raises(StepOutOfOrder, match="no committed step yet"):
            experts.state_dict()


def test_loading_at_the_present_step_keeps_what_is_resident(namespace: ps.Namespace) -> None:
    pair = Pair.make(namespace)
    epoch = namespace.epoch
    pair.stored(batch(0)).backward()
    pair.experts.load_state_dict(pair.experts.state_dict())
    assert namespace.epoch == epoch
    assert namespace.pending_count == 0


def test_another_process_resumes_where_the_manifest_says(namespace: ps.Namespace, store: ps.Store) -> None:
    """A new writer of the same store: it opens at the newest step, and goes back to that of the dense checkpoint."""
    pair = Pair.make(namespace)
    train(pair, 1)
    pair.experts.commit(1)
    manifest, expected = pair.experts.state_dict(), masters(namespace)
    train(pair, 1)
    pair.experts.commit(2).wait()
    with store.open_namespace(namespace.name, mode="write") as again:
        experts: Experts = bind(make_stored(again), again)
        experts.load_state_dict(manifest)
        assert again.committed_step == 1
        assert equal(masters(again), expected)


def test_what_lacks_keys_of_a_manifest_is_refused_with_their_names() -> None:
    with pytest.raises(SchemaMismatch, match=r"^not a manifest of experts: format, store, .* missing, it has \[\]$"):
        Manifest.from_dict({})
    with pytest.raises(SchemaMismatch, match=r"missing, it has \['1', 'format'\]"):
        Manifest.from_dict({"format": 1, 1: 2})  # of two types, which cannot be sorted
