"""What the next layer's router guesses is loaded ahead, in training and on a device's twin, and what became of it is counted."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from paramstore.errors import CapacityError
from paramstore.testing.clock import ManualClock
from paramstore_client.device.host_slots import HostSlots, standing
from paramstore_client.device.tier import DeviceTier
from paramstore_client.hf.loading.stored_models import speculation
from paramstore_client.hf.model.binding import bind
from paramstore_client.hf.model.early_router import EarlyRouter
from paramstore_client.hf.model.layer_experts import ModelExperts
from paramstore_client.nn.speculation_gain import TRIAL
from paramstore_client.source import ExpertSource
from paramstore_testkit.training.moe_families import EXPERTS, tiny_config
from paramstore_testkit.training.moe_models import Twin, tokens

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]


def rebound(twin: Twin, source: ExpertSource, *, speculates: bool = True) -> ModelExperts:
    experts = ModelExperts(source, anchor=None, speculates=speculates)
    bind(twin.stored, experts, kernel="grouped_mm")
    return experts


@contextmanager
def guessing(monkeypatch: pytest.MonkeyPatch, experts: list[int]) -> Iterator[None]:
    """Every router guesses these experts."""
    with monkeypatch.context() as patch:
        patch.setattr(EarlyRouter, "ranked", lambda self, votes: experts)
        yield


def kinds_of(twin: Twin) -> list[tuple[str, tuple[Any, ...]]]:
    return [(kind, tuple(keys)) for kind, keys in twin.namespace.happened("acquire", "prefetch")]


def test_where_all_experts_can_stand_no_router_is_asked_for_guesses() -> None:
    twin = Twin.of(tiny_config("qwen3_moe"), kernel="grouped_mm", is_trained=False)
    for source in (HostSlots(twin.namespace), DeviceTier(twin.namespace, 2 * EXPERTS, device="cpu")):
        assert rebound(twin, source).early.routers == {}


def test_switched_off_no_router_is_asked_for_guesses() -> None:
    twin = Twin.of(tiny_config("qwen3_moe"), kernel="grouped_mm", is_trained=False, lease_slots=12)
    assert set(rebound(twin, HostSlots(twin.namespace)).early.routers) == {0, 1}
    assert rebound(twin, HostSlots(twin.namespace), speculates=False).early.routers == {}


def test_only_the_likeliest_guesses_are_loaded_into_slots_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    twin = Twin.of(tiny_config("qwen3_moe"), kernel="grouped_mm", is_trained=False, lease_slots=12)
    experts = rebound(twin, HostSlots(twin.namespace))
    with guessing(monkeypatch, [3, 1, 0, 2]):
        assert experts.early.standing(0, 1, torch.zeros(2, 32), (0, 0)) == [(1, 3), (1, 1)]
    with guessing(monkeypatch, [3]):
        assert experts.early.standing(0, 1, torch.zeros(2, 32), (0, 0)) == [(1, 3)]


@pytest.mark.parametrize("costs", [True, False])
def test_guesses_end_where_forwards_are_slower_with_them(costs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model of two layers. A layer takes a second more where it guesses, or where it does not."""
    twin = Twin.of(tiny_config("qwen3_moe"), kernel="grouped_mm", is_trained=False, lease_slots=12)
    source, clock = HostSlots(twin.namespace), ManualClock()
    early = rebound(twin, source).early
    early.clock = clock
    guess, asked = early.standing, list[bool]()

    def timed(*given: Any) -> Any:
        is_on = early.gains[1].is_on
        asked.append(is_on)
        clock.advance(2.0 if is_on == costs else 1.0)
        return guess(*given)

    monkeypatch.setattr(early, "standing", timed)
    with torch.no_grad():
        for seed in range(3 * TRIAL):
            twin.stored(tokens(seed=seed)[:1, :1])
    ways = asked[::2]
    assert len(ways) == 3 * TRIAL
    assert ways == [True] * TRIAL + [False] * TRIAL + [not costs] * TRIAL
    assert early.gains[2].is_on, "another size of a batch is tried by itself"


