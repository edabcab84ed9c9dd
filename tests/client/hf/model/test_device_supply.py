"""Layers that compute in the slots of a tier, on its twin on the CPU; `tests/properties/test_device_streams.py` has whole models on
simulated streams."""

from __future__ import annotations

import itertools
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch

from paramstore_client.device.tier import DeviceTier
from paramstore_client.hf.compat import modeling
from paramstore_client.hf.model.binding import bind
from paramstore_client.hf.model.kernels import ExpertStack
from paramstore_client.hf.model.layer_experts import LayerExperts, ModelExperts
from paramstore_testkit.training.moe_families import tiny_config
from paramstore_testkit.training.moe_models import Twin, tokens

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]

FAMILIES = ("mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss")
SLOTS = (16, 8, 3)
"""All experts of two layers; one layer's; fewer than a layer asks for, so that some pass by."""


@contextmanager
def tier_of(twin: Twin, slots: int, kernel: str) -> Iterator[DeviceTier]:
    with DeviceTier(twin.namespace, slots, device="cpu", policy="schedule") as tier:
        bind(twin.stored, ModelExperts(tier, anchor=None), kernel=kernel)
        yield tier


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("kernel", modeling.KERNELS)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_the_unmodified_model(family: str, kernel: str, dtype: torch.dtype) -> None:
    twin = Twin.of(tiny_config(family), kernel=kernel, dtype=dtype, is_trained=False)
    for slots in SLOTS:
        with tier_of(twin, slots, kernel), torch.no_grad():
            for ids in (tokens(), tokens(seed=1), tokens(seed=2)[:1, :1]):
                assert torch.equal(twin.stored(ids).logits, twin.stock(ids).logits), (slots, ids.shape)
        assert twin.namespace.leased == []


