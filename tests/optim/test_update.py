"""Updates of records: bitwise torch's with fp32 states, bitwise repeatable with others, whatever the sizes, dtypes and options."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from paramstore.core.optimizers import OPTIMIZERS, SGD, Adagrad, AdamW, Options
from paramstore.core.schema import STATE_DTYPES, Schema
from paramstore.optim import chunks
from paramstore.optim import update as update_module
from paramstore.optim.tensors import torch_dtype
from paramstore.optim.update import RULES, Scratch, update
from paramstore_native.adamw import ADAMW
from paramstore_testkit.oracles.optim_records import TorchOptimizer, buffer, filled_record, gradient_image, part_tensor

CHUNK = 1 << 10
SHAPES = {"gate_up": (7, 13), "down": (CHUNK + 17,), "one": (1,), "whole": (2, CHUNK)}
SEED = 7
OPTIONS: dict[str, Options] = {
    "adamw": AdamW(),
    "adamw, no decay": AdamW(lr=0.03, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.0),
    "adamw, strong decay": AdamW(lr=1e-2, weight_decay=0.3),
    "sgd": SGD(lr=0.1),
    "sgd, momentum": SGD(lr=0.1, momentum=0.9, dampening=0.3, weight_decay=0.1),
    "sgd, nesterov": SGD(lr=0.1, momentum=0.9, weight_decay=0.1, nesterov=True),
    "adagrad": Adagrad(),
    "adagrad, decay": Adagrad(lr=0.1, lr_decay=0.1, weight_decay=0.1, initial_accumulator_value=0.5, eps=1e-6),
}
ONE_OF_EACH: list[Options] = [AdamW(lr=1e-2), SGD(lr=0.1, momentum=0.9, weight_decay=0.1), Adagrad(weight_decay=0.1)]
KINDS = [options.kind for options in ONE_OF_EACH]


@pytest.fixture(autouse=True, params=["torch", "native"])
def computing(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything here holds with the native kernel and without."""
    if request.param == "torch":
        monkeypatch.setattr(update_module, "update_vectors", lambda *arguments, **_: [0] * len(arguments[-1]))
    elif ADAMW.kernel() is None:
        pytest.skip(ADAMW.known_state())


def random_values(shapes: Mapping[str, tuple[int, ...]] = SHAPES, dtype: str = "float32") -> dict[str, torch.Tensor]:
    return {name: torch.randn(shape).to(torch_dtype(dtype)) for name, shape in shapes.items()}


def test_there_is_a_rule_for_every_optimizer() -> None:
    assert RULES.keys() == OPTIMIZERS.keys()


@pytest.mark.parametrize("options", OPTIONS.values(), ids=list(OPTIONS))
@pytest.mark.parametrize("grad_scale", [1.0, 0.37])
@pytest.mark.parametrize("gradient_dtype", ["float32", "bfloat16", "float16"])
def test_five_steps_are_bitwise_those_of_torch(gradient_dtype: str, grad_scale: float, options: Options) -> None:
    torch.manual_seed(SEED)
    schema = Schema.trained(options.kind, SHAPES, param_dtype="bfloat16", gradient_dtype=gradient_dtype)
    values = random_values()
    reference, image = TorchOptimizer(values, options), filled_record(schema, values)
    param, scratch = buffer(schema.part("param").image_bytes), Scratch()
    for step in range(1, 6):
        gradients = random_values(dtype=gradient_dtype)
        reference.step(gradients, grad_scale)
        update(
            schema, image, [gradient_image(schema, gradients)], options=options, optimizer_step=step,
            grad_scale=grad_scale, param=param, scratch=scratch,
        )  # fmt: skip
        for name in SHAPES:
            for prefix, expected in reference.state(name).items():
                found = part_tensor(schema, "optim", image, f"{prefix}/{name}")
                assert torch.equal(found, expected), (name, prefix, step, SEED)
            expected_param = reference.state(name)["master"].to(torch.bfloat16)
            assert torch.equal(part_tensor(schema, "param", param, name), expected_param)


@pytest.mark.parametrize("state_dtype", STATE_DTYPES)
@pytest.mark.parametrize("options", ONE_OF_EACH, ids=KINDS)
def test_spans_that_cover_a_record_in_any_order_give_what_one_update_gives(options: Options, state_dtype: str) -> None:
    shapes = {"w": (96, 100), "v": (37,)}
    schema = Schema.trained(options.kind, shapes, state_dtype=state_dtype)
    values, gradients = random_values(shapes), random_values(shapes, "bfloat16")
    gradient = gradient_image(schema, gradients)
    images, params = [], []
    for calls in ([None], [[(0, 4096, 8192)], [(1, 0, 37), (0, 0, 4096)], [(0, 8192, 9600)]]):
        images.append(filled_record(schema, values))
        params.append(buffer(schema.part("param").image_bytes))
        for step in (1, 2):
            for spans in calls:
                update(
                    schema, images[-1], [gradient], options=options, optimizer_step=step, grad_scale=0.5, param=params[-1],
                    spans=spans,
                )  # fmt: skip
    assert images[0] == images[1]
    assert params[0] == params[1]
    assert images[0] != filled_record(schema, values)


