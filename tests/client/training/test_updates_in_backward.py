"""Updates that begin in backward compute what updates at the step do, bit for bit; what they cannot follow is refused loudly."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import StepLR
from torch.utils.checkpoint import checkpoint

import paramstore_client as ps
from paramstore.errors import StepFailed, StepMismatch, StepOutOfOrder
from paramstore_client.training import bind
from paramstore_testkit.training.toy_moe import Pair, adamw, batch, make_namespace, make_stored, plain_loop


def early(namespace: ps.Namespace) -> Pair:
    return Pair.make(namespace, updates_in_backward=True)


def test_the_plain_loop_computes_what_it_does_in_memory(namespace: ps.Namespace) -> None:
    early(namespace).run_equal(plain_loop)


def test_updates_are_under_way_before_the_step(namespace: ps.Namespace) -> None:
    pair = early(namespace)
    pair.stored(batch(0)).backward()
    assert namespace.is_applying
    key = next(key for key in namespace.space if key in namespace._pending._ranges)
    with namespace.acquire([key]) as lease:
        assert lease.identity(key).version == 1
    pair.stored_optimizer.step()
    assert not namespace.is_applying


def test_an_exact_namespace_computes_what_plain_applies_do(store: ps.Store) -> None:
    def make_schema(*arguments: object, **named: object) -> ps.Schema:
        return ps.adamw_schema(*arguments, **named, updates="exact")  # type: ignore[arg-type]

    seen = []
    for name, is_early in (("exact-plain", False), ("exact-early", True)):
        namespace = make_namespace(store, name, make_schema)
        stored = make_stored(namespace)
        experts, optimizer = bind(stored, namespace), adamw(stored.parameters())
        experts.attach(optimizer, updates_in_backward=is_early)
        losses = plain_loop(stored, optimizer, steps=6)
        experts.settle()
        records = {(key, field): value for key in namespace.space for field, value in namespace.read(key).items()}
        seen.append((losses, records))
    assert seen[0][0] == seen[1][0]
    assert [at for at, value in seen[0][1].items() if not torch.equal(value, seen[1][1][at])] == []


def test_schedulers_checkpoints_and_a_late_zero_grad_change_nothing(namespace: ps.Namespace) -> None:
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
        scheduler, losses = StepLR(optimizer, 1, gamma=0.5), []
        model.wrap = lambda fn, *inputs: checkpoint(fn, *inputs, use_reentrant=False)  # type: ignore[assignment]
        for step in range(4):
            loss = model(batch(step))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            losses.append(loss.item().hex())
        return losses

    early(namespace).run_equal(loop)


def test_micro_batches_but_the_last_are_held_back(namespace: ps.Namespace) -> None:
    pair = early(namespace)

    def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for step in range(3):
            optimizer.zero_grad()
            for micro in range(3):
                with pair.experts.accumulate() if model is pair.stored and micro < 2 else nullcontext():
                    (model(batch(3 * step + micro)) / 3).backward()
            optimizer.step()

    pair.run_equal(loop)


def test_a_step_of_held_back_backwards_alone_is_a_plain_one(namespace: ps.Namespace) -> None:
    pair = early(namespace)

    def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        with pair.experts.accumulate() if model is pair.stored else nullcontext():
            model(batch(0)).backward()
        optimizer.step()

    pair.run_equal(loop)


def test_forwards_without_a_backward_and_commits_between_steps_are_no_matter(namespace: ps.Namespace) -> None:
    pair = early(namespace)
    steps = iter(range(1, 10))

    def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for step in range(3):
            optimizer.zero_grad()
            model(batch(step)).backward()
            optimizer.step()
            model(batch(step))
            optimizer.param_groups[0]["lr"] /= 2
            if model is pair.stored:
                pair.experts.commit(next(steps)).wait()

    pair.run_equal(loop)
    assert namespace.committed_step == 3


# --- what it cannot follow


def clip(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    clip_grad_norm_(model.parameters(), 1e-3)


def clip_by_nothing(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """The norm lacked the experts': whether 1.0 was the right factor is not known."""
    clip_grad_norm_(model.parameters(), 1e9)


