"""Runs the experts of one layer from leases, part by part, forward and backward, without keeping a weight in between.

Without a graph a layer is one visit, and its experts are computed with as they come. With one:

- A lease is held only inside a `with`: none outlives a forward, a backward, or an error in either.
- A tensor that autograd saves for backward and that lies in a leased slot is replaced by (expert, field, geometry) and looked up
  again under the lease that backward takes (`torch.autograd.graph.saved_tensors_hooks`). Everything else it saves is handed to
  the enclosing `Function`, so that checkpointing and `save_on_cpu` around the layer see it.
- Forward visits parts in expert order, backward in the reverse order. Experts share no row, so neither the parts nor
  their number change a bit of the result.
- Backward computes with the bytes that forward saw: identities are compared, StepMismatch if an update came between.
- A part's gradients leave in one `push`, after its lease has ended; the layer has pushed all before backward returns.
"""

# N rows, t rows of one expert, D model
# ruff: noqa: N803, N806 - shape suffixes, as the legend says

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks

from paramstore.core.key import ExpertKey
from paramstore.errors import ConfigError
from paramstore_client.nn.routing import Block, ExpertFn, split_rows
from paramstore_client.nn.weight_views import Identities, WeightView, find_view
from paramstore_client.ranges import EXPERTS, named
from paramstore_client.source import ExpertSource, WeightLease, load_ahead


class _SavedTensors:
    """The saved-tensor hooks of one forward. Holds weights only while their lease is open, and activations only while used.

    It must not refer to the graph: the graph refers to it, through C++, where Python's collector sees no cycle.
    """

    def __init__(self) -> None:
        self._weights: dict[Any, Mapping[str, Tensor]] = {}
        self._expert = -1
        self._activations: list[Tensor] = []

    @contextmanager
    def opened(self, weights: dict[int, Mapping[str, Tensor]]) -> Iterator[None]:
        """Within it, saved views are views of `weights`, by expert."""
        self._weights = weights
        try:
            yield
        finally:
            self._weights = {}

    @contextmanager
    def restored(self, activations: Sequence[Tensor]) -> Iterator[None]:
        """Within it, the tensors that `take_activations` returned can be unpacked again."""
        self._activations = list(activations)
        try:
            yield
        finally:
            self._activations = []

    def take_activations(self) -> list[Tensor]:
        """The tensors that were saved and lie in no slot; the caller keeps them from here on."""
        taken, self._activations = self._activations, []
        return taken

    @contextmanager
    def recording(self, expert: int) -> Iterator[None]:
        self._expert = expert
        with saved_tensors_hooks(self._pack, self._unpack):
            yield

    def _pack(self, tensor: Tensor) -> WeightView | int:
        view = find_view(tensor, self._expert, self._weights[self._expert])
        if view is not None:
            return view
        self._activations.append(tensor)
        return len(self._activations) - 1

    def _unpack(self, packed: WeightView | int) -> Tensor:
        if isinstance(packed, WeightView):
            return packed.of(self._weights[packed.holder][packed.field])
        return self._activations[packed]


class _Entrance(torch.autograd.Function):
    """The start of a recorded graph: gradients are captured at its outputs, and it keeps neither them nor its inputs.

    Leaves would do as well, but stay alive with the graph, tensors over slots among them.
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, names: Sequence[str], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.field_names = names  # by these names `find_view` recognises the cast of a weight
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, ...]:
        raise AssertionError("gradients are captured at the entrance; nothing passes it")


@dataclass(slots=True)
class _Recorded:
    """The edges of one expert's graph at which its gradients come in and are taken out."""

    output: GradientEdge | None
    x: GradientEdge | None
    x_like: tuple[torch.Size, torch.dtype]
    fields: dict[str, GradientEdge]


@dataclass(frozen=True, slots=True)
class Part:
    """Consecutive blocks whose experts are leased together."""

    layer: int
    blocks: tuple[Block, ...]

    @property
    def keys(self) -> list[ExpertKey]:
        return [(self.layer, block.expert) for block in self.blocks]

    @property
    def row_count(self) -> int:
        return sum(block.row_count for block in self.blocks)


def split_parts(layer: int, blocks: Sequence[Block], *, limit: int) -> tuple[Part, ...]:
    """`blocks` in parts of at most `limit` experts, in expert order."""
    return tuple(Part(layer, tuple(blocks[start : start + limit])) for start in range(0, len(blocks), limit))


