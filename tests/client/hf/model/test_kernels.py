from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from paramstore.errors import ConfigError
from paramstore_client.hf.compat import modeling
from paramstore_client.hf.model.kernels import ExpertIndex, ExpertStack, ModuleView, RecordedStack, choose_kernel, make_kernel
from paramstore_client.hf.model.layout import experts_modules, stacked_tensors
from paramstore_testkit.training.moe_families import tiny_config
from paramstore_testkit.training.moe_models import FAMILIES

pytestmark = pytest.mark.slow


def model_of(family: str) -> Any:
    config = tiny_config(family)
    return modeling.on_meta(modeling.concrete_class(modeling.transformers().AutoModelForCausalLM, config), config)


@pytest.mark.parametrize("family", FAMILIES)
def test_eager_loops_take_one_expert_after_the_other(family: str) -> None:
    module = next(iter(experts_modules(model_of(family)).values()))
    fields = tuple(stacked_tensors(module))
    assert make_kernel("eager", module, fields).is_streamed
    assert not make_kernel("grouped_mm", module, fields).is_streamed


def test_loop_that_uses_a_field_as_a_whole_is_not_streamed() -> None:
    class Whole(torch.nn.Module):
        def forward(self, hidden_states: Any, top_k_index: Any, top_k_weights: Any) -> Any:
            return torch.einsum("th,eih->tei", hidden_states, self.gate_up_proj) + self.down_proj[0]

    original = Whole.forward
    Whole.forward = lambda self, *args: original(self, *args)  # type: ignore[method-assign]
    Whole.forward.__wrapped__ = original  # type: ignore[attr-defined]
    assert not make_kernel("eager", Whole(), ("gate_up_proj", "down_proj")).is_streamed


def test_auto_is_what_the_model_would_run() -> None:
    model = model_of("mixtral")
    assert choose_kernel(model, "auto", None) == model.get_correct_experts_implementation(None)
    assert choose_kernel(model, "auto", "eager") == "eager"
    assert choose_kernel(model, "auto", "batched_mm") == "batched_mm"
    assert choose_kernel(model, "grouped_mm", "eager") == "grouped_mm"


def test_kernels_that_need_the_whole_module_are_refused() -> None:
    with pytest.raises(ConfigError, match="sonicmoe"):
        choose_kernel(model_of("mixtral"), "auto", "sonicmoe")
    with pytest.raises(ConfigError, match="experts_kernel='fast'"):
        choose_kernel(model_of("mixtral"), "fast", None)


def test_view_has_the_weights_and_the_rest_of_the_module() -> None:
    module = torch.nn.Linear(2, 3)
    view = ModuleView(module, {"gate_up_proj": "here"}, count=5)
    assert (view.num_experts, view.gate_up_proj, view.in_features) == (5, "here", 2)


def test_index_takes_numbers_and_scalar_tensors() -> None:
    tensors = [torch.zeros(1), torch.ones(1)]
    index = ExpertIndex("w", lambda position: {"w": tensors[position]})
    assert index[torch.tensor(1)] is tensors[1]
    assert index[0] is tensors[0]


# --- a stack of tensors that lie apart


class Apart:
    """A field whose tensors come in this order."""

    def __init__(self, tensors: list[torch.Tensor], order: list[int]) -> None:
        self.dtype, self.device, self.shape = tensors[0].dtype, tensors[0].device, tuple(tensors[0].shape)
        self.tensors, self.order = tensors, order
        self.asked: list[int] = []

    def in_turn(self) -> Iterator[tuple[int, torch.Tensor]]:
        for position in self.order:
            self.asked.append(position)
            yield position, self.tensors[position]


def stack_of(tensors: list[torch.Tensor], order: list[int] | None = None) -> ExpertStack:
    return ExpertStack(Apart(tensors, order or list(range(len(tensors)))))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("counts", [(3, 0, 1, 4), (0, 0, 0, 8), (8, 0, 0, 0), (1, 1, 1, 1)], ids=str)
