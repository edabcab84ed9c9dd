"""A namespace in memory, for tests of code that stands on the client: same calls, same refusals, no daemon.

- `acquire` refuses as the service does: CapacityError above `lease_slots` and what was lent (`loans`), LeaseError where own leases
  stand in the way.
- Every lease gets its own slots: one mapping per key, fields at the schema's offsets. A release checks that nobody wrote into
  them, and fills them with NaN (or the largest integer), so that use after release is seen; those who asked for it
  (`before_unmap`) are told of them then.
- `apply` is torch's own fused optimizer on fp32 masters and states, over the keys that were pushed; it counts their version.
- `events` lists acquire, release, prefetch, push and apply with their keys, in the order they happened.
"""

from __future__ import annotations

import mmap
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from types import TracebackType

import numpy
import torch
from torch import Tensor

from paramstore.core.key import ExpertKey, KeySpace
from paramstore.core.location import Identity
from paramstore.core.optimizers import Options
from paramstore.core.schema import Field, Part, Schema
from paramstore.errors import CapacityError, LeaseError, ParamStoreError, SchemaMismatch, StoreUnavailable, UnknownKey
from paramstore.optim.rule import Step
from paramstore.optim.update import RULES
from paramstore.testing.memory_loans import MemoryLoans
from paramstore_client.handle.parts_lease import PartsLease
from paramstore_client.source import LeaseKeeper

EVENTS_MAX = 100_000

Fields = dict[str, Tensor]


@dataclass(slots=True)
class _Moments:
    """State that the optimizer keeps of one expert: its steps, and flat states by field."""

    count: int
    states: dict[str, tuple[Tensor, ...]]

    @classmethod
    def of(cls, options: Options, masters: Fields) -> _Moments:
        zeros = {name: tuple(torch.zeros(master.numel()) for _ in options.states) for name, master in masters.items()}
        return cls(0, zeros)


class MemoryTicket:
    """A prefetch. It is done at once, unless the namespace holds prefetches back."""

    def __init__(self, keys: Sequence[ExpertKey], *, is_done: bool) -> None:
        self.keys = tuple(keys)
        self.is_done = is_done
        self.is_cancelled = False
        self.skipped = 0
        """Of the keys, the last so many had no room."""
        self.error: ParamStoreError | None = None

    def done(self) -> bool:
        return self.is_done

    def wait(self, timeout_s: float | None = None) -> dict[str, int]:
        self.is_done = True
        if self.error is not None:
            raise self.error
        return {"loaded": len(self.keys) - self.skipped, "resident": 0, "skipped": self.skipped, "bytes": 0}

    def cancel(self) -> bool:
        self.is_cancelled = not self.is_done
        return self.is_cancelled


class MemoryLeaseTicket:
    """An acquire under way: it takes effect when it is waited for."""

    def __init__(self, lease: Callable[[], MemoryLease]) -> None:
        self._lease = lease
        self._made: MemoryLease | None = None
        self._lock = threading.Lock()

    @property
    def is_settled(self) -> bool:
        return self._made is not None

    def done(self) -> bool:
        return self.is_settled

    def wait(self) -> MemoryLease:
        with self._lock:
            if self._made is None:
                self._made = self._lease()
            return self._made

    def abandon(self) -> None:
        if self._made is not None:
            self._made.release()


