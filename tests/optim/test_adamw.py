"""Updates of records are bitwise those of torch's fused AdamW, whatever the sizes, dtypes and options."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping

import pytest
import torch

from paramstore.core.optimizers import AdamW
from paramstore.core.schema import Schema
from paramstore.optim import adamw
from paramstore.optim.adamw import CHUNK_ELEMENTS, Scratch, fill_initial, square_sum, update
from paramstore.optim.tensors import field_tensor, torch_dtype

CHUNK = 1 << 10
SHAPES = {"gate_up": (7, 13), "down": (CHUNK + 17,), "one": (1,), "whole": (2, CHUNK)}
Tensors = dict[str, torch.Tensor]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every border of a chunk is met by small fields; and no test waits for torch's threads to find a
    core."""
    monkeypatch.setattr(adamw, "CHUNK_ELEMENTS", CHUNK)
    monkeypatch.setattr(adamw, "_thread", threading.local())  # buffers of this size are nobody else's
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def buffer(length_bytes: int, fill: int = 0xA5) -> memoryview:
    return memoryview(bytearray([fill]) * length_bytes)


def gradient_image(schema: Schema, gradients: Mapping[str, torch.Tensor]) -> memoryview:
    image = buffer(schema.gradient_bytes)
    for field in schema.gradient_fields():
        field_tensor(image, field).copy_(gradients[field.name].flatten())
    return image


def initial_image(schema: Schema, values: Mapping[str, torch.Tensor]) -> memoryview:
    image = buffer(schema.initial_bytes)
    for field in schema.initial_fields():
        field_tensor(image, field).copy_(values[field.name].flatten())
    return image


def filled_record(schema: Schema, values: Mapping[str, torch.Tensor]) -> memoryview:
    image = buffer(schema.record_bytes)
    fill_initial(schema, initial_image(schema, values), image)
    return image


def part_tensor(schema: Schema, part: str, image: memoryview, name: str) -> torch.Tensor:
    field = schema.part(part).field(name)
    return field_tensor(image, field).view(field.shape)


class Reference:
    """torch.optim.AdamW(fused=True) on fp32 parameters of the same values."""

    def __init__(self, values: Mapping[str, torch.Tensor], options: AdamW) -> None:
        self.params = {name: torch.nn.Parameter(value.clone()) for name, value in values.items()}
        self.optimizer = torch.optim.AdamW(
            self.params.values(), lr=options.lr, betas=options.betas, eps=options.eps,
            weight_decay=options.weight_decay, fused=True,
        )  # fmt: skip

    def step(self, gradients: Mapping[str, torch.Tensor], grad_scale: float) -> None:
        for name, param in self.params.items():
            param.grad = gradients[name].mul(grad_scale).float()
        self.optimizer.step()

    def state(self, name: str) -> Tensors:
        param = self.params[name]
        moments: Tensors = self.optimizer.state[param]
        return {"master": param.detach(), "exp_avg": moments["exp_avg"], "exp_avg_sq": moments["exp_avg_sq"]}


OPTIONS = [
    AdamW(),
    AdamW(lr=0.03, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.0),
    AdamW(lr=1e-2, weight_decay=0.3),
]


@pytest.mark.parametrize("options", OPTIONS, ids=["default", "no-decay", "strong-decay"])
@pytest.mark.parametrize("grad_scale", [1.0, 0.37])
@pytest.mark.parametrize("gradient_dtype", ["float32", "bfloat16", "float16"])
def test_five_steps_are_bitwise_those_of_torch(gradient_dtype: str, grad_scale: float, options: AdamW) -> None:
    seed = 7
    torch.manual_seed(seed)
    schema = Schema.adamw(SHAPES, param_dtype="bfloat16", gradient_dtype=gradient_dtype)
    values = {name: torch.randn(shape) for name, shape in SHAPES.items()}
    reference, image = Reference(values, options), filled_record(schema, values)
    param, scratch = buffer(schema.part("param").image_bytes), Scratch()
    for step in range(1, 6):
        gradients = {name: torch.randn(shape).to(torch_dtype(gradient_dtype)) for name, shape in SHAPES.items()}
        reference.step(gradients, grad_scale)
        update(
            schema, image, [gradient_image(schema, gradients)], options=options, optimizer_step=step,
            grad_scale=grad_scale, param=param, scratch=scratch,
        )  # fmt: skip
        for name in SHAPES:
            for prefix, expected in reference.state(name).items():
                found = part_tensor(schema, "optim", image, f"{prefix}/{name}")
                assert torch.equal(found, expected), (name, prefix, step, seed)
            expected_param = reference.state(name)["master"].to(torch.bfloat16)
            assert torch.equal(part_tensor(schema, "param", param, name), expected_param)


