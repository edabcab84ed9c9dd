"""The graph of one part's experts, and what of it is kept between forward and backward: MPMoE, section III-C.

What autograd saves of the rows that came is their place in these; rows and activations are kept, copied to the host, or had again:
rows by another exchange, activations by computing forward once more, in whose place only their number was noted.
"""

# M rows of this rank's experts, D model
# ruff: noqa: N803, N806 - shape suffixes, as the legend says

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from paramstore.errors import ConfigError
from paramstore_client.moe.host_arena import Held, HostArena
from paramstore_client.moe.pipeline_plan import Pipeline

Compute = Callable[[Tensor], Tensor]
"""(x_MD) -> y_MD."""


@dataclass(frozen=True, slots=True)
class _Place:
    """A tensor in a storage: the copy on the host, or None for that of the part's rows."""

    held: Held | None
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset_elements: int

    @classmethod
    def of(cls, tensor: Tensor, held: Held | None) -> _Place:
        return cls(held, tensor.dtype, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))

    def view(self, data: Tensor) -> Tensor:
        """The tensor, in a storage that `data` has as a whole."""
        return torch.empty(0, dtype=self.dtype, device=data.device).set_(
            data.untyped_storage(), self.offset_elements, self.size, self.stride
        )


class _Again:
    """Stands for an activation that is computed again."""


class PartGraph:
    """One part's experts as they were computed."""

    def __init__(self, pipeline: Pipeline, arena: HostArena) -> None:
        self._pipeline = pipeline
        self._arena = arena
        self._saved = _Saved(pipeline, arena)
        self._rows: Held | None = None
        self._surroundings: _Surroundings | None = None
        self._edge: GradientEdge | None = None

    @property
    def kept_count(self) -> int:
        return self._saved.kept_count

    def record(self, compute: Compute, x_MD: Tensor) -> Tensor:
        """y_MD, without a graph: that is kept here."""
        if self._pipeline.computes_again:
            self._surroundings = _Surroundings.here(x_MD.device)
        with torch.enable_grad(), self._saved.recording(x_MD):
            leaf = torch.empty(0, device=x_MD.device, requires_grad=True)
            y_MD = compute(_Arrival.apply(self._saved, leaf, x_MD))  # type: ignore[no-untyped-call]
            self._edge = get_gradient_edge(y_MD) if y_MD.requires_grad else None
        if self._pipeline.copies_rows:
            self._rows = self._arena.hold(x_MD.untyped_storage())
        return y_MD.detach()

    def take_kept(self) -> list[Tensor]:
        """The tensors that are kept; the caller has them from here on."""
        return self._saved.take_kept()

    def differentiate(
        self, compute: Compute, grad_MD: Tensor, *, kept: list[Tensor], x_MD: Tensor | None, does_stay: bool
    ) -> Tensor:  # fmt: skip
        """The gradients of the rows. x_MD: these, where they were sent again. does_stay: whether another backward may follow."""
        if self._edge is None:
            return torch.zeros_like(grad_MD)
        rows = x_MD if self._rows is None else self._rows.bytes().view(grad_MD.dtype).view(grad_MD.shape)
        again = [] if rows is None or self._surroundings is None else self._computed_again(self._surroundings, compute, rows)
        with self._saved.restored(kept, rows, again):
            del again
            torch.autograd.backward([self._edge], [grad_MD], retain_graph=does_stay)
        grad_x_MD = self._saved.take_gradient()
        return torch.zeros_like(grad_MD) if grad_x_MD is None else grad_x_MD

    @staticmethod
    def _computed_again(surroundings: _Surroundings, compute: Compute, x_MD: Tensor) -> list[Tensor]:
        """What forward saves, computed with the same random numbers."""
        again: list[Tensor] = []

        def pack(tensor: Tensor) -> None:
            again.append(tensor.detach())

        with surroundings.restored(), torch.enable_grad(), saved_tensors_hooks(pack, _never_unpacked):
            compute(x_MD.detach().requires_grad_())
        return again


