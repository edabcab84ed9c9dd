"""What stands in the place of torch.cuda, for as long as it does."""

from __future__ import annotations

import torch

from paramstore_testkit.streams.cuda import ALREADY_REGISTERED, NOT_REGISTERED, NOT_SUPPORTED, simulated_cuda
from paramstore_testkit.streams.device_tensor import CUDA
from paramstore_testkit.streams.world import StreamWorld


def test_names_are_torchs_own_again_afterwards() -> None:
    names = {name: getattr(torch.cuda, name) for name in ("Stream", "Event", "stream", "current_stream", "is_available")}
    make = torch.tensor
    with simulated_cuda(StreamWorld(0)):
        assert all(getattr(torch.cuda, name) is not value for name, value in names.items())
    assert {name: getattr(torch.cuda, name) for name in names} == names
    assert torch.tensor is make


def test_work_goes_to_the_stream_that_is_current() -> None:
    world = StreamWorld(0, is_lazy=True)
    with simulated_cuda(world):
        other = torch.cuda.Stream(CUDA)
        with torch.cuda.device(CUDA), torch.cuda.stream(other):
            assert torch.cuda.current_stream() is other
            torch.ones(1, device=CUDA)
        assert torch.cuda.current_stream(CUDA) is world.streams[0]
        torch.cuda.synchronize()
    assert [stream.done for stream in world.streams] == [0, 1]


def test_host_memory_is_registered_once_and_unregistered_once() -> None:
    with simulated_cuda(StreamWorld(0)) as device:
        runtime = torch.cuda.cudart()
        assert [runtime.cudaHostRegister(4096, 100, 8), runtime.cudaHostRegister(4096, 100, 8)] == [0, ALREADY_REGISTERED]
        assert device.pinned == {4096: 100}
        assert [runtime.cudaHostUnregister(4096), runtime.cudaHostUnregister(4096)] == [0, NOT_REGISTERED]


def test_platform_may_refuse_to_register() -> None:
    with simulated_cuda(StreamWorld(0), can_register=False) as device:
        assert torch.cuda.cudart().cudaHostRegister(4096, 100, 8) == NOT_SUPPORTED
        assert device.pinned == {}
