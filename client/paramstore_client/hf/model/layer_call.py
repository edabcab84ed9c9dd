"""One call of one experts module on leased weights, forward and backward.

The kernel's operations are nodes of the caller's own graph, so that gradients are summed in the order of the unmodified model:
bit for bit the same. Around them stand three nodes of ours:

    inputs, anchor -> Opening -> Weights (one per holder) -> kernel -> Exit -> output

- Exit is the first in backward. What a checkpoint has to recompute for the layer is recomputed there, before any weight is fetched.
- Weights take the gradients of their holder, which are pushed; a holder whose gradient nobody needs has none.
- Opening is the last: all gradients have been pushed and all weights been given back when it returns.

No weight lives from forward to backward: what autograd saves of weights is fetched again when a node unpacks it. All else that
is saved goes the way it would without us: to the hooks around the layer (checkpoints, `save_on_cpu`), or as it is.
None of the objects here refers to the graph; the graph refers to them, through C++, where Python's collector sees no cycle.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks

from paramstore.errors import ConfigError, LeaseError
from paramstore_client.nn.parallel import Guard
from paramstore_client.nn.weight_views import WeightView, find_view, hooks_around, in_dtype_of

OTHERS_WAIT_S = 60.0
"""Longest that a layer waits for slots which other threads' layers use."""
Fields = Mapping[str, Tensor]
WeightsOf = Callable[[Any], Fields]
"""(holder) -> fields. A holder names weights that are held together: the position of one expert, or None for all."""


class ForwardSupply(Protocol):
    """Gives a call without a graph its weights."""

    def forward_pass(self) -> AbstractContextManager[WeightsOf]:
        """The weights of a forward, within the `with`."""
        ...


@runtime_checkable
class Supply(ForwardSupply, Protocol):
    """Gives a call its weights, again in backward, and takes their gradients."""

    def begin_backward(self) -> None:
        """Begins a backward; drops what an unfinished one had left."""
        ...

    def backward_weights(self, holder: Any, /) -> Fields:
        """The bytes that forward saw, valid until the next call or `let_go`. Raises StepMismatch where there are others by now."""
        ...

    def push(self, holder: Hashable, gradients: Fields, /) -> None:
        """Takes the gradients of a holder's fields; they may be freed on return."""
        ...

    def let_go(self) -> None:
        """Gives back what backward holds; it is taken again when it is needed."""
        ...

    def finish_backward(self) -> None:
        """Ends a backward, as all gradients have come: on return they have been pushed, and nothing is held."""
        ...


class GuardedSupply(Supply):
    """A supply in front of another whose errors in backward the other ranks learn."""

    def __init__(self, supply: Supply, guard: Guard) -> None:
        self._supply = supply
        self._guard = guard

    def forward_pass(self) -> AbstractContextManager[WeightsOf]:
        return self._supply.forward_pass()

    def begin_backward(self) -> None:
        self._supply.begin_backward()

    def backward_weights(self, holder: Any, /) -> Fields:
        with self._guard():
            return self._supply.backward_weights(holder)

    def push(self, holder: Hashable, gradients: Fields, /) -> None:
        with self._guard():
            self._supply.push(holder, gradients)

    def let_go(self) -> None:
        self._supply.let_go()

    def finish_backward(self) -> None:
        with self._guard():
            self._supply.finish_backward()


class BackwardPasses:
    """Knows which layer of a model holds weights for backward. Whoever begins a pass makes the one before let go of its weights.

    So the weights that a failed backward, or one cut off (`autograd.grad` with some inputs), still held are given back.
    """

    def __init__(self) -> None:
        self._holder: Supply | None = None

    def begin(self, supply: Supply | None) -> None:
        """Begins a pass: `supply` holds weights from here on; None: a forward, which ends by itself."""
        before, self._holder = self._holder, supply
        if before is not None and before is not supply:
            before.let_go()

    def end(self, supply: Supply) -> None:
        """Notes that `supply` holds nothing any more."""
        if self._holder is supply:
            self._holder = None


class LayersUnderWay:
    """Knows which layers of a model threads compute at the same time. One that finds all slots in use by others begins again when
    one of them has ended. Takes no lock: in a forked child another thread's would be held for ever."""

    def __init__(self) -> None:
        self._layers: set[object] = set()
        self._ends = itertools.count(1)
        self._last_end = 0
        self._waiting: list[threading.Event] = []

    def compute(self, layer: Callable[[], Tensor]) -> Tensor:
        """What `layer` gives. Without a graph it is called again where it raises LeaseError beside others, for OTHERS_WAIT_S."""
        give_up_s = time.monotonic() + OTHERS_WAIT_S
        while True:
            before, this = self._last_end, object()
            self._layers.add(this)
            try:
                return layer()
            except LeaseError:
                is_alone = len(self._layers) == 1 and self._last_end == before
                if is_alone or torch.is_grad_enabled() or time.monotonic() >= give_up_s:
                    raise
            finally:
                self._layers.discard(this)
                self._last_end = next(self._ends)
                for ended in tuple(self._waiting):
                    ended.set()
            self._await_end(give_up_s)

    def _await_end(self, give_up_s: float) -> None:
        """Returns when a layer that is under way has ended, or where there is none."""
        ended = threading.Event()
        self._waiting.append(ended)  # before the look: who ends after it, tells
        try:
            if self._layers:
                ended.wait(max(0.0, give_up_s - time.monotonic()))
        finally:
            self._waiting.remove(ended)