@pytest.mark.parametrize("kernel", modeling.KERNELS)
def test_nothing_is_copied_nor_asked_for_where_all_stand(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    twin = Twin.of(tiny_config("qwen3_moe"), kernel=kernel, is_trained=False)
    with tier_of(twin, 16, kernel) as tier, torch.no_grad():
        expected = twin.stored(tokens()).logits
        monkeypatch.setattr("paramstore_client.hf.model.compact_buffers.CompactBuffers.filled", None)
        monkeypatch.setattr("paramstore_client.device.copies.DeviceCopies._lease_from_host", None)
        twin.namespace.events.clear()
        copied = tier.stats.bytes_copied
        assert torch.equal(twin.stored(tokens()).logits, expected)
        assert (tier.stats.bytes_copied, twin.namespace.events) == (copied, [])


@pytest.mark.parametrize("kernel", modeling.KERNELS)
def test_layers_of_more_experts_than_slots_pass_by_and_are_not_copied_side_by_side(
    kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    twin = Twin.of(tiny_config("qwen3_moe"), kernel=kernel, is_trained=False)
    monkeypatch.setattr("paramstore_client.hf.model.compact_buffers.CompactBuffers.filled", None)
    image = sum(value.nbytes for value in twin.namespace.values((0, 0)).values())
    with tier_of(twin, 3, kernel) as tier, torch.no_grad():
        for _ in range(2):
            assert torch.equal(twin.stored(tokens()).logits, twin.stock(tokens()).logits)
        assert tier.stats.hits > 0, "what stands is not driven out"
        assert tier.stats.passed > 0
        assert tier.stats.bytes_copied == (tier.counts.loads - tier.counts.failed) * image


def test_a_failing_kernel_ends_its_visit(monkeypatch: pytest.MonkeyPatch) -> None:
    twin = Twin.of(tiny_config("qwen3_moe"), kernel="grouped_mm", is_trained=False)

    def fail(*_: Any) -> None:
        raise RuntimeError("planted")

    with tier_of(twin, 8, "grouped_mm") as tier, torch.no_grad():
        with monkeypatch.context() as patch:
            patch.setattr("paramstore_client.hf.model.kernels.ExpertStack.grouped_mm", fail)
            with pytest.raises(RuntimeError, match="planted"):
                twin.stored(tokens())
        assert [held for held in tier.plan.held if held.users] == []
        assert torch.equal(twin.stored(tokens()).logits, twin.stock(tokens()).logits)


@pytest.mark.parametrize(
    "given",
    [
        {"do_sample": False}, {"do_sample": False, "num_beams": 3}, {"do_sample": True, "top_k": 5},
        {"do_sample": False, "cache_implementation": "static"},
    ],
    ids=["greedy", "beams", "sampling", "static cache"],
)  # fmt: skip
def test_generate_gives_the_tokens_of_the_unmodified_model(given: dict[str, Any]) -> None:
    """A batch of two prompts, of which one is padded on its left."""
    twin = Twin.of(tiny_config("qwen3_moe"), kernel="grouped_mm", is_trained=False)
    ids, mask = tokens().clone(), torch.ones_like(tokens())
    ids[1, :3], mask[1, :3] = 0, 0
    made = []
    with tier_of(twin, 9, "grouped_mm"):
        for model in (twin.stock.eval(), twin.stored.eval()):
            torch.manual_seed(3)
            made.append(model.generate(ids, attention_mask=mask, max_new_tokens=10, pad_token_id=0, **given))
    assert torch.equal(*made)


@contextmanager
def source_of(twin: Twin, where: str) -> Iterator[None]:
    """Experts that stand leased in host memory, as the twin is made, or in slots of a tier."""
    with tier_of(twin, 9, "grouped_mm") if where == "device" else nullcontext():
        yield


@pytest.mark.parametrize("where", ["host", "device"])
def test_continuous_batches_have_the_tokens_of_the_unmodified_model(where: str) -> None:
    """transformers computes them on a thread of its own."""
    transformers = modeling.transformers()
    twin = Twin.of(tiny_config("qwen3_moe"), kernel="grouped_mm", is_trained=False, lease_slots=9)
    prompts = [row[:length].tolist() for row, length in zip(tokens(batch=3), (9, 5, 17), strict=True)]
    options = {
        "generation_config": transformers.GenerationConfig(max_new_tokens=8, do_sample=False, pad_token_id=0, eos_token_id=-1),
        "continuous_batching_config": transformers.ContinuousBatchingConfig(
            page_size=16, num_blocks=16, max_batch_tokens=64, max_requests_per_batch=4, use_async_batching=False,
            auto_switch_to_flash=False,
        ),
    }  # fmt: skip
    threads: set[int] = set()
    run = LayerExperts.run

    def noted(self: LayerExperts, *inputs: Any) -> Any:
        threads.add(threading.get_ident())
        return run(self, *inputs)

    with source_of(twin, where), pytest.MonkeyPatch.context() as patch:
        patch.setattr(LayerExperts, "run", noted)
        made = [
            sorted(tuple(answer.generated_tokens) for answer in model.eval().generate_batch(prompts, **options).values())
            for model in (twin.stock, twin.stored)
        ]
    assert made[0] == made[1]
    assert [len(answer) for answer in made[1]] == [8, 8, 8]
    assert threading.get_ident() not in threads
    assert threads


@pytest.mark.parametrize("where", ["host", "device"])
def test_streamed_tokens_are_those_of_the_unmodified_model(where: str) -> None:
    class Streamer:
        def __init__(self) -> None:
            self.tokens: list[int] = []

        def put(self, value: torch.Tensor) -> None:
            self.tokens += value.reshape(-1).tolist()

        def end(self) -> None:
            self.tokens.append(-1)

    twin = Twin.of(tiny_config("qwen3_moe"), kernel="grouped_mm", is_trained=False, lease_slots=9)
    made = []
    with source_of(twin, where):
        for model in (twin.stock.eval(), twin.stored.eval()):
            streamer = Streamer()
            model.generate(tokens()[:1], max_new_tokens=8, do_sample=False, pad_token_id=0, streamer=streamer)
            made.append(streamer.tokens)
    assert made[0] == made[1]


@pytest.mark.parametrize("where", ["host", "device"])
def test_an_interrupted_generate_leaves_a_model_that_goes_on(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    twin = Twin.of(tiny_config("qwen3_moe"), kernel="grouped_mm", is_trained=False, lease_slots=9)
    options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    expected = twin.stock.eval().generate(tokens(), **options)
    multiply, calls = ExpertStack.grouped_mm, itertools.count()

    def interrupted(self: ExpertStack, *inputs: Any) -> Any:
        if next(calls) == 9:  # in the middle of a layer of the third token
            signal.raise_signal(signal.SIGINT)
        return multiply(self, *inputs)

    with source_of(twin, where):
        with monkeypatch.context() as patch:
            patch.setattr(ExpertStack, "grouped_mm", interrupted)
            with pytest.raises(KeyboardInterrupt):
                twin.stored.eval().generate(tokens(), **options)
        assert next(calls) == 10
        assert torch.equal(twin.stored.generate(tokens(), **options), expected)
    twin.namespace.close()
    assert twin.namespace.leased == []


def test_memory_that_runs_out_in_a_layer_takes_slots_and_no_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    twin = Twin.of(tiny_config("qwen3_moe"), kernel="grouped_mm", is_trained=False)
    multiply, full = ExpertStack.grouped_mm, itertools.count()

    def out_of_memory(self: ExpertStack, *inputs: Any) -> Any:
        if next(full) < times:
            raise torch.OutOfMemoryError("planted")
        return multiply(self, *inputs)

    ids = tokens()[:1, :1]
    with tier_of(twin, 16, "grouped_mm") as tier, torch.no_grad():
        monkeypatch.setattr(ExpertStack, "grouped_mm", out_of_memory)
        times = 2
        assert torch.equal(twin.stored(ids).logits, twin.stock(ids).logits)
        assert tier.lease_slots == 4
        assert [held for held in tier.plan.held if held.users] == []
        assert torch.equal(twin.stored(tokens()).logits, twin.stock(tokens()).logits), "more experts than slots by now"
    assert twin.namespace.leased == []
