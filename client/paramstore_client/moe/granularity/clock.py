"""How long a call's passes took on this rank: where the device computes beside the host, by its own clock."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of a call's passes, and how many of them were spent in computing; backward: 0 where it has none."""

    forward_s: float
    forward_computing_s: float
    backward_s: float = 0.0
    backward_computing_s: float = 0.0

    @property
    def seconds(self) -> float:
        return self.forward_s + self.backward_s

    @property
    def microseconds(self) -> tuple[int, int, int, int]:
        """How ranks tell them."""
        return (
            max(1, round(1e6 * self.forward_s)), round(1e6 * self.forward_computing_s),
            round(1e6 * self.backward_s), round(1e6 * self.backward_computing_s),
        )  # fmt: skip

    @classmethod
    def of_microseconds(cls, told: Sequence[int]) -> Times:
        return cls(*(each / 1e6 for each in told))


class Clock:
    """Takes the time of one call, lap by lap. ended: gets it when the call has; None in place of it where that has failed."""

    def __init__(self, device: torch.device) -> None:
        self.ended: Callable[[Clock | None], None] = lambda _: None
        self._device = device
        self._laps: list[tuple[Any, Any, bool, bool]] = []
        self._last: Any = None
        self._is_backward = False

    def begin(self, *, is_backward: bool = False) -> None:
        """Begins a pass."""
        self._is_backward, self._last = is_backward, self._mark()

    def skip(self) -> None:
        """Leaves out what has passed since the last lap."""
        self._last = self._mark()

    def lap(self, *, is_computing: bool = False) -> None:
        """Ends a lap, which was spent in computing or not."""
        mark = self._mark()
        self._laps.append((self._last, mark, self._is_backward, is_computing))
        self._last = mark

    def end(self) -> None:
        """Ends the call, and its last lap."""
        self.lap()
        self.ended(self)

    def fail(self) -> None:
        """Ends the call, whose times are nothing."""
        self.ended(None)

    def times(self) -> Times:
        """What the laps until now took; waits for the device."""
        sums = [0.0] * 4
        for begun, ended, is_backward, is_computing in self._laps:
            lap_s = self._between_s(begun, ended)
            sums[2 * is_backward] += lap_s
            sums[2 * is_backward + 1] += lap_s * is_computing
        return Times(*sums)

    def _mark(self) -> Any:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch left it so
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _between_s(self, begun: Any, ended: Any) -> float:
        if self._device.type != "cuda":
            return float(ended - begun)
        ended.synchronize()
        return float(begun.elapsed_time(ended)) / 1e3
