"""Where the battery runs: a CUDA device, or its twin on the CPU, where nothing is asynchronous, or streams are simulated."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from paramstore.bench.pairs import Sample
from paramstore_testkit.streams.cuda import simulated_cuda
from paramstore_testkit.streams.world import StreamWorld

TWIN, SIMULATED = "twin on the CPU", "simulated streams"
Waits = Callable[[], int]
"""() -> how often the host has waited for the device so far."""


class Place:
    """A device, and how work on it is timed. is_twin: there is none, and the CPU stands for it."""

    def __init__(self, *, is_twin: bool) -> None:
        self.is_twin = is_twin
        self.device = torch.device("cpu") if is_twin else torch.device("cuda", torch.cuda.current_device())

    def name(self, *, uses_streams: bool = False) -> str:
        """What a row of it ran on."""
        if self.is_twin:
            return SIMULATED if uses_streams else TWIN
        return torch.cuda.get_device_name(self.device)

    def describe(self) -> dict[str, object]:
        if self.is_twin:
            return {"name": TWIN}
        properties = torch.cuda.get_device_properties(self.device)
        return {
            "name": properties.name, "memory_bytes": properties.total_memory, "multiprocessors": properties.multi_processor_count,
            "capability": list(torch.cuda.get_device_capability(self.device)), "cuda": torch.version.cuda,
        }  # fmt: skip

    def finish(self) -> None:
        """Waits until the device has done everything."""
        if not self.is_twin:
            torch.cuda.synchronize(self.device)

    def pinned(self, length_bytes: int) -> Tensor:
        """Host memory that the device copies from by itself."""
        return torch.ones(length_bytes, dtype=torch.uint8, pin_memory=not self.is_twin)

    def other_stream(self) -> Callable[[], AbstractContextManager[object]]:
        """Makes a stream; within what the result returns, work is given to it."""
        if self.is_twin:
            return nullcontext
        stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]  # the library's
        return lambda: torch.cuda.stream(stream)

    def timed(self, work: float, launch: Callable[[], object], *, beside: Callable[[], object] | None = None) -> Sample:
        """Times `launch` on the current stream, by the device's clock. beside: gives work to another stream, just before."""
        self.finish()
        if beside is not None:
            beside()
        if self.is_twin:
            started_s = time.perf_counter()
            launch()
            return Sample(work, time.perf_counter() - started_s)
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # the library's
        start.record()
        launch()
        end.record()
        end.synchronize()
        return Sample(work, start.elapsed_time(end) / 1000)

    @contextmanager
    def streams(self, seed: int = 0) -> Iterator[Waits]:
        """Within it "cuda:0" is the device, or simulated streams in its place. Yields the number of the host's waits."""
        if self.is_twin:
            world = StreamWorld(seed)
            with simulated_cuda(world):
                yield lambda: world.host_waits
        else:
            with counted_waits() as waits:
                yield waits


@contextmanager
def counted_waits() -> Iterator[Waits]:
    """Counts, within it, what torch calls a synchronizing operation, and the waits for events and streams."""
    explicit = 0

    def counting(method: Any) -> Any:
        def counted(self: Any) -> Any:
            nonlocal explicit
            explicit += 1
            return method(self)

        return counted

    with (
        warnings.catch_warnings(record=True) as caught,
        patch.object(torch.cuda.Event, "synchronize", counting(torch.cuda.Event.synchronize)),
        patch.object(torch.cuda.Stream, "synchronize", counting(torch.cuda.Stream.synchronize)),
    ):
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield lambda: explicit + sum("synchronizing CUDA operation" in str(warning.message) for warning in caught)
        finally:
            torch.cuda.set_sync_debug_mode("default")