class LayerCall:
    """One call of an experts module. compute: (weights_of) -> y.

    anchor: returns a leaf that needs a gradient, called by each recorded forward: the leaf makes backward run where no input needs
    one. It is None, or returns None, where the weights get no gradients.
    """

    def __init__(
        self,
        supply: ForwardSupply,
        passes: BackwardPasses,
        compute: Callable[[WeightsOf], Tensor],
        *,
        anchor: Callable[[], Tensor | None] | None,
    ) -> None:
        self._supply = supply
        self._passes = passes
        self._compute = compute
        self._anchor = anchor

    def run(self, inputs: Sequence[Tensor]) -> Tensor:
        """y, recorded for backward where grad mode is on. inputs: what y depends on beside the weights, the tokens first: weights
        compute in their dtype (`in_dtype_of`)."""
        supply, passes = self._supply, self._passes
        passes.begin(None)
        if not torch.is_grad_enabled():
            with supply.forward_pass() as weights_of:
                return self._compute(lambda holder: in_dtype_of(inputs[0], weights_of(holder)))
        assert isinstance(supply, Supply), "a forward under a graph has a backward"
        recording = _Recording(supply, passes)
        anchor = None if self._anchor is None else self._anchor()
        if anchor is not None:
            anchor = _Opening.apply(anchor, supply, passes)  # type: ignore[no-untyped-call]
        with supply.forward_pass() as weights_of, saved_tensors_hooks(recording.pack, recording.unpack):
            y = self._compute(recording.entering(weights_of, anchor, inputs[0]))
        recording.end()
        return _Exit.apply(y, supply, passes, *inputs) if y.requires_grad else y  # type: ignore[no-untyped-call]


class _Recording:
    """The saved-tensor hooks of one forward and their state. Holds weights only until `end`."""

    def __init__(self, supply: Supply, passes: BackwardPasses) -> None:
        self._supply = supply
        self._passes = passes
        self._outer = hooks_around()
        self._newest: tuple[Hashable, Fields] | None = None

    def entering(self, weights_of: WeightsOf, anchor: Tensor | None, x: Tensor) -> WeightsOf:
        """`weights_of`, with each holder's weights put into the graph once, behind `anchor`, in the dtype for `x`."""
        # Only the newest is kept: a kernel asks for all fields of an expert before it goes on to the next.
        newest: tuple[Hashable, Fields] | None = None

        def entered(holder: Hashable) -> Fields:
            nonlocal newest
            if newest is None or newest[0] != holder:
                weights = weights_of(holder)
                self._newest = holder, weights
                newest = holder, in_dtype_of(x, self._enter(holder, weights, anchor))
            return newest[1]

        return entered

    def end(self) -> None:
        """Ends the forward: what is packed from here on is no weight."""
        self._newest = None

    def pack(self, tensor: Tensor) -> Any:
        view = None if self._newest is None else find_view(tensor, *self._newest)
        if view is not None:
            return view
        # Detached: the graph would keep itself alive through a tensor that knows its node.
        return tensor.detach() if self._outer is None else self._outer[0](tensor)

    def unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, WeightView):
            if torch.is_grad_enabled():  # the graph that backward makes would keep weights whose lease ends
                raise ConfigError("create_graph=True: stored experts have no second derivatives; leave it out")
            self._passes.begin(self._supply)
            return packed.of(self._supply.backward_weights(packed.holder)[packed.field])
        tensor: Tensor = packed if self._outer is None else self._outer[1](packed)
        return tensor

    def _enter(self, holder: Hashable, weights: Fields, anchor: Tensor | None) -> Fields:
        if anchor is None:
            return weights
        names = tuple(weights)
        tensors = _Weights.apply(anchor, self._supply, holder, names, *weights.values())  # type: ignore[no-untyped-call]
        return dict(zip(names, tensors, strict=True))


class _Opening(torch.autograd.Function):
    """The node before all weights; its backward is called when all of them have their gradients."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, supply: Supply, passes: BackwardPasses) -> Tensor:
        ctx.supply, ctx.passes = supply, passes
        return anchor.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        ctx.supply.finish_backward()
        ctx.passes.end(ctx.supply)
        # Zeros, not None: what waits for the anchor's gradient learns that the layer has pushed.
        return grad, None, None


class _Weights(torch.autograd.Function):
    """The node by which weights enter the graph; its backward hands their gradients on."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, supply: Supply, holder: Hashable, names: tuple[str, ...], *tensors: Tensor) -> Any:
        ctx.supply, ctx.holder, ctx.field_names = supply, holder, names
        ctx.anchor_like = anchor.shape, anchor.dtype, anchor.device
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        ctx.supply.push(ctx.holder, dict(zip(ctx.field_names, grads, strict=True)))
        shape, dtype, device = ctx.anchor_like
        return torch.zeros(shape, dtype=dtype, device=device), None, None, None, *(None for _ in grads)


class _Exit(torch.autograd.Function):
    """The node by which the layer's output leaves; its backward is the layer's first."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, supply: Supply, passes: BackwardPasses, *inputs: Tensor) -> Tensor:
        ctx.supply, ctx.passes, ctx.input_count = supply, passes, len(inputs)
        ctx.save_for_backward(*inputs)
        return y.view_as(y)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        _ = ctx.saved_tensors  # a checkpoint around the layer recomputes it here: it leases for itself
        ctx.supply.begin_backward()
        ctx.passes.begin(ctx.supply)
        # Where the weights get no gradients, or only some inputs are asked for, no node of ours is the last.
        torch.autograd.Variable._execution_engine.queue_callback(lambda: ctx.passes.begin(None))
        return grad, None, None, *(None for _ in range(ctx.input_count))