def change_the_rate(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[0]["lr"] *= 2


@pytest.mark.parametrize("scale", [clip, clip_by_nothing, change_the_rate])
def test_a_step_of_other_gradients_or_options_is_refused_and_rolled_back(
    namespace: ps.Namespace, scale: Callable[[nn.Module, torch.optim.Optimizer], None]
) -> None:
    pair = early(namespace)
    pair.stored(batch(0)).backward()
    scale(pair.stored, pair.stored_optimizer)
    with pytest.raises(StepFailed, match="had begun in backward"):
        pair.stored_optimizer.step()
    pair.experts.rollback()
    pair.stored_optimizer.zero_grad()
    assert namespace.pending_count == 0
    plain_loop(pair.stored, pair.stored_optimizer)


@pytest.mark.parametrize("is_fused", [True, False])
@pytest.mark.parametrize("is_finite", [True, False])
def test_a_scaler_is_refused(namespace: ps.Namespace, is_fused: bool, is_finite: bool) -> None:
    pair = Pair.make(
        namespace, lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, fused=is_fused), updates_in_backward=True
    )
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    scaler.scale(pair.stored(batch(0)) * (1.0 if is_finite else torch.inf)).backward()

    def go_on() -> None:
        scaler.step(pair.stored_optimizer)
        pair.stored_optimizer.zero_grad()  # one that skips an unfused optimizer calls nobody
        pair.stored(batch(0))

    with pytest.raises(StepFailed):
        go_on()


def test_a_second_backward_before_the_step_says_what_to_do(namespace: ps.Namespace) -> None:
    pair = early(namespace)
    pair.stored(batch(0)).backward()
    with pytest.raises(StepMismatch, match=r"experts.accumulate\(\)"):
        pair.stored(batch(0)).backward()
    loss = pair.stored(batch(0))
    with pair.experts.accumulate(), pytest.raises(StepMismatch, match="put both into it"):
        loss.backward()


def test_gradients_that_were_applied_cannot_be_dropped(namespace: ps.Namespace) -> None:
    pair = early(namespace)
    pair.stored(batch(0)).backward()
    pair.stored_optimizer.zero_grad()
    with pytest.raises(StepFailed, match="rollback"):
        pair.stored(batch(0))


def test_a_commit_between_backward_and_step_is_refused(namespace: ps.Namespace) -> None:
    pair = early(namespace)
    pair.stored(batch(0)).backward()
    with pytest.raises(StepOutOfOrder, match="end_apply"):
        pair.experts.commit(1).wait()
    pair.experts._commit = None
    with pytest.raises(StepOutOfOrder, match="begun in backward"):
        pair.experts.state_dict()
    pair.stored_optimizer.step()
    pair.experts.commit(1).wait()


def test_detach_ends_an_apply_that_saw_no_backward_and_no_other(namespace: ps.Namespace) -> None:
    pair = early(namespace)
    loss = pair.stored(batch(0))
    pair.experts.detach()
    assert not namespace.is_applying
    pair.experts.attach(pair.stored_optimizer, updates_in_backward=True)
    loss.backward()
    pair.stored_optimizer.step()
    pair.stored_optimizer.zero_grad()
    pair.stored(batch(1)).backward()
    with pytest.raises(StepMismatch, match=r"optimizer.step\(\)"):
        pair.experts.detach()
    pair.stored_optimizer.step()
    pair.experts.detach()


def test_attach_refuses_a_share_of_less_than_two_layers_gradients_and_changes_nothing(namespace: ps.Namespace) -> None:
    stored = make_stored(namespace)
    experts, optimizer = bind(stored, namespace), adamw(stored.parameters())
    needed = namespace._pending.room_bytes
    namespace._pending.share_bytes = needed - 1
    with pytest.raises(ps.CapacityError, match=f"raise gradient_budget to {needed} bytes"):
        experts.attach(optimizer, updates_in_backward=True)
    experts.attach(optimizer)
    experts.detach()
    namespace._pending.share_bytes = needed
    experts.attach(optimizer, updates_in_backward=True)
