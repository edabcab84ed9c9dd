"""Memory for the active experts of one layer side by side, `[n, ...]` per field, reused from layer to layer.

A set of buffers is lent while a layer computes, and free again right after: forward and backward of one layer may get different
ones. A layer that starts while another one computes (another thread) gets buffers of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from paramstore.core.schema import Field
from paramstore_client.hf.model.lease_window import Window
from paramstore_client.tensors import mapped


class CompactBuffers:
    """Owner of the free buffers of one model; they are as large as the largest layer needed so far.

    is_poisoned: a buffer is filled with NaN when it becomes free, so that a use after that shows.
    """

    def __init__(self, fields: tuple[Field, ...], *, is_poisoned: bool = False) -> None:
        self._fields = fields
        self._is_poisoned = is_poisoned
        self._free: list[tuple[torch.device, dict[str, Tensor]]] = []

    @contextmanager
    def filled(self, window: Window, count: int, device: torch.device) -> Iterator[dict[str, Tensor]]:
        """The weights of the window's `count` experts, [count, ...] per field on `device`, until the end of the `with`.

        The window's leases have ended when the block begins.
        """
        with self.lent(count, device) as shaped:
            with window, torch.no_grad():
                for position in range(count):
                    for name, weight in window.weights(position).items():
                        shaped[name][position].copy_(weight)
            yield shaped

    @contextmanager
    def lent(self, count: int, device: torch.device, *, without: str | None = None) -> Iterator[dict[str, Tensor]]:
        """Memory for `count` experts, [count, ...] per field but `without`, until the end of the `with`. Its bytes are any."""
        fields = [field for field in self._fields if field.name != without]
        flats = self._take(fields, count, device)
        try:
            yield {field.name: flats[field.name][: count * field.elements].view(count, *field.shape) for field in fields}
        finally:
            if self._is_poisoned:
                for flat in flats.values():
                    flat.fill_(torch.nan)
            self._free.append((device, flats))

    def _take(self, fields: Sequence[Field], count: int, device: torch.device) -> dict[str, Tensor]:
        """Takes a free set of buffers; those of `fields` that are too small, or not there, are made anew."""
        flats: dict[str, Tensor] = {}
        for index, (where, candidate) in enumerate(self._free):
            if where == device:
                flats = candidate
                del self._free[index]
                break
        for field in fields:
            needed = count * field.elements
            if field.name not in flats or flats[field.name].numel() < needed:
                flats.pop(field.name, None)  # before the larger one takes memory
                dtype = getattr(torch, field.dtype)
                # Outside of inference mode: such a tensor could not be written to in training later.
                with torch.inference_mode(False):
                    on_host = device.type == "cpu"
                    flats[field.name] = mapped((needed,), dtype) if on_host else torch.empty(needed, dtype=dtype, device=device)
        return flats