@pytest.mark.parametrize("state_dtype", STATE_DTYPES)
@pytest.mark.parametrize("options", ONE_OF_EACH, ids=KINDS)
def test_missed_steps_are_those_of_a_zero_gradient_made_when_they_were_due(options: Options, state_dtype: str) -> None:
    """However they are grouped; so what a record is does not depend on when it was read."""
    torch.manual_seed(SEED)
    schema = Schema.trained(options.kind, SHAPES, param_dtype="float32", state_dtype=state_dtype)
    values, first, last = random_values(), random_values(), random_values()
    zeros = gradient_image(schema, {name: torch.zeros(shape) for name, shape in SHAPES.items()})
    first_image, last_image = gradient_image(schema, first), gradient_image(schema, last)
    made, grouped, caught_up = (filled_record(schema, values) for _ in range(3))
    for step, gradient in enumerate((first_image, zeros, zeros, zeros, last_image), start=1):
        update(schema, made, [gradient], options=options, optimizer_step=step)
    for image in (grouped, caught_up):
        update(schema, image, [first_image], options=options, optimizer_step=1)
    update(schema, grouped, [last_image], options=options, optimizer_step=5, missed=[options] * 3)
    update(schema, caught_up, [], options=None, optimizer_step=3, missed=[options] * 2)
    update(schema, caught_up, [last_image], options=options, optimizer_step=5, missed=[options])
    assert grouped == made
    assert caught_up == made


@pytest.mark.parametrize("gradient_dtype", ["float32", "bfloat16"])
def test_gradients_of_ranks_are_summed_in_rank_order_in_their_dtype(gradient_dtype: str) -> None:
    schema = Schema.adamw(SHAPES, gradient_dtype=gradient_dtype)
    values, ranks = random_values(), [random_values(dtype=gradient_dtype) for _ in range(3)]
    summed = {name: ranks[0][name] + ranks[1][name] + ranks[2][name] for name in SHAPES}
    one, several = filled_record(schema, values), filled_record(schema, values)
    images = [gradient_image(schema, rank) for rank in ranks]
    update(schema, one, [gradient_image(schema, summed)], options=AdamW(), optimizer_step=1, grad_scale=0.5)
    update(schema, several, images, options=AdamW(), optimizer_step=1, grad_scale=0.5)
    assert one == several


