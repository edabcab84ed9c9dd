"""The ring memory of MoESys (SE-MoE, arXiv 2205.10034, section 3.3.2): a model larger than memory computes layer by layer.

Of L layers, K have a slot each: layer i computes from its slot while the slots of the next K - 1 load; when it is done
its slot takes layer i + K. After the last layer comes the first again, for the next token.

- A *turn* counts the layers visited, without end: turn t is layer t mod L in slot t mod K. A slot remembers its turn, and
  is proven to be the one meant at each use, so L need not be a multiple of K.
- On the CPU a slot is a lease on the host cache, without a copy, and loading ahead is a prefetch; on a CUDA device it is
  room in a `DeviceTier`. The ring itself knows no difference.
- Loading ahead never waits and never fails a visit, and demand never waits for more than what the layer needs.
- The ring turns once a visit has its weights: one that raises on entry has cost itself, and nothing else.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import cast

import torch
from torch import Tensor

from paramstore.clock import Clock, MonotonicClock
from paramstore.core.arguments import indices, whole_number, wrong
from paramstore.core.key import ExpertKey
from paramstore.core.location import Identity
from paramstore.core.schema import Schema
from paramstore.errors import CapacityError, ConfigError, LeaseError, ParamStoreError, UnknownKey
from paramstore_client.activity import Activity
from paramstore_client.device.tier import DeviceTier, device_of
from paramstore_client.device.visit_order import declare_ring
from paramstore_client.handle.base import plain_keys
from paramstore_client.source import AheadTicket, ExpertSource, HostSource, WeightLease

Experts = dict[int, Mapping[str, Tensor]]
"""expert -> {field: tensor}"""

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class RingStats:
    """Counts of one ring. A visit is a hit if its experts (of its first part) were there when it began, else it waited.

    wait_s: time in `acquire`, hits included. leased_bytes_max: most bytes leased at once; total_bytes: of all the layers.
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


@dataclass(slots=True)
class _LayerSlot:
    """The newest turn of a slot, and the load ahead of that turn."""

    turn: int
    keys: frozenset[ExpertKey]
    ticket: AheadTicket | None


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


