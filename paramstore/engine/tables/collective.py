"""Calls that the ranks of one group make together: which of them match, what is refused, and who is missing.

Everything here is a plain decision, without clock, future or I/O. The owner of a `Collective` tells it when the deadline has passed
and which rank is gone, runs the calls that begin, and tells the ranks how their calls ended.

- A rank has at most one call that waits; its session holds back what the rank asks for after it. So the n-th call of one rank
  always meets the n-th calls of the others.
- A call begins once, when all ranks have made it with equal arguments (floats bit for bit); else nothing runs.
- After a refused call the ranks are *out of step*: what a rank had already sent behind that call must not run as if it had
  succeeded. Every call is refused until all have made one that starts over (rollback, initialize) and that has succeeded.
- A rank that is gone ends the group for good.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from paramstore.core.placement import ranks_named
from paramstore.errors import ConfigError, ParamStoreError, RankLost, StepMismatch

WORLD_SIZE_MAX = 256
"""The most ranks of one group: no daemon serves more sessions."""
GROUP_NAME_MAX = 256
SHOWN_MAX = 60
"""Characters of an argument that an error shows."""
MENDING = frozenset({"rollback", "initialize"})
"""Calls that start over from what is committed: they bring ranks that are out of step together again."""


class Argument(NamedTuple):
    name: str
    value: object


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a rank. Two calls match if they have the same name and their arguments the same bits."""

    name: str
    arguments: tuple[Argument, ...] = ()

    def matches(self, other: Call) -> bool:
        return self.name == other.name and bits_of(self.arguments) == bits_of(other.arguments)

    def shown(self, names: Iterable[str]) -> str:
        """The call as text for people, with only the arguments in `names`."""
        chosen = set(names)
        return f"{self.name}({', '.join(f'{name}={_short(value)}' for name, value in self.arguments if name in chosen)})"