@pytest.mark.parametrize("param_dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("state_dtype", STATE_DTYPES)
def test_the_new_masters_are_cast_into_param(param_dtype: str, state_dtype: str) -> None:
    schema = Schema.adamw(SHAPES, param_dtype=param_dtype, state_dtype=state_dtype)
    values, gradients = random_values(), random_values(dtype=param_dtype)
    image, param = filled_record(schema, values), buffer(schema.part("param").image_bytes)
    update(schema, image, [gradient_image(schema, gradients)], options=AdamW(), optimizer_step=1, param=param)
    for name in SHAPES:
        master = part_tensor(schema, "optim", image, f"master/{name}")
        assert torch.equal(part_tensor(schema, "param", param, name), master.to(torch_dtype(param_dtype)))
        assert not torch.equal(master, values[name])


def test_an_update_without_a_param_slot_changes_the_record_alike() -> None:
    schema = Schema.adamw(SHAPES)
    values = random_values()
    gradient = gradient_image(schema, values)
    with_param, without = filled_record(schema, values), filled_record(schema, values)
    param = buffer(schema.part("param").image_bytes)
    update(schema, with_param, [gradient], options=AdamW(), optimizer_step=1, param=param)
    update(schema, without, [gradient], options=AdamW(), optimizer_step=1)
    assert with_param == without


@pytest.mark.parametrize("options", ONE_OF_EACH, ids=KINDS)
def test_rounding_depends_on_key_and_step_and_on_nothing_else(options: Options) -> None:
    """The same update made again, after a crash and by another thread, gives the same bits."""
    schema = Schema.trained(options.kind, SHAPES, state_dtype="bfloat16")
    values = random_values()
    gradient = gradient_image(schema, values)

    def updated(image: memoryview, **how: Any) -> memoryview:
        update(schema, image, [gradient], options=options, optimizer_step=how.pop("optimizer_step", 1), **how)
        return image

    first = updated(filled_record(schema, values), key=(3, 1))
    again: list[memoryview] = []
    thread = threading.Thread(target=lambda: again.append(updated(filled_record(schema, values), key=(3, 1))))
    thread.start()
    thread.join()
    assert again == [first]
    assert updated(filled_record(schema, values), key=(1, 3)) != first
    twice = [updated(updated(filled_record(schema, values)), optimizer_step=step) for step in (2, 3)]
    states = [part_tensor(schema, "optim", image, f"{options.states[0].name}/whole") for image in twice]
    assert not torch.equal(*states)


@pytest.mark.slow
@pytest.mark.parametrize("options", ONE_OF_EACH, ids=KINDS)
def test_chunks_and_threads_of_the_reference_change_no_bit(monkeypatch: pytest.MonkeyPatch, options: Options) -> None:
    monkeypatch.undo()
    schema = Schema.trained(options.kind, {"w": (3 * chunks.CHUNK_ELEMENTS + 19,)}, param_dtype="float32")
    values, gradients = random_values({"w": (schema.parameter_elements,)}), random_values({"w": (schema.parameter_elements,)})
    image, reference = filled_record(schema, values), TorchOptimizer(values, options)
    torch.set_num_threads(2)
    reference.step(gradients)
    update(schema, image, [gradient_image(schema, gradients)], options=options, optimizer_step=1)
    for prefix, expected in reference.state("w").items():
        assert torch.equal(part_tensor(schema, "optim", image, f"{prefix}/w"), expected)


@pytest.mark.slow
@pytest.mark.parametrize("state_dtype", STATE_DTYPES[1:])
def test_chunks_of_any_size_change_no_bit_of_reduced_states(monkeypatch: pytest.MonkeyPatch, state_dtype: str) -> None:
    schema = Schema.adamw({"w": ((1 << 17) + 5000,)}, state_dtype=state_dtype)
    values = random_values({"w": (schema.parameter_elements,)})
    gradient, images = gradient_image(schema, values), []
    for elements in (1 << 10, 1 << 13, 1 << 17):
        monkeypatch.setattr(chunks, "REDUCED_CHUNK_ELEMENTS", elements)
        monkeypatch.setattr(chunks, "CHUNK_ELEMENTS", 1 << 17)
        images.append(filled_record(schema, values))
        for step in (1, 2):
            update(schema, images[-1], [gradient], options=AdamW(), optimizer_step=step, scratch=Scratch())
    assert images[0] == images[1] == images[2]


@pytest.mark.parametrize("grad_scale", [1.0, 0.5])
@pytest.mark.parametrize("state_dtype", STATE_DTYPES)
@pytest.mark.parametrize("options", ONE_OF_EACH, ids=KINDS)
def test_an_update_leaves_header_and_gradient_alone(options: Options, state_dtype: str, grad_scale: float) -> None:
    schema = Schema.trained(options.kind, SHAPES, param_dtype="float32", state_dtype=state_dtype)
    values = random_values()
    image, gradients = filled_record(schema, values), [gradient_image(schema, random_values()) for _ in range(2)]
    header, before = bytes(image[: schema.stored.header_bytes]), [bytes(gradient) for gradient in gradients]
    update(schema, image, gradients, options=options, optimizer_step=1, grad_scale=grad_scale, missed=[])
    assert bytes(image[: schema.stored.header_bytes]) == header
    assert [bytes(gradient) for gradient in gradients] == before


@pytest.mark.slow
@pytest.mark.parametrize("state_dtype", STATE_DTYPES)
@pytest.mark.parametrize("options", ONE_OF_EACH, ids=KINDS)
def test_an_update_allocates_no_tensor_per_chunk(options: Options, state_dtype: str) -> None:
    schema = Schema.trained(options.kind, {"w": (16 * CHUNK,)}, state_dtype=state_dtype)
    image, scratch = filled_record(schema, {"w": torch.zeros(16 * CHUNK)}), Scratch()
    gradients, param = [buffer(schema.gradient_bytes, 0)] * 2, buffer(schema.part("param").image_bytes)

    def one_update() -> None:
        update(
            schema, image, gradients, options=options, optimizer_step=3, grad_scale=0.5, param=param, scratch=scratch,
            missed=[options] * 2,
        )  # fmt: skip

    one_update()
    # Names of ops differ between versions of torch; the profiler counts every byte its allocator gives.
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        one_update()
    allocated_bytes = sum(max(0, event.self_cpu_memory_usage) for event in profile.events())
    assert allocated_bytes < 8 * CHUNK, "numbers that torch wraps take 4 or 8 bytes each, a chunk 4,096"


def test_each_thread_has_its_own_scratch() -> None:
    seen = []
    threads = [threading.Thread(target=lambda: seen.append(update_module._own_scratch())) for _ in range(2)]
    for thread in threads:
        thread.start()
        thread.join()
    assert seen[0] is not seen[1]
    assert update_module._own_scratch() is update_module._own_scratch()