class MemoryLease:
    """A lease with its own copies of some keys' part, which are spoiled at release."""

    def __init__(self, namespace: MemoryNamespace, keys: tuple[ExpertKey, ...], part: Part) -> None:
        self._namespace = namespace
        self._keys = keys
        self._part = part
        self._identities = {key: namespace.identity(key) for key in keys}
        self.buffers = {key: numpy.frombuffer(mmap.mmap(-1, part.image_bytes), dtype=numpy.uint8) for key in keys}
        with torch.inference_mode(False):  # as the service's: they may outlive such a block
            self._fields = {key: _views(buffer, part) for key, buffer in self.buffers.items()}
            for key, fields in self._fields.items():
                for name, tensor in fields.items():
                    tensor.copy_(namespace.values(key, part.name)[name])
        self._images = {key: buffer.tobytes() for key, buffer in self.buffers.items()}
        self.is_released = False
        self.absent_count = len(namespace.evicted.intersection(keys))
        namespace.evicted.difference_update(keys)

    def __getitem__(self, key: ExpertKey) -> Mapping[str, Tensor]:
        if self.is_released:
            raise LeaseError(f"lease of {len(self._keys)} keys was released: acquire {key} again")
        if key not in self._fields:
            raise UnknownKey(f"key {key} is not in this lease of {len(self._keys)} keys")
        return self._fields[key]

    def identity(self, key: ExpertKey) -> Identity:
        return self._identities[key]

    def keys(self) -> list[ExpertKey]:
        return list(self._keys)

    def release(self) -> None:
        if self.is_released:
            return
        self.is_released = True
        written = [key for key, buffer in self.buffers.items() if buffer.tobytes() != self._images[key]]
        for fields in self._fields.values():
            for tensor in fields.values():
                tensor.fill_(torch.nan if tensor.is_floating_point() else _largest(tensor.dtype))
        self._fields = {}
        self._namespace.settle_release(self)
        assert not written, f"somebody wrote into leased tensors of {written}"

    def __enter__(self) -> MemoryLease:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.release()