@pytest.mark.parametrize("param_dtype", ["float32", "bfloat16"])
def test_spans_that_cover_a_record_in_any_order_give_what_one_update_gives(param_dtype: str) -> None:
    shapes = {"w": (96, 100), "v": (37,)}
    schema = Schema.adamw(shapes, param_dtype=param_dtype)
    values = {name: torch.randn(shape) for name, shape in shapes.items()}
    gradient = gradient_image(schema, {name: torch.randn(shape).to(torch_dtype(param_dtype)) for name, shape in shapes.items()})
    images, params = [], []
    for calls in ([None], [[(0, 4096, 8192)], [(1, 0, 37), (0, 0, 4096)], [(0, 8192, 9600)]]):
        images.append(filled_record(schema, values))
        params.append(buffer(schema.part("param").image_bytes))
        for spans in calls:
            update(
                schema, images[-1], [gradient], options=AdamW(), optimizer_step=1, grad_scale=0.5, param=params[-1], spans=spans
            )
    assert images[0] == images[1]
    assert params[0] == params[1]
    assert images[0] != filled_record(schema, values)


@pytest.mark.parametrize("param_dtype", ["float32", "bfloat16", "float16"])
def test_the_new_masters_are_cast_into_param(param_dtype: str) -> None:
    schema = Schema.adamw(SHAPES, param_dtype=param_dtype)
    values = {name: torch.randn(shape) for name, shape in SHAPES.items()}
    gradients = {name: torch.randn(shape).to(torch_dtype(param_dtype)) for name, shape in SHAPES.items()}
    image, param = filled_record(schema, values), buffer(schema.part("param").image_bytes)
    update(schema, image, [gradient_image(schema, gradients)], options=AdamW(), optimizer_step=1, param=param)
    for name in SHAPES:
        master = part_tensor(schema, "optim", image, f"master/{name}")
        assert torch.equal(part_tensor(schema, "param", param, name), master.to(torch_dtype(param_dtype)))
        assert not torch.equal(master, values[name])


def test_an_update_without_a_param_slot_changes_the_record_alike() -> None:
    schema = Schema.adamw(SHAPES)
    values = {name: torch.randn(shape) for name, shape in SHAPES.items()}
    gradient = gradient_image(schema, values)
    with_param, without = filled_record(schema, values), filled_record(schema, values)
    param = buffer(schema.part("param").image_bytes)
    update(schema, with_param, [gradient], options=AdamW(), optimizer_step=1, param=param)
    update(schema, without, [gradient], options=AdamW(), optimizer_step=1)
    assert with_param == without


@pytest.mark.slow
def test_chunks_and_threads_of_the_reference_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adamw, "CHUNK_ELEMENTS", CHUNK_ELEMENTS)
    schema = Schema.adamw({"w": (3 * CHUNK_ELEMENTS + 19,)}, param_dtype="float32")
    values, gradients = {"w": torch.randn(schema.parameter_elements)}, {"w": torch.randn(schema.parameter_elements)}
    image, reference = filled_record(schema, values), Reference(values, AdamW())
    torch.set_num_threads(2)
    reference.step(gradients, 1.0)
    update(schema, image, [gradient_image(schema, gradients)], options=AdamW(), optimizer_step=1)
    for prefix, expected in reference.state("w").items():
        assert torch.equal(part_tensor(schema, "optim", image, f"{prefix}/w"), expected)


