"""Gives a layer's call its weights, by expert, side by side or where they lie, from leases, and pushes its gradients.

Gradients of several experts leave in one push, of at most PUSH_BYTES unless one expert has more. What one push holds changes no
bit: every expert's gradient is one addition.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from paramstore.core.key import ExpertKey
from paramstore.core.schema import Field
from paramstore_client.hf.model.compact_buffers import CompactBuffers
from paramstore_client.hf.model.kernels import RecordedStack
from paramstore_client.hf.model.layer_call import Fields, ForwardSupply, Supply, WeightsOf
from paramstore_client.hf.model.layer_weights import CPU, LayerWeights
from paramstore_client.hf.model.lease_window import Hint, Window
from paramstore_client.nn.weight_views import Identities
from paramstore_client.source import ExpertSource, load_ahead

PUSH_BYTES = 4 << 20
"""Bytes of gradients that wait for one push: each push is a round trip."""


AheadHint = Callable[[tuple[int, int], int], list[ExpertKey]]
"""((keys loaded ahead that had come, that had not), slots) -> keys to load ahead now."""


class _Gradients:
    """The gradients of one backward on their way out."""

    def __init__(self, source: ExpertSource) -> None:
        self._source = source
        fields = source.schema.gradient_fields() if source.schema.is_trainable else ()
        self._dtypes = {field.name: getattr(torch, field.dtype) for field in fields}
        self._waiting: dict[ExpertKey, dict[str, Tensor]] = {}
        self._waiting_bytes = 0
        self._partial: dict[ExpertKey, dict[str, Tensor]] = {}
        """Of experts of which not all fields have come."""

    def add(self, key: ExpertKey, gradients: Fields) -> None:
        """Takes gradients of one expert, and casts them to the dtype that is pushed; they leave once all its fields have come."""
        named = self._partial.pop(key, {})
        named |= {name: gradient.to(self._dtypes[name]) for name, gradient in gradients.items()}
        if len(named) < len(self._dtypes):
            self._partial[key] = named
            return
        self._waiting[key] = {name: named[name] for name in self._dtypes}
        self._waiting_bytes += sum(gradient.nbytes for gradient in named.values())
        if self._waiting_bytes >= PUSH_BYTES:
            self.flush()

    def flush(self) -> None:
        """Pushes what waits."""
        waiting, self._waiting, self._waiting_bytes = self._waiting, {}, 0
        if waiting:
            self._source.push(waiting)

    def finish(self) -> None:
        """Pushes what waits, as all have come."""
        assert not self._partial, "every field of every expert takes part in the kernel"
        self.flush()

    def drop(self) -> None:
        """Forgets what waits, and what has come in part."""
        self._waiting, self._waiting_bytes, self._partial = {}, 0, {}


class _LeasedSupply(Supply):
    """The part that both supplies share: the begin and end of a layer's backward."""

    def __init__(self, source: ExpertSource) -> None:
        self._gradients = _Gradients(source)

    def begin_backward(self) -> None:
        self.let_go()
        self._gradients.drop()

    def finish_backward(self) -> None:
        self.let_go()
        self._gradients.finish()


class StreamedSupply(_LeasedSupply):
    """Weights expert by expert: a holder is a position in `keys`.

    part_size: as for a Window.
    """

    def __init__(
        self,
        source: ExpertSource,
        keys: Sequence[ExpertKey],
        device: torch.device,
        *,
        forward_hint: Hint,
        backward_hint: Hint,
        part_size: int | None = None,
    ) -> None:
        super().__init__(source)
        self._keys = keys
        identities = Identities()
        self._forward = partial(Window, source, keys, identities, device=device, part_size=part_size, hint=forward_hint)
        self._backward = Window(
            source, keys, identities, device=device, part_size=part_size, hint=backward_hint, is_upward=False
        )

    @contextmanager
    def forward_pass(self) -> Iterator[WeightsOf]:
        with self._forward(is_upward=True) as window:
            yield window.weights

    def backward_weights(self, holder: int, /) -> Fields:
        return self._backward.weights(holder)

    def push(self, holder: Hashable, gradients: Fields, /) -> None:
        assert isinstance(holder, int), "a streamed holder is a position"
        self._gradients.add(self._keys[holder], gradients)

    def let_go(self) -> None:
        self._backward.release()