class _Saved:
    """What a part's graph has saved. It must not refer to the graph: the graph refers to it, through C++, where Python's collector
    sees no cycle."""

    def __init__(self, pipeline: Pipeline, arena: HostArena) -> None:
        self._pipeline = pipeline
        self._arena = arena
        self._rows: StorageWeakRef | None = None
        self._held: dict[StorageWeakRef, Held] = {}
        self._entries: list[_Place | _Again | int] = []
        self._kept: list[Tensor] = []
        self.kept_count = 0
        self._tensors: list[Tensor] = []
        self._gradient: Tensor | None = None

    @contextmanager
    def recording(self, x_MD: Tensor) -> Iterator[None]:
        """Within it, what autograd saves is noted. x_MD: the part's rows."""
        self._rows = _weak(x_MD)
        with saved_tensors_hooks(self._pack, self._unpack):
            yield
        self._held.clear()
        self.kept_count = len(self._kept)

    @contextmanager
    def restored(self, kept: list[Tensor], rows: Tensor | None, again: list[Tensor]) -> Iterator[None]:
        """Within it, what was saved can be unpacked. Raises ConfigError where something else was saved the second time."""
        if self._pipeline.computes_again and len(again) != len(self._entries):
            raise ConfigError(
                f"experts saved {len(self._entries)} tensors in forward, {len(again)} when they were computed again: let them do "
                'the same each time, or use a reuse that computes nothing again ("keep", "S1", "S2")'
            )
        places = [entry for entry in self._entries if isinstance(entry, _Place)]
        loaded = {held: held.bytes() for held in {place.held for place in places} if held is not None}
        self._tensors = [
            again[number] if isinstance(entry, _Again) else kept[entry] if isinstance(entry, int)
            else entry.view(_given(rows) if entry.held is None else loaded[entry.held])
            for number, entry in enumerate(self._entries)
        ]  # fmt: skip
        try:
            yield
        finally:
            self._tensors = []

    def take_kept(self) -> list[Tensor]:
        kept, self._kept = self._kept, []
        return kept

    def note_gradient(self, grad_MD: Tensor) -> None:
        self._gradient = grad_MD

    def take_gradient(self) -> Tensor | None:
        gradient, self._gradient = self._gradient, None
        return gradient

    def _pack(self, tensor: Tensor) -> int:
        self._entries.append(self._entry(tensor))
        return len(self._entries) - 1

    def _unpack(self, number: int) -> Tensor:
        return self._tensors[number]

    def _entry(self, tensor: Tensor) -> _Place | _Again | int:
        if self._pipeline.reuse == "keep":
            self._kept.append(tensor.detach())  # the graph would keep itself alive through a tensor that knows its node
            return len(self._kept) - 1
        storage = _weak(tensor)
        if storage == self._rows:
            return _Place.of(tensor, None)
        if self._pipeline.computes_again:
            return _Again()
        if storage not in self._held:
            self._held[storage] = self._arena.hold(tensor.untyped_storage())
        return _Place.of(tensor, self._held[storage])


@dataclass(frozen=True, slots=True)
class _Surroundings:
    """What forward depends on beside its arguments: random numbers, and autocast."""

    device: torch.device
    random: Tensor
    device_random: Tensor | None
    autocast: torch.dtype | None

    @classmethod
    def here(cls, device: torch.device) -> _Surroundings:
        is_cuda = device.type == "cuda"
        dtype = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None
        return cls(device, torch.get_rng_state(), torch.cuda.get_rng_state(device) if is_cuda else None, dtype)

    @contextmanager
    def restored(self) -> Iterator[None]:
        devices = [] if self.device_random is None else [self.device]
        autocast = torch.autocast(self.device.type, dtype=self.autocast, enabled=self.autocast is not None, cache_enabled=False)
        with torch.random.fork_rng(devices), autocast:
            torch.set_rng_state(self.random)
            if self.device_random is not None:
                torch.cuda.set_rng_state(self.device_random, self.device)
            yield


class _Arrival(torch.autograd.Function):
    """The start of a part's graph, which notes the gradient of the rows and keeps none of them."""

    @staticmethod
    def forward(ctx: Any, saved: _Saved, leaf: Tensor, x_MD: Tensor) -> Tensor:
        ctx.saved = saved
        return x_MD.detach()

    @staticmethod
    def backward(ctx: Any, grad_MD: Tensor) -> tuple[None, None, None]:
        ctx.saved.note_gradient(grad_MD)
        return None, None, None


def _weak(tensor: Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]  # torch left it so


def _given(rows: Tensor | None) -> Tensor:
    assert rows is not None, "rows are sent again or copied where their places are saved"
    return rows


def _never_unpacked(_: Any) -> Tensor:
    raise AssertionError("nothing differentiates what was computed again")
