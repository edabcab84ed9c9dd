"""The ring memory of MoESys (SE-MoE, arXiv 2205.10034, section 3.3.2): a model larger than memory computes layer by layer.

Of L layers, K have room: while one computes the next K - 1 load; when it is done its room goes to the Kth after it. After the last
layer comes the first again, for the next token.

- A *turn* counts the layers visited, without end: turn t is layer t mod L. A visit that would need the room of one that is not over
  is refused, so L need not be a multiple of K.
- Slots hold single experts, and what stands, loads and goes is decided by a `SlotPlan` with the policy `ring`: on the CPU a slot is
  a lease that stands (`HostSlots`), on a device memory (`DeviceTier`). In the paper a slot holds a layer.
- Loading ahead never waits and never fails a visit, and demand never waits for more than what the layer needs.
- The ring turns once a visit has its weights: one that raises on entry has cost itself, and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import TypeVar

import torch
from torch import Tensor

from paramstore.clock import Clock, MonotonicClock
from paramstore.core.arguments import indices, text, whole_number, wrong
from paramstore.core.key import ExpertKey
from paramstore.core.location import Identity
from paramstore.core.schema import Schema
from paramstore.errors import CapacityError, ConfigError, LeaseError, UnknownKey
from paramstore.policy.slot_visit import SlotCounts
from paramstore_client.activity import Activity
from paramstore_client.device.slot_cache import open_slots
from paramstore_client.device.tier import device_of
from paramstore_client.device.visit_order import declare_ring
from paramstore_client.handle.base import plain_keys
from paramstore_client.source import AheadTicket, ArrivingLease, ExpertSource, HostSource, SlotSource, WeightLease, load_ahead

Experts = dict[int, Mapping[str, Tensor]]
"""expert -> {field: tensor}"""

L = TypeVar("L", bound=WeightLease)
V = TypeVar("V", bound="RingLease")


@dataclass(slots=True)
class RingStats:
    """Counts of one ring. A visit is a hit if all its experts (of its first part) were there when it began, else it waited.

    wait_s: time in `acquire`, hits included, and for keys to come in turn. leased_bytes_max: most bytes that visits under way held;
    total_bytes: of all layers.
    """

    hits: int = 0
    waits: int = 0
    wait_s: float = 0.0
    skipped_turns: int = 0
    leased_bytes_max: int = 0
    total_bytes: int = 0

    @property
    def resident_fraction(self) -> float:
        """Largest fraction of all experts' bytes that the computation held at once."""
        return self.leased_bytes_max / self.total_bytes


class RingLease:
    """One visit's lease; its release lets the ring load ahead."""

    def __init__(self, ring: RingMemory, lease: WeightLease, turn: int, key_count: int) -> None:
        self.turn = turn
        self.key_count = key_count
        self._ring = ring
        self._lease = lease
        self._is_released = False

    def __getitem__(self, key: ExpertKey, /) -> Mapping[str, Tensor]:
        return self._lease[key]

    def identity(self, key: ExpertKey, /) -> Identity:
        return self._lease.identity(key)

    def release(self) -> None:
        if not self._is_released:
            self._is_released = True
            self._lease.release()
            self._ring.end_visit(self)

    def __enter__(self) -> RingLease:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.release()


class ArrivingRingLease(RingLease):
    """One visit's lease that keys arrive at and pass by, as its source has it."""

    def __init__(self, ring: RingMemory, lease: ArrivingLease, turn: int, key_count: int) -> None:
        super().__init__(ring, lease, turn, key_count)
        self._arriving = lease

    @property
    def passing_count(self) -> int:
        return self._arriving.passing_count

    @property
    def ahead(self) -> tuple[int, int]:
        return self._arriving.ahead

    def passes(self, key: ExpertKey) -> bool:
        return self._arriving.passes(key)

    def in_turn(self) -> Iterator[ExpertKey]:
        turns = self._arriving.in_turn()
        while True:
            with self._ring.waiting():
                key = next(turns, None)
            if key is None:
                return
            yield key

    def turn_to(self, key: ExpertKey, /) -> Mapping[str, Tensor]:
        with self._ring.waiting():
            return self._arriving.turn_to(key)

    def __enter__(self) -> ArrivingRingLease:
        return self


