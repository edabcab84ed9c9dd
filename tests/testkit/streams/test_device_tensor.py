"""Work on device tensors is late, its results are poison until then, and transformers' kernels compute on them what they compute
on the host."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from paramstore_client.hf.compat import modeling
from paramstore_client.hf.model.kernels import ModuleView, make_kernel
from paramstore_testkit.streams.cuda import simulated_cuda
from paramstore_testkit.streams.device_tensor import CUDA, Device, DeviceTensor, peek, poison
from paramstore_testkit.streams.world import Event, Stream, StreamWorld


@pytest.fixture
def device() -> Iterator[Device]:
    """A device that runs only what somebody waits for."""
    with simulated_cuda(StreamWorld(0, is_lazy=True)) as device:
        yield device
    assert device.world.races.found == []


def test_results_are_poison_until_their_work_has_run(device: Device) -> None:
    ones = torch.ones(3, device=CUDA)
    twice = ones + ones
    assert isinstance(twice, DeviceTensor)
    assert (twice.is_cuda, twice.device, str(twice)) == (True, CUDA, "DeviceTensor((3,), torch.float32)")
    assert peek(twice).isnan().all()
    device.world.finish()
    assert peek(twice).tolist() == [2.0, 2.0, 2.0]


def test_a_view_is_made_at_once_and_shares_bytes(device: Device) -> None:
    whole = torch.zeros(2, 8, dtype=torch.uint8, device=CUDA)
    part = whole[1, 4:].view(torch.float32)
    part.fill_(1.0)
    assert whole.to(CUDA) is whole
    device.world.finish()
    assert peek(whole)[0].tolist() == [0] * 8
    assert peek(part).item() == 1.0


def test_whoever_needs_a_value_waits_for_it(device: Device) -> None:
    ones = torch.ones(3, device=CUDA)
    assert (ones.sum().item(), ones.tolist(), ones.cpu().sum()) == (3.0, [1.0] * 3, 3.0)
    assert torch.tensor([0, 5], device=CUDA).nonzero().tolist() == [[1]]
    assert ones[ones > 0].shape == (3,)
    host = torch.zeros(3)
    host.copy_(ones)
    assert host.sum() == 3.0


@pytest.mark.parametrize(("is_pinned", "read"), [(True, 2.0), (False, 1.0)])
def test_copy_reads_pinned_memory_when_it_runs_and_other_memory_when_it_is_called(is_pinned: bool, read: float) -> None:
    world = StreamWorld(0, is_lazy=True)
    with simulated_cuda(world):
        source, target = torch.empty(4, pin_memory=is_pinned).fill_(1.0), torch.empty(4, device=CUDA)
        target.copy_(source, non_blocking=True)
        source.fill_(2.0)
        assert target.cpu().tolist() == [read] * 4
    assert bool(world.races.found) == is_pinned


def test_copy_to_the_host_that_does_not_block_is_there_later(device: Device) -> None:
    there = torch.ones(3, device=CUDA)
    early = there.to("cpu", non_blocking=True)
    assert early.isnan().all()
    device.world.finish()
    assert early.tolist() == [1.0] * 3


def test_streams_that_share_a_tensor_must_wait_for_each_other() -> None:
    world = StreamWorld(0, is_lazy=True)
    with simulated_cuda(world):
        other, shared = Stream(world), torch.ones(3, device=CUDA)
        with torch.cuda.stream(other):
            shared.fill_(2.0)
    assert [found.split(":")[0] for found in world.races.found] == ["stream 1"]


def by_index(slots: Tensor, row: int) -> Tensor:
    ids = (torch.tensor([row - 1], device=CUDA) + 1).view(1, 1)
    return slots[ids.reshape(-1)]


def by_groups(slots: Tensor, row: int) -> Tensor:
    counts = (torch.arange(len(slots), device=CUDA) == row).int()
    return torch._grouped_mm(torch.ones(1, 16, device=CUDA, dtype=torch.bfloat16), slots, offs=counts.cumsum(0, dtype=torch.int32))


@pytest.mark.parametrize("pick", [by_index, by_groups])
@pytest.mark.parametrize(("row", "is_race"), [(0, False), (1, False), (2, True)])
def test_a_kernel_that_picks_rows_reads_those_alone(pick: Callable[[Tensor, int], Tensor], row: int, is_race: bool) -> None:
    """Also where the numbers that tell them are on their way; another stream writes into the last row meanwhile."""
    world = StreamWorld(0, is_lazy=True)
    with simulated_cuda(world):
        slots = torch.ones(3, 24, 16, device=CUDA, dtype=torch.bfloat16)[:, :16]
        other = Stream(world)
        other.wait_event(recorded(world))
        with torch.cuda.stream(other):
            slots[2].fill_(2.0)
        picked = pick(slots, row)
        assert peek(picked).isnan().all(), "it has not run"
    assert bool(world.races.found) == is_race


def recorded(world: StreamWorld) -> Event:
    event = Event(world)
    event.record(world.current)
    return event


def test_a_row_that_cannot_be_foreseen_is_not_looked_at() -> None:
    world = StreamWorld(0, is_lazy=True)
    with simulated_cuda(world):
        slots = torch.ones(3, 24, 16, device=CUDA)[:, :16]
        other = Stream(world)
        other.wait_event(recorded(world))
        with torch.cuda.stream(other):
            slots[2].fill_(2.0)
        ids = torch.tensor([1], device=CUDA).add_(1)
        slots[ids]
    assert world.races.found == []


def test_simulated_tensor_outside_of_its_world_is_refused() -> None:
    with simulated_cuda(StreamWorld(0)):
        tensor = torch.ones(3, device=CUDA)
    with pytest.raises(RuntimeError, match="outside of its world"):
        tensor + tensor


def test_poison_is_what_no_computation_survives() -> None:
    assert poison(torch.zeros(1)).isnan()
    assert poison(torch.zeros(1, dtype=torch.int32)).item() == torch.iinfo(torch.int32).max
    assert poison(torch.zeros(1, dtype=torch.bool)).item()


def experts_module(dtype: torch.dtype) -> tuple[torch.nn.Module, list[Tensor]]:
    """Experts of Qwen3-MoE and arguments of a call: 5 tokens, 2 of 8 experts each."""
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    config = Qwen3MoeConfig(hidden_size=32, moe_intermediate_size=16, num_experts=8, num_experts_per_tok=2)
    config._experts_implementation = "eager"
    generator = torch.Generator().manual_seed(0)
    module = Qwen3MoeExperts(config).requires_grad_(False).to(dtype)
    for parameter in module.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    hidden, gate = torch.randn(5, 32, generator=generator).to(dtype), torch.rand(5, 2, generator=generator).to(dtype)
    return module, [hidden, torch.randint(8, (5, 2), generator=generator), gate]


@pytest.mark.slow
@pytest.mark.parametrize("kernel", modeling.KERNELS)
def test_kernels_of_transformers_run_unchanged_and_compute_the_same_bits(kernel: str) -> None:
    module, arguments = experts_module(torch.bfloat16)
    fields = dict(module.named_parameters())
    function = make_kernel(kernel, module, tuple(fields)).function
    expected = function(module, *arguments)
    for seed in range(4):
        world = StreamWorld(seed)
        with simulated_cuda(world):
            there = {name: tensor.to(CUDA) for name, tensor in fields.items()}
            computed = function(ModuleView(module, there, count=8), *(argument.to(CUDA) for argument in arguments))
            assert isinstance(computed, DeviceTensor)
            assert torch.equal(computed.cpu(), expected), f"seed {seed}"
        assert world.races.found == []