def prefetches_of_training(lease_slots: int, *, speculates: bool) -> list[tuple[Any, ...]]:
    """The loads ahead of layer 1 in the third of three steps."""
    twin = Twin.of(tiny_config("qwen3_moe"), kernel="grouped_mm", lease_slots=lease_slots)
    experts = ModelExperts(twin.namespace, anchor=lambda layer: twin.anchor, speculates=speculates)
    bind(twin.stored, experts, kernel="grouped_mm")
    for seed in range(3):
        twin.namespace.events.clear()
        twin.stored(tokens(seed=seed)[:1, :1])
    happened = kinds_of(twin)
    first = next(index for index, (kind, keys) in enumerate(happened) if kind == "acquire" and keys[0][0] == 1)
    return [keys for kind, keys in happened[:first] if kind == "prefetch" and keys[0][0] == 1]


def test_training_asks_first_for_what_the_next_router_guesses_and_then_for_what_was_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    by_use = prefetches_of_training(15, speculates=False)
    assert len(by_use) == 1
    known, unknown = by_use[0][2], next((1, expert) for expert in range(EXPERTS) if (1, expert) not in by_use[0])
    with guessing(monkeypatch, [known[1], unknown[1]]):
        both = prefetches_of_training(15, speculates=True)
    assert both == [(known, unknown), tuple(key for key in by_use[0] if key != known)]


def test_training_asks_for_no_more_guesses_than_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    with guessing(monkeypatch, list(range(EXPERTS))):
        assert [len(keys) for keys in prefetches_of_training(7, speculates=True)] == [4], "three are leased"


@pytest.mark.parametrize("lease_slots", [15, 9, 6])
def test_training_loads_ahead_no_less_than_by_use_alone_and_no_more_than_there_is_room_for(lease_slots: int) -> None:
    by_use, both = (
        {key for keys in prefetches_of_training(lease_slots, speculates=speculates) for key in keys}
        for speculates in (False, True)
    )
    assert len(by_use) <= len(both) <= lease_slots


@pytest.mark.parametrize("is_autocast", [False, True])
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "deepseek_v3", "phimoe"])
def test_training_has_the_bits_of_the_unmodified_model(family: str, is_autocast: bool) -> None:
    """phimoe's router adds noise in training: a guess takes none of its random numbers."""
    twin = Twin.of(tiny_config(family), kernel="grouped_mm", lease_slots=9)
    losses = []
    for model in (twin.stock.train(), twin.stored.train()):
        torch.manual_seed(7)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=is_autocast):
            loss = model(input_ids=tokens(), labels=tokens()).loss
        loss.backward()
        losses.append(loss)
    assert torch.equal(*losses)
    twin.check_gradients()
    assert speculation(twin.stored).asked > 0


def test_a_checkpoint_that_recomputes_a_layer_guesses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    twin = Twin.of(tiny_config("qwen3_moe"), kernel="grouped_mm", lease_slots=9)
    for layer in twin.stored.model.layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
    loss = twin.stored(input_ids=tokens(), labels=tokens(), use_cache=False).loss
    asked, guess = list[int](), EarlyRouter.guess

    def counted(router: EarlyRouter, hidden: Tensor) -> list[int]:
        asked.append(1)
        return guess(router, hidden)

    monkeypatch.setattr(EarlyRouter, "guess", counted)
    loss.backward()
    assert asked == [], "what follows is backward, downwards"
    twin.stored(input_ids=tokens(), labels=tokens(), use_cache=False)
    assert asked == [1]