class FieldSupply(StreamedSupply):
    """Weights by expert and field, for a kernel that multiplies by one field of all experts after the other: a holder is (position
    in `keys`, name of the field)."""

    @contextmanager
    def forward_pass(self) -> Iterator[WeightsOf]:
        with super().forward_pass() as weights_of:
            yield lambda holder: {holder[1]: weights_of(holder[0])[holder[1]]}

    def backward_weights(self, holder: tuple[int, str], /) -> Fields:  # type: ignore[override]  # its holders are others
        return super().backward_weights(holder[0])

    def push(self, holder: Hashable, gradients: Fields, /) -> None:
        assert isinstance(holder, tuple), "a holder of one field has a name"
        super().push(holder[0], gradients)


def recorded_stacks(fields: Iterable[Field], weights_of: WeightsOf, count: int) -> dict[str, RecordedStack]:
    """Each of the fields of the `count` experts of a `FieldSupply`, in their order, with tensors that come from the graph."""

    def in_turn(name: str) -> Iterator[tuple[int, Tensor]]:
        for position in range(count):
            yield position, weights_of((position, name))[name]

    return RecordedStack.of_fields(fields, CPU, in_turn)


class CompactSupply(_LeasedSupply):
    """Weights side by side, [n, ...] per field; the only holder is None."""

    def __init__(
        self,
        source: ExpertSource,
        keys: Sequence[ExpertKey],
        device: torch.device,
        *,
        buffers: CompactBuffers,
        forward_hint: Hint,
        backward_hint: Hint,
    ) -> None:
        super().__init__(source)
        self._keys = keys
        self._device = device
        self._buffers = buffers
        # Upwards in both directions: all experts are there before the kernel starts.
        window = partial(Window, source, keys, Identities(), device=device, is_upward=True)
        self._forward, self._backward = partial(window, hint=forward_hint), partial(window, hint=backward_hint)
        self._held = ExitStack()
        self._weights: Fields | None = None

    @contextmanager
    def forward_pass(self) -> Iterator[WeightsOf]:
        with self._buffers.filled(self._forward(), len(self._keys), self._device) as weights:
            yield lambda holder: weights

    def backward_weights(self, holder: None, /) -> Fields:
        if self._weights is None:
            filled = self._buffers.filled(self._backward(), len(self._keys), self._device)
            self._weights = self._held.enter_context(filled)
        return self._weights

    def push(self, holder: Hashable, gradients: Fields, /) -> None:
        """Splits the gradients by expert, and pushes at once, as they are all there."""
        for position, key in enumerate(self._keys):
            self._gradients.add(key, {name: gradient[position] for name, gradient in gradients.items()})
        self._gradients.flush()

    def let_go(self) -> None:
        self._weights = None
        self._held.close()


class HeldSupply(ForwardSupply):
    """Weights where they lie, for a forward without a graph: those that stand or find a slot are leased until the kernel has run,
    and those on their way are computed with last. Where not all find one, the others pass by: the first field that the kernel
    multiplies by is used where it lies, and the others are copied. The only holder is None. Raises LeaseError in `forward_pass`,
    or when a weight is used, where others hold too many.

    is_streamed: whether the kernel takes expert after expert, in the order of `keys`. Then a holder is a position, and nothing is
    copied: what passes by is used until the next one is asked for. ahead: called once the experts were asked for.
    """

    def __init__(
        self, source: ExpertSource, keys: Sequence[ExpertKey], *, is_streamed: bool, buffers: CompactBuffers, ahead: AheadHint
    ) -> None:  # fmt: skip
        self._source = source
        self._keys = keys
        self._is_streamed = is_streamed
        self._buffers = buffers
        self._ahead = ahead

    @contextmanager
    def forward_pass(self) -> Iterator[WeightsOf]:
        keys, source = self._keys, self._source
        with source.acquire_arriving(keys, may_pass=True) as lease, ExitStack() as lent:
            load_ahead(source, self._ahead(lease.ahead, source.lease_slots))
            if self._is_streamed:
                yield lambda position: lease.turn_to(keys[position])
                return
            stacks: Any = LayerWeights(lease, keys, self._buffers, lent).stacks(source.schema.part("param").fields)
            yield lambda holder: stacks
