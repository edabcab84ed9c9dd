"""Which records are hot: a pure decision over how much each record of a namespace is used.

The records are ranked by their heat, equals by their keys. As many of the hottest as fit go to the fastest class of volumes, as
many of the next to the next class, and the others to the slowest. Records that are not used at all prefer no class while faster
ones have room beyond all that are used, else the slowest. Given numbers are ranked once, all of them.

What a policy counts changes all the time: of a large namespace some records are ranked for all, so that about as many records as
one of these stands for may be off at the border of two classes. The hottest, which the policy keeps in memory, are read from a
volume least: as many of them as memory has slots come after all others that are used.
"""

from __future__ import annotations

import sys
from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from paramstore.core.arguments import number
from paramstore.core.key import ExpertKey, KeySpace
from paramstore.core.trace import Trace, TraceEventKind
from paramstore.errors import ConfigError, ProtocolError

SAMPLE_KEYS = 1024
"""The most records that are ranked on the event loop, in 1 to 3 us each."""
SPREAD = 2_654_435_769
"""A prime near 2^32 over the golden ratio: its multiples modulo the number of keys lie evenly among them (Knuth, TAOCP 3, 6.4)."""
HEAT_BYTES = 4
HOTTEST = (1 << 8 * HEAT_BYTES) - 1
"""The packed heat of the hottest record."""

Rank = tuple[float, int, int]
Order = tuple[bool, float, int, int]
"""Whether a record is read from a volume, as it does not stand in memory, and its rank."""
EVERY_USED: Order = (False, 0.0, 0, 0)
"""A place below that of each record that is used at all."""
Heat = Callable[[ExpertKey], float]
"""How much a record is used, 0 for not at all; comparable within one namespace."""
Copies = Callable[[ExpertKey], int]
"""How many extents a record takes on volumes: of each step at which it has other bytes, one."""


@dataclass(frozen=True, slots=True)
class Ranking:
    """The least place of each speed class but the slowest, falling; None for a class that takes nothing. unused: the class of
    records that are not used, None for any. standing: the least rank of those that stand in memory; None if there are none."""

    least: tuple[Order | None, ...]
    unused: int | None
    standing: Rank | None

    def class_of(self, key: ExpertKey, heat: float) -> int | None:
        """The speed class that the record's next extent should be of; None for any."""
        if not heat > 0.0:
            return self.unused
        place = _place(_rank(key, heat), self.standing)
        for speed_class, least in enumerate(self.least):
            if least is not None and place >= least:
                return speed_class
        return len(self.least)


@dataclass(frozen=True, slots=True, weakref_slot=True)
class GivenHeat:
    """Heat that somebody gave: of each key that has any, and the ranks of these keys, falling."""

    heats: Mapping[ExpertKey, float]
    ranks: Sequence[Rank]

    def heat(self, key: ExpertKey) -> float:
        return self.heats.get(key, 0.0)

    @classmethod
    def of(cls, heats: Mapping[ExpertKey, float]) -> GivenHeat:
        """Ranks the keys. To be called in a worker where these may be many."""
        return cls(heats, sorted((_rank(key, heat) for key, heat in heats.items() if heat > 0.0), reverse=True))

    def ranking(self, fitting: Sequence[int]) -> Ranking:
        """Ranks exactly. fitting: how many of the records fit each speed class, the fastest first."""
        return _ranking(self.ranks, range(1, len(self.ranks) + 1), fitting, each=1, standing=None)


NO_HEAT = GivenHeat({}, ())


def rank_records(keys: KeySpace, heat: Heat, fitting: Sequence[int], *, copies: Copies, standing: int) -> Ranking:
    """Ranks the records of a namespace. fitting: how many copies of records fit each speed class, the fastest first; standing: how
    many of the hottest stand in memory."""
    sample = list(_sample(keys))
    each = len(keys) / len(sample)
    ranks = sorted((_rank(key, found) for key in sample if (found := heat(key)) > 0.0), reverse=True)
    count = min(int(standing / each), len(ranks))
    least = ranks[count - 1] if count else None
    ranks = ranks[count:] + ranks[:count]
    ends = list(accumulate(copies((-layer, -expert)) for _, layer, expert in ranks))
    return _ranking(ranks, ends, fitting, each=each, standing=least)