def bits_of(value: object) -> object:
    """A form of `value` to compare by: equal exactly for equal types and bits, so nan equals itself and -0.0 is not 0.0."""
    if isinstance(value, float):
        return struct.pack("<d", value)
    if isinstance(value, Mapping):
        return {name: bits_of(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [bits_of(item) for item in value]
    return type(value), value


def check_rank(rank: int, world_size: int, group: str) -> None:
    """Raises ConfigError where no rank of a group may come with these."""
    if not 1 <= world_size <= WORLD_SIZE_MAX or not 0 <= rank < world_size:
        raise ConfigError(f"rank={rank}, world_size={world_size}: ranks are 0 to world_size - 1, and at most {WORLD_SIZE_MAX}")
    if len(group) > GROUP_NAME_MAX:
        raise ConfigError(f"a group's name of {len(group)} characters: {GROUP_NAME_MAX} are allowed")


@dataclass(frozen=True, slots=True)
class Settled:
    """A decision about ranks whose calls wait no longer. error: None if the call begins now, else the error for each of them."""

    ranks: tuple[int, ...]
    error: ParamStoreError | None = None


class Collective:
    """Decides about the calls of one group; owns those that wait. what: its name in errors; way_on: what helps after a refusal."""

    def __init__(self, world_size: int, *, what: str, way_on: str) -> None:
        self.world_size = world_size
        self._what = what
        self._way_on = way_on
        self._waiting: dict[int, Call] = {}
        self._refusal: str | None = None
        """Why the ranks are out of step."""
        self._loss: str | None = None
        """Why the group is broken for good; None while it is whole."""

    # --- state

    @property
    def waiting(self) -> tuple[int, ...]:
        """Ranks whose call has not begun, ascending."""
        return tuple(sorted(self._waiting))

    @property
    def missing(self) -> tuple[int, ...]:
        """Ranks without a waiting call, for which the others wait; all ranks while none waits."""
        return tuple(rank for rank in range(self.world_size) if rank not in self._waiting)

    @property
    def is_in_step(self) -> bool:
        return self._refusal is None

    @property
    def refusal(self) -> str | None:
        """Why the ranks are out of step; None while they are in step."""
        return self._refusal

    @property
    def is_lost(self) -> bool:
        return self._loss is not None

    def check_whole(self) -> None:
        """Raises RankLost if a rank is gone."""
        if self._loss is not None:
            raise RankLost(self._loss)

    def check_in_step(self) -> None:
        """Raises RankLost, and StepMismatch while the ranks are out of step."""
        self.check_whole()
        if self._refusal is not None:
            raise StepMismatch(self._refusal)

    # --- events

    def arrive(self, rank: int, call: Call) -> Settled | None:
        """Takes a call of `rank`: it waits (None), begins with all others, or is refused with them.

        Raises RankLost; StepMismatch while the ranks are out of step and `call` does not start over, or if the rank already has a
        call that waits. Then nothing has changed.
        """
        self.check_whole()
        if call.name not in MENDING:
            self.check_in_step()
        if rank in self._waiting:
            raise StepMismatch(f"{self._what}: rank {rank} waits for the others in {self._waiting[rank].name} already")
        others = list(self._waiting.values())
        self._waiting[rank] = call
        if any(not call.matches(other) for other in others):
            return self._refuse(f"{self._what}: {self._differences()}: nothing ran. {self._way_on}")
        if len(self._waiting) < self.world_size:
            return None
        return Settled(self._taken())

    def expire(self) -> Settled:
        """Refuses the calls that wait, because their deadline has passed; the error names the ranks that are missing."""
        assert self._waiting
        name = next(iter(self._waiting.values())).name
        missing, waited = ranks_named(self.missing), ranks_named(self.waiting)
        return self._refuse(f"{self._what}: {name} of {waited}: {missing} did not call in time: nothing ran. {self._way_on}")

    def lose(self, rank: int, reason: str) -> Settled:
        """Breaks the group, because `rank` is gone for `reason`: calls that wait fail, and so does every later one."""
        if self._loss is None:
            self._loss = f"{self._what}: rank {rank} {reason}: the group is broken. All ranks open the namespace again"
        return Settled(self._taken(), RankLost(self._loss))

    def withdraw(self, rank: int) -> bool:
        """Takes back the waiting call of `rank`, as if it had never called; False if it has none."""
        return self._waiting.pop(rank, None) is not None

    def end(self, error: ParamStoreError) -> Settled:
        """Fails the calls that wait with `error`; the caller sees to it that no other comes."""
        return Settled(self._taken(), error)

    def mend(self, refusal: str | None) -> None:
        """Brings the ranks in step again after a call that starts over has succeeded. refusal: the one in force when that call
        began; where another call was refused since, the ranks stay out of step."""
        if self._refusal is refusal:
            self._refusal = None

    def _refuse(self, refusal: str) -> Settled:
        self._refusal = refusal
        return Settled(self._taken(), StepMismatch(refusal))

    def _taken(self) -> tuple[int, ...]:
        ranks = self.waiting
        self._waiting.clear()
        return ranks

    def _differences(self) -> str:
        """Text that says which rank called what, with the arguments that differ."""
        calls = list(self._waiting.values())
        if len({call.name for call in calls}) > 1:
            names: set[str] = set()
        else:
            values = [{name: bits_of(value) for name, value in call.arguments} for call in calls]
            names = {name for name in values[0] if any(other.get(name) != values[0][name] for other in values)}
        called = ", ".join(f"rank {rank} called {self._waiting[rank].shown(names)}" for rank in self.waiting)
        return called + (f", {ranks_named(self.missing)} had not called" if self.missing else "")


def _short(value: object) -> str:
    if isinstance(value, bytes):
        return f"{len(value)} bytes, {value[:8].hex()}..."
    text = repr(value)
    return text if len(text) <= SHOWN_MAX else f"{text[:SHOWN_MAX]}..."