def decode(model: Any, steps: int) -> list[Tensor]:
    with torch.no_grad():
        return [model(tokens(seed=seed)[:1, :1]).logits for seed in range(steps)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_device_loads_guesses_ahead_and_has_the_logits_of_the_unmodified_model(dtype: torch.dtype) -> None:
    twin = Twin.of(tiny_config("qwen3_moe"), kernel="grouped_mm", dtype=dtype, is_trained=False)
    with DeviceTier(twin.namespace, 9, device="cpu", policy="schedule") as tier:
        experts = rebound(twin, tier)
        assert all(map(torch.equal, decode(twin.stored, 40), decode(twin.stock, 40)))
        figures = experts.early.figures
        assert figures.asked == figures.in_time + figures.late + figures.wasted
        assert 0 < figures.in_time <= tier.stats.useful, "what a later visit uses is useful to the tier"
        assert tier.stats.prefetched == figures.asked


def test_each_guess_that_slots_on_the_host_loaded_ahead_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A guess that was wrong for one token stands until the next, which it may be right for: it counts for the first alone."""
    twin = Twin.of(tiny_config("qwen3_moe"), kernel="grouped_mm", is_trained=False, lease_slots=13)
    experts, rng = rebound(twin, slots := HostSlots(twin.namespace)), random.Random(0)
    monkeypatch.setattr(EarlyRouter, "ranked", lambda self, votes: rng.sample(range(EXPERTS), 4))
    assert all(map(torch.equal, decode(twin.stored, 60), decode(twin.stock, 60)))
    figures = experts.early.figures
    assert figures.in_time > 0
    assert figures.in_time + figures.late + figures.wasted == figures.asked == slots.counts.ahead


def test_guesses_that_come_late_and_those_that_nobody_uses_are_counted_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    twin = Twin.of(tiny_config("qwen3_moe"), kernel="grouped_mm", is_trained=False)
    twin.namespace.holds_prefetches = True
    with DeviceTier(twin.namespace, 9, device="cpu", policy="schedule") as tier:
        experts = rebound(twin, tier)
        decode(twin.stored, 3)
        late = experts.early.figures
        assert (late.in_time, late.late > 0, late.asked) == (0, True, late.late + late.wasted)
        twin.namespace.holds_prefetches = False
        used = {key[1] for kind, keys in kinds_of(twin) if kind == "acquire" for key in keys if key[0] == 1}
        unused = [expert for expert in range(EXPERTS) if expert not in used][:1]
        with guessing(monkeypatch, unused):
            decode(twin.stored, 1)
        after = experts.early.figures
        assert after.wasted - late.wasted == after.asked - late.asked > 0
        assert after.wasted_bytes == after.wasted * tier.schema.part("param").image_bytes


def test_a_source_whose_leases_do_not_stand_serves_guesses_too() -> None:
    twin = Twin.of(tiny_config("qwen3_moe"), kernel="grouped_mm", is_trained=False, lease_slots=9)
    experts = rebound(twin, twin.namespace)
    assert not isinstance(standing(twin.namespace), type(twin.namespace)), "they could"
    assert all(map(torch.equal, decode(twin.stored, 5), decode(twin.stock, 5)))
    assert experts.early.figures.in_time > 0


def refuse(*arguments: Any, **options: Any) -> Any:
    raise CapacityError("no room")


@pytest.mark.parametrize("is_on_device", [False, True])
def test_a_guess_that_cannot_be_asked_for_fails_no_forward(
    is_on_device: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    twin = Twin.of(tiny_config("qwen3_moe"), kernel="grouped_mm", is_trained=False, lease_slots=9)
    source = DeviceTier(twin.namespace, 9, device="cpu", policy="schedule") if is_on_device else twin.namespace
    experts = rebound(twin, source)
    monkeypatch.setattr(twin.namespace, "prefetch", refuse)
    with guessing(monkeypatch, list(range(EXPERTS))):
        assert all(map(torch.equal, decode(twin.stored, 3), decode(twin.stock, 3)))
    assert "could not be loaded ahead: no room" in caplog.text
    assert experts.early.figures.asked == 0


def test_a_guess_that_cannot_be_asked_for_fails_no_training(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    twin = Twin.of(tiny_config("qwen3_moe"), kernel="grouped_mm", lease_slots=9)
    monkeypatch.setattr(twin.namespace, "prefetch", refuse)
    losses = [model(input_ids=tokens(), labels=tokens()).loss for model in (twin.stock.train(), twin.stored.train())]
    for loss in losses:
        loss.backward()
    assert torch.equal(*losses)
    twin.check_gradients()
    assert "could not be loaded ahead: no room" in caplog.text
    assert speculation(twin.stored).asked == 0


def test_a_load_whose_bytes_another_thread_has_counted_fails_no_forward() -> None:
    twin = Twin.of(tiny_config("qwen3_moe"), kernel="grouped_mm", is_trained=False, lease_slots=9)
    early = rebound(twin, twin.namespace).early

    class Load:
        """A load ahead that has come, and is taken by another thread while this one asks for it."""

        def done(self) -> bool:
            early._under_way.clear()
            return True

        def wait(self) -> dict[str, int]:
            return {"bytes": 8}

    early._under_way.append(Load())  # type: ignore[arg-type]
    assert early.figures.loaded_bytes == 8