@pytest.mark.parametrize("grad_scale", [1.0, 0.5])
def test_an_update_leaves_header_and_gradient_alone(grad_scale: float) -> None:
    schema = Schema.adamw(SHAPES, param_dtype="float32")
    values = {name: torch.randn(shape) for name, shape in SHAPES.items()}
    image, gradient = filled_record(schema, values), gradient_image(schema, values)
    header, before = bytes(image[: schema.stored.header_bytes]), bytes(gradient)
    update(schema, image, [gradient], options=AdamW(), optimizer_step=1, grad_scale=grad_scale)
    assert bytes(image[: schema.stored.header_bytes]) == header
    assert bytes(gradient) == before


@pytest.mark.slow
def test_an_update_allocates_no_tensor_per_chunk() -> None:
    schema = Schema.adamw({"w": (16 * CHUNK,)})
    image, scratch = filled_record(schema, {"w": torch.zeros(16 * CHUNK)}), Scratch()
    gradient, param = buffer(schema.gradient_bytes, 0), buffer(schema.part("param").image_bytes)

    def one_update() -> None:
        update(schema, image, [gradient], options=AdamW(), optimizer_step=1, grad_scale=0.5, param=param, scratch=scratch)

    one_update()
    # Names of ops differ between versions of torch; the profiler counts every byte its allocator gives.
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        one_update()
    allocated_bytes = sum(max(0, event.self_cpu_memory_usage) for event in profile.events())
    assert allocated_bytes < 2 * CHUNK


def test_each_thread_has_its_own_scratch() -> None:
    seen = []
    threads = [threading.Thread(target=lambda: seen.append(adamw._own_scratch())) for _ in range(2)]
    for thread in threads:
        thread.start()
        thread.join()
    assert seen[0] is not seen[1]
    assert adamw._own_scratch() is adamw._own_scratch()


def test_an_initial_value_becomes_master_with_zero_moments() -> None:
    schema = Schema.adamw(SHAPES)
    values = {name: torch.randn(shape) for name, shape in SHAPES.items()}
    image = filled_record(schema, values)
    expected = bytearray(schema.record_bytes)
    expected[: schema.stored.header_bytes] = b"\xa5" * schema.stored.header_bytes
    for name, value in values.items():
        field = schema.stored.field(f"master/{name}")
        expected[field.offset_bytes : field.offset_bytes + field.length_bytes] = value.numpy().tobytes()
    assert image == expected


def test_an_initial_value_of_a_param_schema_is_taken_as_it_is() -> None:
    schema = Schema.param({"w": ((5, 3), "bfloat16"), "scale": ((4,), "float8_e4m3fn"), "mask": ((3,), "bool")})
    initial = memoryview(bytearray(torch.arange(schema.initial_bytes).to(torch.uint8).numpy().tobytes()))
    image = buffer(schema.record_bytes)
    fill_initial(schema, initial, image)
    for source, target in zip(schema.initial_fields(), schema.stored.fields, strict=True):
        found = image[target.offset_bytes : target.offset_bytes + target.length_bytes]
        assert found == initial[source.offset_bytes : source.offset_bytes + source.length_bytes]


@pytest.mark.parametrize("gradient_dtype", ["float32", "bfloat16", "float16"])
def test_the_square_sum_is_exact_to_float64_and_repeats_bitwise(gradient_dtype: str) -> None:
    schema = Schema.adamw(SHAPES, gradient_dtype=gradient_dtype)
    gradients = {name: torch.randn(shape).to(torch_dtype(gradient_dtype)) for name, shape in SHAPES.items()}
    image = gradient_image(schema, gradients)
    expected = sum(value.double().square().sum().item() for value in gradients.values())
    assert square_sum(schema, image) == pytest.approx(expected, rel=1e-13)
    assert square_sum(schema, image) == square_sum(schema, image)


def test_the_square_sum_does_not_overflow_in_half_precision() -> None:
    schema = Schema.adamw({"w": (1000,)}, param_dtype="float16")
    image = gradient_image(schema, {"w": torch.full((1000,), 60000.0)})
    assert square_sum(schema, image) == 1000 * 60000.0**2