class LayerCall:
    """One forward of one layer, and all that its backward needs. Owner of the recorded graphs and identities.

    forward_hint, backward_hint: called once a pass, while the last of its parts is leased, with the number of slots left beside
    it; the keys they return are prefetched before that part computes.
    anchor: returns the scalar leaf that ties the call into the caller's graph, or None where the weights get no gradients. Without
    it the call has a leaf of its own. guard: backward does its work within it.
    """

    def __init__(
        self,
        source: ExpertSource,
        parts: tuple[Part, ...],
        expert_fn: ExpertFn,
        *,
        forward_hint: Callable[[int], list[ExpertKey]],
        backward_hint: Callable[[int], list[ExpertKey]],
        anchor: Callable[[], Tensor | None] | None = None,
        guard: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._source = source
        self._parts = parts
        self._expert_fn = expert_fn
        self._forward_hint = forward_hint
        self._backward_hint = backward_hint
        self._anchor = anchor
        self.guard = guard
        self._wants_weights = False
        self._saved = _SavedTensors()
        self._identities = Identities()
        self._recorded: dict[int, _Recorded] = {}

    def run(self, x_ND: Tensor) -> Tensor:
        """The experts' rows, recorded for backward where grad mode is on and something can get a gradient."""
        if torch.is_grad_enabled():
            anchor = torch.zeros((), requires_grad=True) if self._anchor is None else self._anchor()
            self._wants_weights = anchor is not None and self._source.schema.is_trainable
            if x_ND.requires_grad or self._wants_weights:
                leaf = torch.zeros(()) if anchor is None else anchor
                return _Streamed.apply(self, leaf, x_ND)  # type: ignore[no-untyped-call, no-any-return]
        return self._compute(x_ND)

    def record(self, x_ND: Tensor, *, wants_x: bool) -> tuple[Tensor, list[Tensor]]:
        """The experts' rows, and the activations that `differentiate` will need."""
        y: list[Tensor] = []
        for index, (part, x) in enumerate(zip(self._parts, torch.split(x_ND, [p.row_count for p in self._parts]), strict=True)):
            with self._source.acquire(part.keys) as lease:
                self._identities.check(part.keys, lease)
                self._prefetch_beside(part, index + 1, self._forward_hint)
                weights = _weights_of(part, lease)
                _check_device(part.keys[0], weights[part.blocks[0].expert], x)
                with named(EXPERTS):
                    y += self._record_part(part, weights, x, wants_x=wants_x)
                del weights
        return torch.cat(y), self._saved.take_activations()

    def differentiate(self, grad_ND: Tensor, activations: Sequence[Tensor]) -> Tensor | None:
        """Pushes every active expert's gradients, part by part; returns the gradient of the rows if it was wanted."""
        grad_parts = torch.split(grad_ND, [part.row_count for part in self._parts])
        grad_x: list[Tensor] = []
        with self._saved.restored(activations):
            for index in reversed(range(len(self._parts))):
                part = self._parts[index]
                with self._source.acquire(part.keys) as lease:
                    self._identities.check(part.keys, lease)
                    self._prefetch_beside(part, index - 1, self._backward_hint)
                    with self._saved.opened(_weights_of(part, lease)), named(EXPERTS):
                        rows, gradients = self._differentiate_part(part, grad_parts[index])
                grad_x[:0] = rows
                if gradients:
                    self._source.push(gradients)
                del gradients  # before the next part makes its own
        return torch.cat(grad_x) if grad_x else None

    def _compute(self, x_ND: Tensor) -> Tensor:
        """The experts' rows without a graph, expert by expert as they come; those that do not fit pass by."""
        blocks = [block for part in self._parts for block in part.blocks]
        position_of = {(self._parts[0].layer, block.expert): position for position, block in enumerate(blocks)}
        rows, y = split_rows(x_ND, blocks), [x_ND] * len(blocks)
        with self._source.acquire_arriving(list(position_of), may_pass=True) as lease:
            room, does_pass = self._source.lease_slots - len(blocks), lease.passing_count > 0
            if does_pass:  # then the last ones leave room
                room = self._source.lease_slots // 2
            for number, key in enumerate(lease.in_turn()):
                if number == (len(blocks) - 1 if does_pass else 0):
                    load_ahead(self._source, self._forward_hint(room))
                weights, position = lease[key], position_of[key]
                _check_device(key, weights, x_ND)
                with named(EXPERTS):
                    y[position] = self._expert_fn(rows[position], weights)
                del weights
        return torch.cat(y)

    def _prefetch_beside(self, part: Part, following: int, hint: Callable[[int], list[ExpertKey]]) -> None:
        """Prefetches what comes after `part`: the layer's following part, else what the hint says."""
        room = max(0, self._source.lease_slots - len(part.blocks))
        load_ahead(self._source, self._parts[following].keys[:room] if 0 <= following < len(self._parts) else hint(room))

    def _record_part(self, part: Part, weights: dict[int, Mapping[str, Tensor]], x: Tensor, *, wants_x: bool) -> list[Tensor]:
        anchor = torch.empty(0, device=x.device, requires_grad=True)
        y = []
        with torch.enable_grad(), self._saved.opened(weights):
            for block, x_tD in zip(part.blocks, split_rows(x, part.blocks), strict=True):
                y_tD, self._recorded[block.expert] = self._record_expert(
                    block.expert, weights[block.expert], x_tD, anchor, wants_x=wants_x
                )
                y.append(y_tD.detach())
        return y

    def _record_expert(
        self, expert: int, weights: Mapping[str, Tensor], x_tD: Tensor, anchor: Tensor, *, wants_x: bool
    ) -> tuple[Tensor, _Recorded]:
        names = list(weights) if self._wants_weights else []
        tensors = [*(weights[name] for name in names), *([x_tD] if wants_x else [])]
        entered = _Entrance.apply(anchor, names, *tensors)  # type: ignore[no-untyped-call]
        inner_x = entered[-1] if wants_x else x_tD
        inner_weights = {**weights, **dict(zip(names, entered, strict=False))}
        with self._saved.recording(expert):
            y_tD = self._expert_fn(inner_x, inner_weights)
        return y_tD, _Recorded(
            output=get_gradient_edge(y_tD) if y_tD.requires_grad else None,
            x=get_gradient_edge(inner_x) if wants_x else None,
            x_like=(x_tD.shape, x_tD.dtype),
            fields={name: get_gradient_edge(inner_weights[name]) for name in names},
        )

    def _differentiate_part(self, part: Part, grad_part: Tensor) -> tuple[list[Tensor], dict[ExpertKey, dict[str, Tensor]]]:
        """Gradients of the part's rows (empty if not wanted), and of its experts' fields. To be called within `opened`."""
        rows: list[Tensor] = []
        gradients: dict[ExpertKey, dict[str, Tensor]] = {}
        for block, grad_tD in zip(part.blocks, split_rows(grad_part, part.blocks), strict=True):
            recorded = self._recorded[block.expert]
            inputs = [*recorded.fields.values(), *([recorded.x] if recorded.x is not None else [])]
            taken: list[Tensor | None] = [None] * len(inputs)
            if recorded.output is not None:
                # The graph is kept: whether the caller wants a second backward is known only to the outer graph.
                taken = list(torch.autograd.grad([recorded.output], inputs, [grad_tD], retain_graph=True, allow_unused=True))
            if recorded.x is not None:
                grad_x = taken.pop()
                shape, dtype = recorded.x_like
                rows.append(grad_tD.new_zeros(shape, dtype=dtype) if grad_x is None else grad_x)
            if any(gradient is not None for gradient in taken):
                gradients[part.layer, block.expert] = self._named(recorded, taken)
        return rows, gradients

    def _named(self, recorded: _Recorded, taken: list[Tensor | None]) -> dict[str, Tensor]:
        """Gradients by field, in the dtype that is pushed. A field that the expert left unused gets zeros: a push has them all."""
        named = {}
        for field, gradient in zip(self._source.schema.gradient_fields(), taken, strict=True):
            dtype = getattr(torch, field.dtype)
            named[field.name] = torch.zeros(field.shape, dtype=dtype) if gradient is None else gradient.to(dtype)
        assert list(named) == list(recorded.fields), "param and gradient fields have one order"
        return named


def _weights_of(part: Part, lease: WeightLease) -> dict[int, Mapping[str, Tensor]]:
    return {block.expert: lease[part.layer, block.expert] for block in part.blocks}


def _check_device(key: ExpertKey, weights: Mapping[str, Tensor], x: Tensor) -> None:
    field, weight = next(iter(weights.items()))
    if weight.device != x.device:
        raise ConfigError(
            f"expert {key}: field {field!r} is leased on {weight.device}, the tokens are on {x.device}; give StoredExperts a "
            f"DeviceTier(namespace, slots, device={str(x.device)!r})"
        )


class _Streamed(torch.autograd.Function):
    """The layer's node in the caller's graph."""

    @staticmethod
    def forward(ctx: Any, call: LayerCall, anchor: Tensor, x_ND: Tensor) -> Tensor:
        y_ND, activations = call.record(x_ND, wants_x=ctx.needs_input_grad[2])
        ctx.call = call
        ctx.save_for_backward(*activations)
        return y_ND

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_ND: Tensor) -> tuple[None, Tensor, Tensor | None]:
        # Before any lease: unpacking may recompute a checkpointed region, which leases for itself.
        activations = ctx.saved_tensors
        with ctx.call.guard():
            grad_x_ND = ctx.call.differentiate(grad_ND, activations)
        # A gradient for the anchor, so that whoever hooks it learns when all layers have pushed.
        return None, torch.zeros(()), grad_x_ND
