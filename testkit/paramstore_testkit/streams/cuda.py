"""Puts a simulated device in the place of torch.cuda: the lines that run on a GPU run on it, unchanged."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from paramstore_testkit.streams.device_tensor import Device
from paramstore_testkit.streams.world import Event, Stream, StreamWorld

ALREADY_REGISTERED, NOT_REGISTERED, NOT_SUPPORTED = 712, 713, 801
"""Error codes of CUDA."""


class Runtime:
    """The functions of libcudart that register host memory. can_register: False for a platform that refuses it."""

    def __init__(self, device: Device, *, can_register: bool) -> None:
        self._device = device
        self._can_register = can_register

    def cudaHostRegister(self, address: int, length_bytes: int, flags: int) -> int:  # noqa: N802 - CUDA's name
        if not self._can_register:
            return NOT_SUPPORTED
        if address in self._device.pinned:
            return ALREADY_REGISTERED
        self._device.pinned[address] = length_bytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802 - CUDA's name
        if address not in self._device.pinned:
            return NOT_REGISTERED
        self._device.unpin(address)
        return 0


@contextmanager
def simulated_cuda(world: StreamWorld, *, can_register: bool = True) -> Iterator[Device]:
    """Inside, device="cuda" is `world`; what was given to it and has not run when the block ends never runs."""
    device = Device(world)
    runtime = Runtime(device, can_register=can_register)

    @contextmanager
    def stream(current: Stream) -> Iterator[None]:
        before, world.current = world.current, current
        try:
            yield
        finally:
            world.current = before

    class NewStream(Stream):
        def __init__(self, _: torch.device | None = None) -> None:
            super().__init__(world)

    class NewEvent(Event):
        def __init__(self) -> None:
            super().__init__(world)

    make_tensor = torch.tensor

    def tensor(values: object, *, device: torch.device | str | None = None, **options: Any) -> Tensor:
        made = make_tensor(values, **options)  # torch makes it out of reach of dispatch modes
        return made if device is None else made.to(device)

    names: dict[str, Any] = {
        "Stream": NewStream, "Event": NewEvent, "stream": stream, "device": nullcontext,
        "current_stream": lambda _=None: world.current, "cudart": lambda: runtime, "synchronize": lambda _=None: world.finish(),
        "is_available": lambda: True, "current_device": lambda: 0, "is_current_stream_capturing": lambda: False,
        "is_bf16_supported": lambda: True, "_lazy_init": lambda: None,
        "get_device_capability": lambda _=None: (9, 0),
    }  # fmt: skip
    with patch.multiple("torch.cuda", **names), patch("torch.tensor", tensor), device:
        yield device