class RingMemory:
    """A ring of `slots` layers over a namespace, visited in order, again and again. A context manager.

    device: where `layer` gives the weights. layers: the order of visits; default all, ascending. experts_ahead: experts
    of a layer that are loaded ahead of its turn; default all where `slots` whole layers fit in what may be leased, else as many
    as fit, the likeliest by use so far. Over a source that is no namespace the slots are that source's, and hits are told where it
    counts them. When it begins, a reader's namespace is told the order. Used by one thread. Owner of the turns, and of the slots
    in front of a namespace.

        with ps.RingMemory(ns, slots=2) as ring:
            for token in range(count):
                for layer in range(L):
                    active = route(layer, x)                  # sorted expert indices, or None for all
                    with ring.layer(layer, active) as experts:
                        x = compute(x, experts)               # {expert: {field: tensor}}

    A model built on `StoredExperts` generates through it unchanged, since a ring is an `ExpertSource`:

        with ps.RingMemory(ns, slots=2) as ring, torch.no_grad():
            model = Model([ps.nn.StoredExperts(ring, layer) for layer in range(L)])
            model.generate(prompt)

    Train with `ExpertSchedule` instead: a backward visits layers against the ring's direction, where the ring stays right
    but loads ahead in vain.
    """

    def __init__(
        self,
        namespace: ExpertSource,
        slots: int,
        *,
        device: torch.device | str = "cpu",
        layers: Sequence[int] | None = None,
        experts_ahead: int | None = None,
        clock: Clock | None = None,
    ) -> None:
        if not isinstance(namespace, ExpertSource):
            raise wrong("namespace", namespace, "an open namespace, or a DeviceTier over one")
        order = indices("layers", namespace.layers if layers is None else layers)
        if not order or len(set(order)) != len(order) or not set(order) <= set(namespace.layers):
            raise wrong("layers", layers, f"distinct layers of the namespace, which has {list(namespace.layers)}")
        slots = whole_number("slots", slots, least=1)
        experts_ahead = None if experts_ahead is None else whole_number("experts_ahead", experts_ahead, least=1)
        self.schema: Schema = namespace.schema
        self.layers = order
        self.experts: int = namespace.experts
        self.stats = RingStats(total_bytes=len(order) * namespace.experts * self._key_bytes)
        self._slot_count = slots
        self._namespace = namespace
        self._closing = ExitStack()
        self._source: ExpertSource = namespace
        device = device_of(device)
        if device.type != "cpu" or isinstance(namespace, HostSource):
            per_layer = self.experts if experts_ahead is None or device.type == "cpu" else experts_ahead
            cache = open_slots(namespace, slots * per_layer, device=device, policy="ring", layers=order)
            self._source = self._closing.enter_context(closing(cache))
        fitting = max(1, self._source.lease_slots // slots)
        self._experts_ahead = min(self.experts, fitting if experts_ahead is None else experts_ahead)
        self._clock: Clock = MonotonicClock() if clock is None else clock
        self._activity = Activity()
        self._is_open = self._is_over = False
        self._turn = -1
        self._ahead_turn = -1
        """The last turn that was asked for ahead."""
        self._last_key: ExpertKey | None = None
        self._visits: list[RingLease] = []
        """The leases of visits that are not over."""

    @property
    def lease_slots(self) -> int:
        """Keys that may be held leased at once."""
        return self._source.lease_slots

    @property
    def counts(self) -> SlotCounts:
        """Keys of all visits since the slots were made: hits, what was loaded, ahead and not, and what went. A load moves one
        expert's `param` image, or on the CPU nothing where the daemon still has it. Zeros where the source counts nothing."""
        return self._source.counts if isinstance(self._source, SlotSource) else SlotCounts()

    @property
    def _key_bytes(self) -> int:
        return self.schema.part("param").image_bytes

    @property
    def _leased_keys(self) -> int:
        return sum(visit.key_count for visit in self._visits)

    def __repr__(self) -> str:
        where = f"at layer {self.layers[self._turn % len(self.layers)]}, holding {self._leased_keys} keys"
        ring = f"{len(self.layers)} layers in {self._slot_count} slots"
        return f"<RingMemory of {ring}, {where if self._turn >= 0 else 'before its first visit'}>"

    def __enter__(self) -> RingMemory:
        if self._is_over:
            raise LeaseError(f"{self!r} has ended, and its slots with it: make another ring")
        declare_ring(self._namespace, self.layers)
        self._is_open = True
        self._load_ahead(self._turn + self._slot_count)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._is_open, self._is_over = False, True
        self._closing.close()

    # --- visits ---

    def layer(self, layer: int, experts: Sequence[int] | None = None) -> AbstractContextManager[Experts]:
        """The weights of `layer`, for all its experts or (where the routing is known) for those given; waits until they are there.

        Leaving the block releases them and starts the next load. Raises CapacityError where they exceed `lease_slots`.
        """
        return self._visit(layer, self._sorted(experts), is_first=True)

    def parts(self, layer: int, experts: Sequence[int] | None = None) -> Iterator[Experts]:
        """The weights of `layer` part by part in expert order, each valid until the next is asked for: for layers that exceed
        `lease_slots`, or to hold less at once."""
        wanted = self._sorted(experts)
        for start in range(0, len(wanted), self._experts_ahead):
            part = wanted[start : start + self._experts_ahead]
            with self._visit(layer, part, is_first=start == 0) as weights:
                following = wanted[start + len(part) : start + 2 * len(part)][: self.lease_slots - len(part)]
                load_ahead(self._source, [(layer, expert) for expert in following])
                yield weights

    def acquire(self, keys: Sequence[ExpertKey], /, part: str = "param", timeout_s: float | None = None) -> RingLease:
        """Leases keys of one layer, as a visit of it. Later experts of the layer visited last are the next part of that visit."""
        keys, part = plain_keys(keys), text("part", part)
        acquire = partial(self._source.acquire, keys, part=part, timeout_s=timeout_s)
        return self._begin_visit(keys, acquire, RingLease, is_first=not self._continues(keys))

    def acquire_arriving(
        self, keys: Sequence[ExpertKey], /, timeout_s: float | None = None, *, may_pass: bool = False
    ) -> ArrivingRingLease:
        """Leases keys of one layer, as a visit of it, and waits for as few as it can. may_pass: any number of keys; those beyond
        what fits pass by while the lease is gone through (`in_turn`)."""
        keys = plain_keys(keys)
        acquire = partial(self._source.acquire_arriving, keys, timeout_s, may_pass=may_pass)
        return self._begin_visit(keys, acquire, ArrivingRingLease, is_first=not self._continues(keys))

    def _continues(self, keys: Sequence[ExpertKey]) -> bool:
        if not keys:
            raise ConfigError("acquire of no keys: which layer a ring visits is known by its keys")
        return self._last_key is not None and self._last_key[0] == keys[0][0] and self._last_key[1] < keys[0][1]

    def prefetch(self, keys: Sequence[ExpertKey], /, part: str = "param") -> AheadTicket:
        """Asks the namespace for `keys` ahead of use, beside what the ring itself loads."""
        return self._source.prefetch(keys, part=text("part", part))

    def push(self, gradients: Mapping[ExpertKey, Mapping[str, Tensor]], /) -> object:
        """Hands the gradients to the namespace."""
        return self._source.push(gradients)

    def _sorted(self, experts: Sequence[int] | None) -> list[int]:
        return list(range(self.experts)) if experts is None else sorted(set(indices("experts", experts)))

    @contextmanager
    def _visit(self, layer: int, experts: Sequence[int], *, is_first: bool) -> Iterator[Experts]:
        layer = whole_number("layer", layer)
        if len(experts) > max(1, self.lease_slots):  # not even one: `acquire` tells why
            raise CapacityError(
                f"layer {layer}: {len(experts)} experts asked, {self.lease_slots} may be leased at once; iterate "
                f"ring.parts({layer}) instead"
            )
        keys = [(layer, expert) for expert in experts]
        acquire = partial(self._source.acquire, keys)
        with self._begin_visit(keys, acquire, RingLease, is_first=is_first, layer=layer) as lease:
            yield {expert: lease[layer, expert] for expert in experts}

    def _begin_visit(
        self, keys: Sequence[ExpertKey], acquire: Callable[[], L], make: Callable[[RingMemory, L, int, int], V], *, is_first: bool,
        layer: int | None = None,
    ) -> V:  # fmt: skip
        """Begins a visit and returns its lease. Until the weights are there nothing changes; an interrupt after that ends it.
        layer: default that of the keys."""
        layer = keys[0][0] if layer is None else layer
        if not self._is_open:
            raise LeaseError(f"layer {layer}: a ring is used inside its `with`")
        turn = self._turn_of(layer) if is_first else self._turn
        hits = self.counts.hits
        with self.waiting():
            lease = acquire()
        is_hit = self.counts.hits == hits + len(set(keys))
        visit = make(self, lease, turn, min(len(keys), self.lease_slots))
        self._visits.append(visit)
        try:
            self._last_key = keys[-1] if keys else None
            self.stats.leased_bytes_max = max(self.stats.leased_bytes_max, self._leased_keys * self._key_bytes)
            experts = [expert for _, expert in keys]
            if is_first:
                self._activity.record(layer, experts)
                self.stats.hits += is_hit
                self.stats.waits += not is_hit
                self._turn_to(turn)
            else:
                self._activity.add(layer, experts)
        except BaseException:
            visit.release()
            raise
        return visit

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Counts the time inside as waited for weights, unless it raises."""
        begun_s = self._clock.now_s()
        yield
        self.stats.wait_s += self._clock.now_s() - begun_s

    def end_visit(self, visit: RingLease) -> None:
        """Ends the visit of a RingLease, which has released its keys; its room goes to the layer that comes around next."""
        self._visits.remove(visit)
        if self._is_open:
            self._load_ahead(visit.turn + self._slot_count)

    # --- turns ---

    def _turn_of(self, layer: int) -> int:
        """The next turn of `layer`. Raises LeaseError where its room is that of a visit which is not over."""
        if layer not in self.layers:
            raise UnknownKey(f"layer {layer} is not in the ring; it has {list(self.layers)}")
        here = self._turn + 1
        turn = here + (self.layers.index(layer) - here) % len(self.layers)
        oldest = min((visit.turn for visit in self._visits), default=turn)
        if oldest <= turn - self._slot_count:
            raise LeaseError(
                f"layer {layer}: its slot still holds layer {self.layers[oldest % len(self.layers)]}, which was not left; leave a "
                f"layer before entering the {self._slot_count}th after it"
            )
        return turn

    def _turn_to(self, turn: int) -> None:
        """Notes that the visit of `turn` has begun; the room of skipped turns goes to those that come around next."""
        skipped = range(self._turn + 1, turn)
        self._turn = turn
        self.stats.skipped_turns += len(skipped)
        if skipped:
            if isinstance(self._source, SlotSource):
                self._source.skip([self.layers[other % len(self.layers)] for other in skipped])
            self._load_ahead(turn - 1 + self._slot_count)

    def _load_ahead(self, last: int) -> None:
        """Asks for the experts that the turns up to `last` will likely need, as far as they were not asked for before."""
        first = max(self._ahead_turn + 1, last - self._slot_count + 1)
        self._ahead_turn = max(self._ahead_turn, last)
        for turn in range(first, last + 1):
            layer = self.layers[turn % len(self.layers)]
            is_whole = self._experts_ahead == self.experts
            # Likely ones, most used first: none before the first visit, when a guess would mostly be waste.
            experts = range(self.experts) if is_whole else self._activity.likely(layer, self._experts_ahead)
            load_ahead(self._source, [(layer, expert) for expert in experts])
