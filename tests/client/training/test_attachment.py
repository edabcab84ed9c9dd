"""Steps that are skipped, backwards that fail, and loops that are wrong: no gradient is lost or counted twice in silence."""

from __future__ import annotations

import logging
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

import paramstore_client as ps
from paramstore.errors import StepFailed, StepMismatch
from paramstore_client.training import bind
from paramstore_testkit.training.toy_moe import Pair, batch, make_stored, plain_loop

LOGGER = "paramstore_client.training.attachment"
CLOSE = {"rtol": 1e-4, "atol": 1e-6}


def experts_of(ns: ps.Namespace) -> dict[tuple[int, int], torch.Tensor]:
    return {key: ns.read(key)["master/down"] for key in ns.space}


def assert_unchanged(ns: ps.Namespace, before: dict[tuple[int, int], torch.Tensor]) -> None:
    assert [key for key, value in experts_of(ns).items() if not torch.equal(value, before[key])] == []


# --- GradScaler



@pytest.mark.parametrize("is_clipped", [True, False], ids=["unscale and clip", "step alone"])
@pytest.mark.parametrize("is_fused", [True, False], ids=["fused", "unfused"])
def test_the_scaler_unscales_and_skips_the_experts(
    namespace: ps.Namespace, is_fused: bool, is_clipped: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """The scale is a power of two, so that it changes no bit; step 1 overflows."""

    def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        scales = []
        for step in range(4):
            loss = model(batch(step)) * (torch.inf if step == 1 else 1.0)
            scaler.scale(loss).backward()
            if is_clipped:
                scaler.unscale_(optimizer)
                clip_grad_norm_(model.parameters(), 1e3)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            scales.append(scaler.get_scale())
        return scales

    def make(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1, fused=is_fused)

    with caplog.at_level(logging.INFO, LOGGER):
        pair = Pair.make(namespace, make)
        seen, expected = pair.run(loop)
    assert seen == expected == [1024.0, 512.0, 512.0, 512.0]
    assert pair.differences(**({} if is_fused else CLOSE)) == []
    assert namespace.pending_count == 0
    assert len([record for record in caplog.records if "dropped" in record.message]) == 1


def test_an_overflow_in_the_experts_alone_skips_the_step(namespace: ps.Namespace) -> None:
    """Their gradients are infinite, the dense ones finite: only the sentinel shows it."""
    pair = Pair.make(namespace)
    pair.stored(batch(0)).backward()
    shapes = namespace.read((0, 0))
    namespace.push({(0, 0): {name: torch.full_like(shapes[name], torch.inf) for name in ("gate_up", "down")}})
    pair.experts.sentinel.listener.after_backward()  # type: ignore[union-attr]
    before = experts_of(namespace)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(torch.zeros(()))
    scaler.step(pair.stored_optimizer)
    scaler.update()
    assert scaler.get_scale() == 1.0
    assert_unchanged(namespace, before)


# --- what is not finite, without a scaler


def poison(module: nn.Module) -> None:
    """NaN as the gradient of one of its weights, at each backward."""
    next(module.parameters()).register_hook(lambda gradient: gradient * torch.nan)


def test_nan_in_dense_weights_leaves_the_experts_without_clipping(namespace: ps.Namespace) -> None:
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        poison(model.head)  # type: ignore[arg-type]
        plain_loop(model, optimizer, steps=1)

    pair = Pair.make(namespace)
    pair.run(loop)
    assert pair.differences() == []


def test_clipping_by_nan_raises_and_spares_the_experts(namespace: ps.Namespace) -> None:
    pair = Pair.make(namespace)
    poison(pair.stored.head)
    before = experts_of(namespace)
    pair.stored(batch(0)).backward()
    clip_grad_norm_(pair.stored.parameters(), 1.0)
    with pytest.raises(StepFailed, match="clipped by nan"):
        pair.stored_optimizer.step()
    assert_unchanged(namespace, before)
    assert namespace.pending_count == 0


def test_nan_in_one_expert_spoils_that_one_alone(namespace: ps.Namespace) -> None:
    """Where nobody clips: as in memory."""
    pair = Pair.make(namespace)
    pair.stored(batch(0)).backward()
    key, field = (0, 0), "gate_up"
    zeros = {name: torch.zeros_like(namespace.read(key)[name]) for name in ("gate_up", "down")}
    namespace.push({key: {**zeros, field: zeros[field] + torch.nan}})
    pair.experts.sentinel.listener.after_backward()  # type: ignore[union-attr]
    pair.stored_optimizer.step()
    assert namespace.read(key)[f"master/{field}"].isnan().all()
    assert not any(namespace.read(other)["master/down"].isnan().any() for other in namespace.space if other != key)


# --- zero_grad


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("is_before_forward", [True, False], ids=["before forward", "before backward"])
def test_zero_grad_instead_of_a_step_drops_what_is_pending(
    namespace: ps.Namespace, set_to_none: bool, is_before_forward: bool, caplog: pytest.LogCaptureFixture
) -> None:
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for step in range(4):
            if is_before_forward:
                optimizer.zero_grad(set_to_none)
            loss = model(batch(step))
            if not is_before_forward:
                optimizer.zero_grad(set_to_none)
            loss.backward()
            if step != 1:
                optimizer.step()

    pair = Pair.make(namespace)
    with caplog.at_level(logging.INFO, LOGGER):
        pair.run(loop)
    dense = [name for name in pair.differences() if ".weights." not in name]
    assert dense == [] or not set_to_none, "where zeroed gradients stay, experts without tokens decay in memory"
    if set_to_none:
        assert pair.differences() == []
    assert [record.message for record in caplog.records if "dropped" in record.message] != []
    assert len(caplog.records) == 1


def test_zero_grad_of_the_model_or_by_hand_drops_too(namespace: ps.Namespace) -> None:
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for step in range(3):
            model(batch(step)).backward()
            model.zero_grad()
            model(batch(step + 5)).backward()
            for parameter in model.parameters():
                parameter.grad = None
            model(batch(step + 9)).backward()
            optimizer.step()
            model.zero_grad()

    Pair.make(namespace).run_equal(loop)


def test_zero_grad_before_the_step_leaves_it_nothing(namespace: ps.Namespace) -> None:
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        model(batch(0)).backward()
        optimizer.zero_grad()
        optimizer.step()

    pair = Pair.make(namespace)
    pair.run_equal(loop)
    assert namespace.pending_count == 0


def test_a_forgotten_zero_grad_raises(namespace: ps.Namespace) -> None:
    pair = Pair.make(namespace)
    pair.stored(batch(0)).backward()
    pair.stored_optimizer.step()
    with pytest.raises(StepMismatch, match=r"call optimizer.zero_grad\(\) between them"):
        pair.stored(batch(1)).backward()


def test_a_second_step_with_the_same_gradients_raises(namespace: ps.Namespace) -> None:
    pair = Pair.make(namespace)
    pair.stored(batch(0)).backward()
    pair.stored_optimizer.step()
    with pytest.raises(StepMismatch, match="twice with the same gradients"):
        pair.stored_optimizer.step()


def test_a_backward_after_clipping_raises(namespace: ps.Namespace) -> None:
    pair = Pair.make(namespace)
    pair.stored(batch(0)).backward()
    clip_grad_norm_(pair.stored.parameters(), 1e-3)
    with pytest.raises(StepMismatch, match="clip or unscale once"):
        pair.stored(batch(1)).backward()


def test_a_step_without_a_backward_does_nothing(namespace: ps.Namespace) -> None:
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.step()
        plain_loop(model, optimizer)
        optimizer.zero_grad()
        optimizer.step()

    Pair.make(namespace).run_equal(loop)


# --- backwards that are none


class Boom(torch.autograd.Function):
    """Fails in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        raise ValueError("boom")


def test_what_a_failed_backward_pushed_is_dropped_by_the_next_forward(
    namespace: ps.Namespace, caplog: pytest.LogCaptureFixture
) -> None:
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        plain_loop(model, optimizer, steps=1)
        optimizer.zero_grad()
        model.wrap = lambda fn, index, x: fn(index, Boom.apply(x) if index == 1 else x)  # type: ignore[no-untyped-call]
        with pytest.raises(ValueError, match="boom"):
            model(batch(1)).backward()
        model.wrap = lambda fn, *inputs: fn(*inputs)
        plain_loop(model, optimizer)

    pair = Pair.make(namespace)
    with caplog.at_level(logging.INFO, LOGGER):
        pair.run_equal(loop)
    assert len([record for record in caplog.records if "did not end" in record.message]) == 1


def test_gradients_that_only_autograd_grad_asked_for_are_dropped(namespace: ps.Namespace) -> None:
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for step in range(2):
            optimizer.zero_grad()
            torch.autograd.grad(model(batch(step + 5)), model.embedding.weight)  # type: ignore[union-attr]
            model(batch(step)).backward()
            optimizer.step()

    Pair.make(namespace).run_equal(loop)


# --- state dicts of the optimizer


def test_optimizer_states_saved_without_the_sentinel_load(namespace: ps.Namespace) -> None:
    stored = make_stored(namespace)
    experts = bind(stored, namespace)

    def make(parameters: Any) -> torch.optim.Optimizer:
        known = list(parameters)
        return torch.optim.AdamW(
            [{"params": known[:2]}, {"params": known[2:], "weight_decay": 0.0}], lr=1e-2, fused=True
        )

    dense = [p for p in stored.parameters() if p.requires_grad]
    plain = make(dense)
    for parameter in dense:
        parameter.grad = torch.ones_like(parameter)
    plain.step()
    attached = make(stored.parameters())
    experts.attach(attached)
    attached.load_state_dict(plain.state_dict())
    assert all(torch.equal(attached.state[p]["exp_avg"], plain.state[p]["exp_avg"]) for p in dense)
    again = make(stored.parameters())
    experts.detach()
    experts.attach(again)
    again.load_state_dict(attached.state_dict())
    assert all(torch.equal(again.state[p]["exp_avg"], plain.state[p]["exp_avg"]) for p in dense)
    for parameter in dense:
        parameter.grad = None
    plain_loop(stored, again)


def test_loaded_options_lead_the_experts(namespace: ps.Namespace) -> None:
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        state = optimizer.state_dict()
        state["param_groups"][0]["lr"] = 0.2
        optimizer.load_state_dict(state)
        plain_loop(model, optimizer)

    Pair.make(namespace).run_equal(loop)


def test_an_error_of_an_update_is_raised_by_the_next_call(namespace: ps.Namespace, store: ps.Store) -> None:
    pair = Pair.make(namespace)
    pair.stored(batch(0)).backward()
    pair.stored_optimizer.step()
    pair.stored_optimizer.zero_grad()
    with store.open_namespace(namespace.name, mode="write"), pytest.raises(ps.WriterFenced):
        pair.stored(batch(1)).backward()


def test_a_commit_after_steps_of_another_optimizer_warns_that_nothing_trained(namespace: ps.Namespace) -> None:
    model = make_stored(namespace)
    experts = bind(model, namespace)
    optimizer, other = (torch.optim.AdamW(model.parameters()) for _ in range(2))
    experts.attach(optimizer)
    for stepped in (other, optimizer):
        model(batch(0)).backward()
        stepped.step()
        if stepped is optimizer:
            other.step()  # one that wraps it
        stepped.zero_grad()
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            experts.commit((namespace.committed_step or 0) + 1).wait()
            experts.commit((namespace.committed_step or 0) + 1).wait()
        assert ["is not the one that is attached" in str(warning.message) for warning in seen] == [True] * (stepped is other)


# --- the order of visits


def test_a_step_tells_how_many_backwards_it_had(namespace: ps.Namespace, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_stored(namespace)
    experts = bind(model, namespace)
    counts: list[int] = []
    tell = experts.expect_micro_batches
    monkeypatch.setattr(experts, "expect_micro_batches", lambda count: (counts.append(count), tell(count)))
    optimizer = torch.optim.AdamW(model.parameters())
    experts.attach(optimizer)
    for micro_batches in (1, 3, 3):
        for micro in range(micro_batches):
            model(batch(micro)).backward()
        optimizer.step()
        optimizer.zero_grad()
    model(batch(0)).backward()
    optimizer.zero_grad()  # dropped, and not counted
    model(batch(1)).backward()
    optimizer.step()
    experts.settle()
    assert counts == [1, 3, 3, 1]