def _ranking(
    ranks: Sequence[Rank], ends: Sequence[int], fitting: Sequence[int], *, each: float, standing: Rank | None
) -> Ranking:
    """Gives the classes their least places. ranks: in the order in which they take room; ends: of each and those before it, how
    many copies there are; each: how many one of these stands for."""
    least: list[Order | None] = []
    fit, end, last = 0, 0, ends[-1] if ends else 0
    for count in fitting[:-1]:
        fit += count
        if not count or end > last:
            least.append(None)
            continue
        end = max(end + 1, int(fit / each))  # a class that is smaller than what one record stands for takes some
        least.append(_place(ranks[bisect_left(ends, end)], standing) if end <= last else EVERY_USED)
    has_room = not ends or fit > last * each
    return Ranking(tuple(least), unused=None if has_room else len(least), standing=standing)


def _place(rank: Rank, standing: Rank | None) -> Order:
    return standing is None or rank < standing, *rank


def _rank(key: ExpertKey, heat: float) -> Rank:
    return heat, -key[0], -key[1]


def _sample(keys: KeySpace) -> Iterator[ExpertKey]:
    count = len(keys)
    if count <= SAMPLE_KEYS:
        return iter(keys)
    places = (number * SPREAD % count for number in range(SAMPLE_KEYS))
    return ((keys.layers[place // keys.experts], place % keys.experts) for place in places)


def heat_of(trace: Trace, keys: KeySpace, *, namespace: str) -> dict[ExpertKey, float]:
    """How often a trace leases each of its keys. Raises ConfigError where the trace is of a model with other experts."""
    header = trace.header
    if header.space != keys:
        raise ConfigError(
            f"heat: the trace {header.name!r} is of {header.experts} experts in each of {len(header.layers)} layers, namespace "
            f"{namespace!r} has {keys.experts} in {len(keys.layers)}, or other layers: give a trace of this model"
        )
    uses = Counter(key for event in trace.events if event.kind is TraceEventKind.ACQUIRE for key in event.keys)
    return {key: float(count) for key, count in uses.items()}


def pack_heat(heat: Mapping[ExpertKey, float], keys: KeySpace, *, namespace: str) -> bytes:
    """Packs the heat of a namespace's keys, 0 for those that are not named: in key order, relative to the hottest one.

    Raises UnknownKey, and ConfigError where a heat is no finite number from 0 on.
    """
    keys.check(heat, namespace=namespace)
    plain = {key: number(f"heat[{key}]", value, least=0, expected="a finite number") for key, value in heat.items()}
    hottest = max(plain.values(), default=0.0)
    if not hottest:
        return b""
    packed = (plain.get(key, 0.0) / hottest * HOTTEST for key in keys)
    return _little(array("I", [max(1, round(heat)) if heat else 0 for heat in packed])).tobytes()  # 0 is said of unused ones alone


def unpack_heat(packed: bytes, keys: KeySpace) -> GivenHeat:
    """Unpacks and ranks the heat; for a worker, since many keys take long. Raises ProtocolError for another number of them."""
    if packed and len(packed) != HEAT_BYTES * len(keys):
        raise ProtocolError(f"heat takes {len(packed)} bytes, {len(keys)} keys have {HEAT_BYTES * len(keys)}")
    heats = _little(array("I", packed))
    return GivenHeat.of({key: float(heat) for key, heat in zip(keys, heats, strict=False) if heat})


def _little(heats: array[int]) -> array[int]:
    """Turns heats from this machine's byte order to the wire's, or back."""
    if sys.byteorder == "big":
        heats.byteswap()
    return heats