class MemoryNamespace:
    """A writing handle on experts held in this process. Owner of their masters, moments and pending gradients.

    holds_prefetches: tickets stay open until `finish_prefetches`.
    """

    def __init__(
        self, schema: Schema, *, layers: int | Sequence[int], experts: int, lease_slots: int, holds_prefetches: bool = False
    ) -> None:
        self.schema = schema
        self.space = KeySpace.of(layers, experts)
        self.lease_slots = lease_slots
        self.holds_prefetches = holds_prefetches
        self.events: list[tuple[str, tuple[ExpertKey, ...]]] = []
        self.tickets: list[MemoryTicket] = []
        self.leased: list[MemoryLease] = []
        self.leased_keys_max = 0
        self.pending: dict[ExpertKey, Fields] = {}
        self.keepers: weakref.WeakSet[LeaseKeeper] = weakref.WeakSet()
        self.may_stand = True
        self.loans = MemoryLoans()
        self.is_closed = False
        self.evicted: set[ExpertKey] = set()
        """Keys whose next lease says that it had to wait for their bytes."""
        self.device_reports: list[tuple[list[ExpertKey], list[ExpertKey], int]] = []
        self.view_change_count = 0
        self.watchers: dict[object, Callable[[int, int], None]] = {}
        self._masters: dict[ExpertKey, Fields] = {}
        self._moments: dict[ExpertKey, _Moments] = {}
        self._versions: dict[ExpertKey, int] = {}

    @classmethod
    def of_swiglu(
        cls,
        *,
        layers: int | Sequence[int] = 2,
        experts: int = 6,
        hidden: int = 8,
        inner: int = 12,
        lease_slots: int = 64,
        param_dtype: object = "float32",
        is_trainable: bool = True,
        seed: int = 0,
    ) -> MemoryNamespace:
        """Makes one with random experts of the fields `gate_up` and `down`; equal arguments give equal experts."""
        shapes = {"gate_up": (2 * inner, hidden), "down": (hidden, inner)}
        if is_trainable:
            schema = Schema.adamw(shapes, param_dtype=param_dtype)
        else:
            schema = Schema.param({name: (shape, param_dtype) for name, shape in shapes.items()})
        generator = torch.Generator().manual_seed(seed)
        namespace = cls(schema, layers=layers, experts=experts, lease_slots=lease_slots)
        namespace.initialize(lambda key: {n: torch.randn(shape, generator=generator) * 0.3 for n, shape in shapes.items()})
        return namespace

    @property
    def layers(self) -> tuple[int, ...]:
        return self.space.layers

    @property
    def experts(self) -> int:
        return self.space.experts

    @property
    def leased_key_count(self) -> int:
        return sum(len(lease.keys()) for lease in self.leased)

    def initialize(self, fn: Callable[[ExpertKey], Mapping[str, Tensor]]) -> None:
        """Sets every expert to the values that `fn(key)` gives, version 0."""
        for key in self.space:
            fields = {f.name: getattr(torch, f.dtype) for f in self.schema.initial_fields()}
            given = fn(key)
            self._masters[key] = {name: given[name].detach().to(dtype).contiguous().clone() for name, dtype in fields.items()}
            self._moments.pop(key, None)
            self._versions[key] = 0

    def identity(self, key: ExpertKey) -> Identity:
        return Identity(epoch=0, version=self._versions[key])

    def values(self, key: ExpertKey, part: str = "param") -> Fields:
        """Gives the part's fields as the store holds them; not a lease."""
        fields = self.schema.part(part).fields
        return {field.name: self._masters[key][field.name].detach().to(getattr(torch, field.dtype)) for field in fields}

    def acquire(self, keys: Sequence[ExpertKey], part: str = "param", timeout_s: float | None = None) -> MemoryLease:
        """Leases all keys or none, as the service does."""
        wanted = tuple((layer, expert) for layer, expert in keys)
        self.space.check(wanted, namespace="memory")
        most = self.lease_slots + self.loans.count
        if len(wanted) > most:
            raise CapacityError(f"{len(wanted)} keys asked, this session may lease lease_slots={self.lease_slots}")
        if self.leased_key_count + len(wanted) > most:
            raise LeaseError(f"{len(wanted)} keys asked, own leases hold {self.leased_key_count} of {most}: release them first")
        lease = MemoryLease(self, wanted, self.schema.part(part))
        self.leased.append(lease)
        self.leased_keys_max = max(self.leased_keys_max, self.leased_key_count)
        self._note("acquire", wanted)
        return lease

    def begin_acquire(self, keys: Sequence[ExpertKey], part: str = "param", timeout_s: float | None = None) -> MemoryLeaseTicket:
        return MemoryLeaseTicket(partial(self.acquire, list(keys), part, timeout_s))

    def together(self) -> AbstractContextManager[None]:
        """Nothing is sent here."""
        return nullcontext()

    def acquire_arriving(
        self, keys: Sequence[ExpertKey], timeout_s: float | None = None, *, may_pass: bool = False
    ) -> PartsLease:
        return PartsLease(self, keys, timeout_s=timeout_s, may_pass=may_pass)

    def let_stand(self, keeper: LeaseKeeper) -> MemoryLoans | None:
        """Notes who keeps leases, unless `may_stand` is false."""
        if not self.may_stand:
            return None
        self.keepers.add(keeper)
        return self.loans

    def check_usable(self) -> None:
        """Raises StoreUnavailable after `close`."""
        if self.is_closed:
            raise StoreUnavailable("the store was closed by this client")

    def close(self) -> None:
        """Ends the session as a store's close does: keepers let go of what nobody uses, first."""
        for keeper in list(self.keepers):
            keeper.let_go()
        self.is_closed = True

    def settle_release(self, lease: MemoryLease) -> None:
        """Forgets a lease that MemoryLease has ended."""
        self.leased.remove(lease)
        for buffer in lease.buffers.values():
            for tell in self.watchers.values():
                tell(buffer.ctypes.data, buffer.nbytes)
        self._note("release", tuple(lease.keys()))

    def prefetch(self, keys: Sequence[ExpertKey], part: str = "param", deadline_s: float | None = None) -> MemoryTicket:
        self.space.check(keys, namespace="memory")
        self.tickets.append(MemoryTicket(keys, is_done=not self.holds_prefetches))
        self._note("prefetch", tuple(keys))
        return self.tickets[-1]

    def finish_prefetches(self) -> None:
        for ticket in self.tickets:
            ticket.is_done = True

    def push(self, gradients: Mapping[ExpertKey, Mapping[str, Tensor]]) -> None:
        """Adds into the pending gradients, in the gradient dtype."""
        fields = self.schema.gradient_fields() if self.schema.is_trainable else ()
        if not fields:
            raise SchemaMismatch("a param schema has no gradients")
        self.space.check(gradients, namespace="memory")
        for key, values in gradients.items():
            for field in fields:
                self._check_gradient(key, field, values)
            for field in fields:
                self._add(key, field.name, values[field.name])
        self._note("push", tuple(gradients))

    def apply(self, options: Options, grad_scale: float = 1.0) -> MemoryTicket:
        """Runs the optimizer over everything pending, and forgets it."""
        self.schema.check_options(options)
        for key, gradients in self.pending.items():
            self._update(key, {name: (gradient * grad_scale).float() for name, gradient in gradients.items()}, options)
            self._versions[key] += 1
        self._note("apply", tuple(self.pending))
        self.pending = {}
        self.view_change_count += 1
        return MemoryTicket((), is_done=True)

    def before_unmap(self, fn: Callable[[int, int], None]) -> Callable[[], object]:
        """Calls fn(address, length_bytes) for each key's slot at its release. Returns the function that ends this."""
        token = object()
        self.watchers[token] = fn
        return lambda: self.watchers.pop(token, None)

    def report_device(self, resident: Sequence[ExpertKey], touched: Sequence[ExpertKey], bytes_resident: int) -> None:
        self.device_reports.append((list(resident), list(touched), bytes_resident))

    def happened(self, *kinds: str) -> Iterator[tuple[str, tuple[ExpertKey, ...]]]:
        """Yields the events of these kinds, in order."""
        return (event for event in self.events if event[0] in kinds)

    def _update(self, key: ExpertKey, gradients: Fields, options: Options) -> None:
        masters = self._masters[key]
        moments = self._moments.setdefault(key, _Moments.of(options, masters))
        moments.count += 1
        made = Step(options, moments.count, torch.tensor(float(moments.count)), is_missed=False)
        for name, master in masters.items():
            RULES[options.kind](master.view(-1), gradients[name].reshape(-1), moments.states[name], made)

    def _add(self, key: ExpertKey, name: str, gradient: Tensor) -> None:
        pending = self.pending.setdefault(key, {})
        if name in pending:
            pending[name] += gradient.detach().cpu()
        else:
            pending[name] = gradient.detach().cpu().clone()

    def _check_gradient(self, key: ExpertKey, field: Field, values: Mapping[str, Tensor]) -> None:
        gradient = values.get(field.name)
        if gradient is None or tuple(gradient.shape) != field.shape or str(gradient.dtype) != f"torch.{field.dtype}":
            seen = "nothing" if gradient is None else f"{tuple(gradient.shape)} {gradient.dtype}"
            raise SchemaMismatch(f"key {key}, field {field.name!r}: got {seen}, the schema has {field.shape} {field.dtype}")

    def _note(self, kind: str, keys: tuple[ExpertKey, ...]) -> None:
        assert len(self.events) < EVENTS_MAX, "a test that does so much should clear `events`"
        self.events.append((kind, keys))


def _views(buffer: numpy.ndarray[tuple[int], numpy.dtype[numpy.uint8]], part: Part) -> Fields:
    """Makes the part's fields over one image."""
    image = torch.from_numpy(buffer)
    return {
        field.name: image[field.offset_bytes : field.offset_bytes + field.length_bytes]
        .view(getattr(torch, field.dtype))
        .view(field.shape)
        for field in part.fields
    }


def _largest(dtype: torch.dtype) -> int:
    return 1 if dtype == torch.bool else int(torch.iinfo(dtype).max)
