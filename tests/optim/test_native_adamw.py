"""What of a field the native kernel takes: the same bits as torch gives, and nothing of what it does not know."""

from __future__ import annotations

import pytest
import torch

from paramstore.core.optimizers import SGD, AdamW, Options
from paramstore.core.schema import Schema
from paramstore.optim import native_adamw
from paramstore.optim import update as update_module
from paramstore.optim.native_adamw import update_vectors
from paramstore.optim.rule import Step
from paramstore.optim.tensors import torch_dtype
from paramstore.optim.update import update
from paramstore_native.adamw import ADAMW
from paramstore_testkit.oracles.optim_records import buffer, filled_record, gradient_image

SHAPES = {"gate_up": (7, 13), "down": (5000,), "one": (1,), "whole": (2, 1024)}
SEED = 5
needs_kernel = pytest.mark.skipif(ADAMW.kernel() is None, reason=ADAMW.known_state())


def steps(options: Options) -> list[Step]:
    return [Step(options, 1, torch.tensor(1.0), is_missed=True), Step(options, 2, torch.tensor(2.0), is_missed=False)]


def taken(schema: Schema, options: Options, end: int) -> int:
    values = {name: torch.ones(shape) for name, shape in SHAPES.items()}
    image, gradient = filled_record(schema, values), gradient_image(schema, values)
    (count,) = update_vectors(schema, image, [gradient], None, steps(options), [(1, 16, end)], grad_scale=1.0)
    return count


@needs_kernel
def test_whole_vectors_are_taken_and_the_rest_is_left() -> None:
    assert taken(Schema.adamw(SHAPES), AdamW(), end=16 + 37) == 32
    assert taken(Schema.adamw(SHAPES), AdamW(), end=16 + 15) == 0


@pytest.mark.parametrize("state_dtype", ["bfloat16", "int8_blockwise"])
def test_states_of_other_dtypes_are_left_to_torch(state_dtype: str) -> None:
    assert taken(Schema.trained("adamw", SHAPES, state_dtype=state_dtype), AdamW(), end=4096) == 0


def test_other_optimizers_are_left_to_torch() -> None:
    assert taken(Schema.trained("sgd", SHAPES), SGD(momentum=0.9), end=4096) == 0


def test_without_a_kernel_everything_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_adamw.ADAMW, "kernel", lambda: None)
    assert taken(Schema.adamw(SHAPES), AdamW(), end=4096) == 0


@needs_kernel
@pytest.mark.parametrize("short", ["image", "gradient", "read-only"])
def test_memory_that_is_too_short_or_not_to_be_written_is_not_touched(short: str) -> None:
    schema, values = Schema.adamw(SHAPES), {name: torch.ones(shape) for name, shape in SHAPES.items()}
    image, gradient = filled_record(schema, values), gradient_image(schema, values)
    before = bytes(image)
    given = {
        "image": (image[:-4096], gradient), "gradient": (image, gradient[:4096]), "read-only": (image.toreadonly(), gradient)
    }[short]  # fmt: skip
    with pytest.raises(ValueError, match="a view"):
        update_vectors(schema, given[0], [given[1]], None, steps(AdamW()), [(1, 0, 4096)], grad_scale=1.0)
    assert bytes(image) == before


@needs_kernel
@pytest.mark.parametrize("missed", [0, 3])
@pytest.mark.parametrize("ranks", [0, 1, 3])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_records_come_out_as_without_it(dtype: str, ranks: int, missed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(SEED)
    schema = Schema.adamw(SHAPES, param_dtype=dtype)
    values = {name: torch.randn(shape) for name, shape in SHAPES.items()}
    gradients = [
        gradient_image(schema, {name: torch.randn(shape).to(torch_dtype(dtype)) for name, shape in SHAPES.items()})
        for _ in range(ranks)
    ]
    made = []
    for function in (update_vectors, lambda *arguments, **_: [0] * len(arguments[-1])):
        monkeypatch.setattr(update_module, "update_vectors", function)
        image, param = filled_record(schema, values), buffer(schema.part("param").image_bytes)
        for spans in ([(1, 0, 4096)], [(0, 0, 91), (1, 4096, 5000), (2, 0, 1), (3, 0, 2048)]):
            update(
                schema, image, gradients, options=AdamW(lr=0.1) if ranks else None, optimizer_step=missed + 4, grad_scale=0.37,
                param=param, missed=[AdamW(lr=0.01 * number) for number in range(missed)], spans=spans,
            )  # fmt: skip
        made.append((bytes(image), bytes(param)))
    assert made[0] == made[1], SEED
    assert made[0][0] != bytes(filled_record(schema, values)) or not (ranks or missed)