class RingMemory:
    """A ring of `slots` layers over a namespace, visited in order, again and again. A context manager.

    device: where `layer` gives the weights. layers: the order of visits; default all, ascending. experts_ahead: experts
    that a slot loads ahead of its turn; default all where `slots` whole layers fit in what may be leased, else as many
    as fit, the likeliest by use so far. When it begins, a reader's namespace is told the order. Used by one thread. Owner of the
    turns, and of the `DeviceTier` it makes.

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
        self._closing = ExitStack()
        self._source = namespace
        if device_of(device).type != "cpu":
            room = slots * (self.experts if experts_ahead is None else experts_ahead)
            host = cast(HostSource, namespace)  # a device makes sense only in front of a namespace
            self._source = self._closing.enter_context(DeviceTier(host, room, device=device, policy="ring", layers=order))
        fitting = max(1, self._source.lease_slots // slots)
        self._experts_ahead = min(self.experts, fitting if experts_ahead is None else experts_ahead)
        self._clock: Clock = MonotonicClock() if clock is None else clock
        self._activity = Activity()
        self._slots: list[_LayerSlot] = []
        self._turn = -1
        self._last_key: ExpertKey | None = None
        self._visits: list[RingLease] = []
        """The leases of visits that are not over."""

    @property
    def lease_slots(self) -> int:
        """Keys that may be held leased at once."""
        return self._source.lease_slots

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
        declare_ring(self._source, self.layers)
        self._slots = [_LayerSlot(turn - self._slot_count, frozenset(), None) for turn in range(self._slot_count)]
        for turn in range(self._slot_count):
            self._load_ahead(turn)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for slot in self._slots:
            if slot.ticket is not None:
                slot.ticket.cancel()
        self._slots = []
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
                self._ask_ahead(layer, following)
                yield weights

    def acquire(self, keys: Sequence[ExpertKey], /, part: str = "param", timeout_s: float | None = None) -> RingLease:
        """Leases keys of one layer, as a visit of it. Later experts of the layer visited last are the next part of that visit."""
        keys = plain_keys(keys)
        if not keys:
            raise ConfigError("acquire of no keys: which layer a ring visits is known by its keys")
        continues = self._last_key is not None and self._last_key[0] == keys[0][0] and self._last_key[1] < keys[0][1]
        return self._begin_visit(keys[0][0], keys, is_first=not continues, part=part, timeout_s=timeout_s)

    def prefetch(self, keys: Sequence[ExpertKey], /, part: str = "param") -> AheadTicket:
        """Asks the namespace for `keys` ahead of use, beside what the ring itself loads."""
        return self._source.prefetch(keys, part=part)

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
        with self._begin_visit(layer, [(layer, expert) for expert in experts], is_first=is_first) as lease:
            yield {expert: lease[layer, expert] for expert in experts}

    def _begin_visit(
        self, layer: int, keys: Sequence[ExpertKey], *, is_first: bool, part: str = "param", timeout_s: float | None = None
    ) -> RingLease:
        """Begins a visit and returns its lease. Until the weights are there nothing changes; an interrupt after that ends it."""
        if not self._slots:
            raise LeaseError(f"layer {layer}: a ring is used inside its `with`")
        turn = self._turn_of(layer) if is_first else self._turn
        is_loaded = self._is_loaded(turn, keys)
        begun_s = self._clock.now_s()
        lease = self._source.acquire(keys, part=part, timeout_s=timeout_s)
        visit = RingLease(self, lease, turn, len(keys))
        self._visits.append(visit)
        try:
            self.stats.wait_s += self._clock.now_s() - begun_s
            self._last_key = keys[-1] if keys else None
            self.stats.leased_bytes_max = max(self.stats.leased_bytes_max, self._leased_keys * self._key_bytes)
            experts = [expert for _, expert in keys]
            if is_first:
                self._activity.record(layer, experts)
                self.stats.hits += is_loaded
                self.stats.waits += not is_loaded
                self._turn_to(turn)
            else:
                self._activity.add(layer, experts)
        except BaseException:
            visit.release()
            raise
        return visit

    def end_visit(self, visit: RingLease) -> None:
        """Ends the visit of a RingLease, which has released its keys; its slot takes the layer that comes around next."""
        self._visits.remove(visit)
        if self._slots:
            self._load_ahead(visit.turn + self._slot_count)

    # --- turns ---

    def _turn_of(self, layer: int) -> int:
        """The next turn of `layer`. Raises LeaseError where its slot is that of a visit which is not over."""
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
        """Notes that the visit of `turn` has begun; the slots of skipped turns are given to the turns that come around next."""
        skipped = range(self._turn + 1, turn)
        self._turn = turn
        self.stats.skipped_turns += len(skipped)
        for other in skipped:
            self._load_ahead(other + self._slot_count)

    def _load_ahead(self, turn: int) -> None:
        """Gives its slot to `turn`, unless a later turn has it, and starts the load of the experts that `turn` will likely need."""
        slot = self._slots[turn % self._slot_count]
        if slot.turn >= turn:
            return
        if slot.ticket is not None and not slot.ticket.done():
            slot.ticket.cancel()
        layer = self.layers[turn % len(self.layers)]
        experts = self._sorted(None) if self._experts_ahead == self.experts else self._likely(layer)
        slot.turn, slot.keys, slot.ticket = turn, frozenset((layer, expert) for expert in experts), None
        slot.ticket = self._ask_ahead(layer, experts)

    def _ask_ahead(self, layer: int, experts: Sequence[int]) -> AheadTicket | None:
        try:
            return self._source.prefetch([(layer, expert) for expert in experts]) if experts else None
        except ParamStoreError as error:  # demand will ask again and raise the error where it matters
            _log.warning("%d experts of layer %d could not be loaded ahead: %s", len(experts), layer, error)
            return None

    def _likely(self, layer: int) -> list[int]:
        """The experts worth loading ahead, most used first; none before the first visit, when a guess would mostly be waste."""
        return list(self._activity.likely(layer, self._experts_ahead))

    def _is_loaded(self, turn: int, keys: Sequence[ExpertKey]) -> bool:
        """Whether the bytes of `keys` are there now: in slots on a device, or on the host, if the load ahead has brought them."""
        if isinstance(self._source, DeviceTier):
            return self._source.has(keys)
        slot = self._slots[turn % self._slot_count]
        return slot.turn == turn and slot.ticket is not None and slot.keys.issuperset(keys) and _brought_all(slot.ticket)


def _brought_all(ticket: AheadTicket) -> bool:
    """Whether a load ahead is done, and nothing of it is known to have been skipped for want of room."""
    if not ticket.done():
        return False
    outcome = getattr(ticket, "wait", None)  # a prefetch into host memory tells what it skipped
    try:
        return outcome is None or not outcome()["skipped"]
    except ParamStoreError:  # demand asks again, and raises it where it matters
        return False