@pytest.mark.parametrize("is_transposed", [True, False])
def test_a_stack_multiplies_with_the_bits_of_torchs_grouped_mm(
    dtype: torch.dtype, counts: tuple[int, ...], is_transposed: bool
) -> None:
    generator = torch.Generator().manual_seed(sum(counts))
    shape = (48, 32) if is_transposed else (32, 48)
    tensors = [torch.randn(shape, generator=generator).to(dtype) for _ in counts]
    x = torch.randn(sum(counts), 32, generator=generator).to(dtype)
    offsets = torch.tensor(counts).cumsum(0).to(torch.int32)
    whole = torch.stack(tensors)
    expected = torch.nn.functional.grouped_mm(x, whole.transpose(-2, -1) if is_transposed else whole, offs=offsets)
    for order in ([0, 1, 2, 3], [2, 0, 3, 1]):
        stack = stack_of(tensors, order)
        made = torch.nn.functional.grouped_mm(x, stack.transpose(-2, -1) if is_transposed else stack, offs=offsets)  # type: ignore[call-overload]
        assert torch.equal(made, expected)


def test_a_stack_is_multiplied_in_the_order_in_which_its_tensors_come() -> None:
    field = Apart([torch.full((4, 4), float(expert)) for expert in range(3)], [2, 0, 1])
    y = ExpertStack(field).grouped_mm(torch.ones(5, 4), torch.tensor([2, 2, 5]))
    assert field.asked == [2, 0, 1]
    assert y[:, 0].tolist() == [0.0, 0.0, 8.0, 8.0, 8.0]


def test_a_stack_gives_biases_by_position_and_other_dtypes() -> None:
    biases = stack_of([torch.full((3,), float(expert)) for expert in range(4)])
    assert biases[torch.tensor([3, 0, 3])].tolist() == [[3.0] * 3, [0.0] * 3, [3.0] * 3]
    stack = stack_of([torch.ones(2, 3)] * 2)
    assert (stack.dtype, stack.itemsize, stack.device.type) == (torch.float32, 4, "cpu")
    assert (stack.to(torch.bfloat16).dtype, stack.to(torch.bfloat16).itemsize) == (torch.bfloat16, 2)


def test_a_stack_knows_no_other_operation() -> None:
    stack: Any = stack_of([torch.ones(2, 2)])
    with pytest.raises(TypeError, match="only -1 and -2"):
        stack.transpose(0, 1)
    with pytest.raises(TypeError, match="only grouped_mm is known"):
        torch.matmul(torch.ones(2, 2), stack)
    with pytest.raises(TypeError, match="only grouped_mm is known"):
        torch.nn.functional.grouped_mm(torch.ones(2, 2), stack, offs=torch.tensor([2]), bias=torch.ones(2))


# --- a stack under a graph


@pytest.mark.parametrize("autocast", [False, True], ids=["", "autocast"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("counts", [(3, 1, 4), (1, 1, 1), (70, 3, 33)], ids=str)
@pytest.mark.parametrize("is_transposed", [True, False])
def test_a_recorded_stack_has_the_gradients_of_torchs_grouped_mm(
    dtype: torch.dtype, counts: tuple[int, ...], is_transposed: bool, autocast: bool
) -> None:
    generator = torch.Generator().manual_seed(sum(counts))
    tensors = [torch.randn((48, 32) if is_transposed else (32, 48), generator=generator).to(dtype) for _ in counts]
    biases = [torch.randn(48, generator=generator).to(dtype) for _ in counts]
    x, offsets = torch.randn(sum(counts), 32, generator=generator).to(dtype), torch.tensor(counts).cumsum(0).to(torch.int32)
    index = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    grad = torch.randn(sum(counts), 48, generator=generator).to(dtype)
    made = []
    for is_whole in (True, False):
        x_in, *leaves = (tensor.clone().requires_grad_() for tensor in (x, *tensors, *biases))
        matrices, rows = leaves[: len(counts)], leaves[len(counts) :]
        weight: Any = torch.stack(matrices) if is_whole else RecordedStack(Apart(matrices, [0, 1, 2]))
        bias: Any = torch.stack(rows) if is_whole else RecordedStack(Apart(rows, [0, 1, 2]))
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            multiplied: Any = weight.transpose(-2, -1) if is_transposed else weight
            y = torch.nn.functional.grouped_mm(x_in, multiplied, offs=offsets)
            y.add_(bias[index])
        y.backward(grad)
        made.append([y, x_in.grad, *(leaf.grad for leaf in leaves)])
    assert all(torch.equal(one, other) for one, other in zip(*made, strict=True))
