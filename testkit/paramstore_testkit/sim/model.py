"""The reference model of the simulation: what a namespace must contain. Plain values, no engine.

A record's value is its identity and three numbers, by the rule of `plain_arithmetic`: every element of a field is the same number,
and all numbers are multiples of 1/8 far below 2**20, so that fp32 holds them exactly. The model hears of requests when they reach
the core, and of answers when the core gives them. It says which bytes a writer may see, which a reader must, and which steps may
or must exist.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from paramstore.core.schema import Field

Key = tuple[int, int]


class Broken(AssertionError):
    """The core contradicts the model."""


class Value(NamedTuple):
    """One record: its identity, its master, sum of gradients and number of updates."""

    epoch: int
    version: int
    master: float
    exp_avg: float
    updates: int

    @property
    def numbers(self) -> tuple[float, ...]:
        """Lists what the elements of a record's fields are, part by part."""
        return self.master, self.exp_avg, float(self.updates)


State = Mapping[Key, Value]
"""All records at one moment; never changed in place."""


@lru_cache(maxsize=1 << 14)
def pattern(number: float, elements: int) -> bytes:
    """Makes a field of equal fp32 elements."""
    return struct.pack("<f", number) * elements


class Image(NamedTuple):
    """Memory of one kind: of a param, a record, a gradient or an initial value."""

    fields: tuple[Field, ...]
    length_bytes: int

    def fill(self, memory: memoryview, number: float) -> None:
        for each in self.fields:
            memory[each.offset_bytes :][: each.length_bytes] = pattern(number, each.elements)

    def wrong_field(self, memory: memoryview, numbers: Sequence[float]) -> Field | None:
        """Finds a field that is not all of its number. numbers: of the first fields, of as many after them, and so on."""
        count = len(self.fields) // len(numbers)
        for index, each in enumerate(self.fields):
            if memory[each.offset_bytes :][: each.length_bytes] != pattern(numbers[index // count], each.elements):
                return each
        return None


@dataclass(slots=True)
class Prepared:
    """The step that is durable and not committed. steps: those that may be it; at most one is. is_sure: there was an answer.
    is_dropped: a writer's opening may have dropped it."""

    steps: dict[int, None] = field(default_factory=dict)
    is_sure: bool = False
    is_dropped: bool = False


@dataclass(slots=True)
class Snapshots:
    """Steps that are kept until they are given up. unsure: those that were asked for or given up without an answer."""

    kept: dict[int, None] = field(default_factory=dict)
    unsure: dict[int, None] = field(default_factory=dict)

    @property
    def sure(self) -> set[int]:
        return self.kept.keys() - self.unsure.keys()


class NamespaceModel:
    """One namespace. Owner of all that is known of its steps, of the writer's state, and of every identity ever seen."""

    def __init__(self, name: str, keys: Sequence[Key], *, retained_steps: int) -> None:
        self.name = name
        self.keys = list(keys)
        self.retained_steps = retained_steps
        self.states: dict[int, State] = {}
        """Records of every step whose commit was ever asked for. Step numbers are never used twice."""
        self.steps: list[int] = []
        """Steps that are committed and not rolled back, in order."""
        self.kept: list[int] = []
        """Steps of those that retention keeps: what a commit dropped does not come back with a rollback."""
        self.started: dict[int, None] = {}
        """Steps of commits asked for and not answered: they may exist."""
        self.targets: dict[int, None] = {}
        """Steps of rollbacks asked for and not answered."""
        self.leaving: set[int] = set()
        """Steps above the target of such a rollback: readers do not reach them any more, and they are listed until it is over."""
        self.prepared = Prepared()
        self.snapshots = Snapshots()
        self.epoch = 0
        self.history: list[State] = []
        """Successive states of the writer's view."""
        self.pending: dict[Key, float] = {}
        self.identities: dict[tuple[Key, int, int], Value] = {}
        self.is_broken = False
        """Whether an apply failed, or may have: then identities that were claimed may never be made."""
        self.writer: object = None
        """View of the client that writes now, if any."""
        self.openings = 0
        """Number of writers' openings that reached the core: each fences those before it."""
        self.opening: dict[int, int | None] = {}
        """Openings of those that are not answered, by number, with the step to which they go back, if they name one."""
        self.next_step = 0

    # --- the writer

    @property
    def working(self) -> State:
        return self.history[-1]

    @property
    def committed(self) -> int | None:
        return self.steps[-1] if self.steps else None

    def opening_asked(self, at: int | None) -> int:
        """Counts a writer's opening; gives its number."""
        self.openings += 1
        self.opening[self.openings] = at
        return self.openings

    def stand_at(self, state: State, epoch: int) -> None:
        """Lets a writer begin at `state` in a new epoch, with nothing pending."""
        if epoch <= self.epoch:
            raise Broken(f"{self.name}: epoch {epoch} comes after {self.epoch}")
        self.epoch = epoch
        self.pending = {}
        self.is_broken = False
        self.history.append(state)

    def initial(self, key: Key) -> Value:
        """Makes an initial value: different for every key, and for every epoch in which it is set."""
        number = 1.0 + self.keys.index(key) + 64.0 * (self.epoch % 64)
        return Value(self.epoch, 0, number, 0.0, 0)

    def initialize(self, key: Key) -> None:
        value = self.initial(key)
        self.identities[key, value.epoch, value.version] = value
        self.history.append({**self.working, key: value})

    def claim(self, grad_scale: float, lr: float) -> tuple[dict[Key, float], int]:
        """Lets an apply take what is pending. Gives that, and the apply's place in the history, for `unclaim`."""
        taken, self.pending = self.pending, {}
        state = dict(self.working)
        for key, gradient in taken.items():
            old = state[key]
            scaled = gradient * grad_scale
            new = Value(self.epoch, old.version + 1, old.master - lr * scaled, old.exp_avg + scaled, old.updates + 1)
            state[key] = new
            self.identities[key, new.epoch, new.version] = new
        self.history.append(state)
        return taken, len(self.history) - 1

    def unclaim(self, taken: dict[Key, float], index: int) -> None:
        """Takes an apply back that was refused in the moment in which it was called: nothing happened."""
        if index != len(self.history) - 1:
            raise Broken(f"{self.name}: something came between an apply and its refusal")
        self.history.pop()
        self.pending = taken

    # --- steps

    def commit_asked(self, step: int) -> None:
        self.states[step] = self.working
        self.started[step] = None

    def commit_done(self, step: int) -> None:
        if step not in self.started:
            raise Broken(f"{self.name}: step {step} was committed twice")
        del self.started[step]
        if self.steps and step <= self.steps[-1]:
            raise Broken(f"{self.name}: step {step} was acknowledged after {self.steps[-1]}")
        self._add_step(step)

    def _add_step(self, step: int) -> None:
        self.steps.append(step)
        self.kept = [*self.kept, step][-self.retained_steps :]

    def commit_failed(self, step: int) -> None:
        self.started.pop(step, None)

    def prepare_asked(self, step: int) -> None:
        self.states[step] = self.working
        self.prepared.steps[step] = None

    def check_prepared(self, found: int | None) -> None:
        """Checks the prepared step after a start: it is there, unless it was committed, or its request was not answered."""
        known = self.prepared
        if found is not None and found not in known.steps:
            raise Broken(f"{self.name}: step {found} is prepared; only {list(known.steps)} may be")
        if found is None and known.is_sure and not known.is_dropped and self.committed not in known.steps:
            raise Broken(f"{self.name}: one of {list(known.steps)} was prepared, and is gone")
        self.prepared = Prepared() if found is None else Prepared({found: None}, is_sure=True)

    def rolled_back(self, step: int) -> None:
        self.targets.pop(step, None)
        self.leaving = set()
        self._truncate(step)
        for gone in [snapshot for snapshot in self.snapshots.kept if snapshot > step]:
            raise Broken(f"{self.name}: rolled back to {step} over snapshot {gone}")

    def _truncate(self, step: int) -> None:
        """Makes `step` the newest, whether it was committed before or was prepared."""
        self.steps = [other for other in self.steps if other < step] + [step]
        self.kept = ([other for other in self.kept if other < step] + [step])[-self.retained_steps :]

    def observe_committed(self, step: int | None, *, is_resolved: bool) -> None:
        """Hears from the core that `step` is the newest. is_resolved: no earlier request can change that any more."""
        allowed = {self.committed, *self.started, *self.targets, *self.leaving}
        if step not in allowed:
            raise Broken(f"{self.name}: step {step} is the newest; it may be {allowed}: last acknowledged <= found <= last started")
        if step in self.leaving:  # some answers say where readers stand, others what is committed
            for other in sorted(self.leaving):
                self._add_step(other)
            self.leaving = set()
        elif step != self.committed:
            assert step is not None
            if step in self.started:
                del self.started[step]
                self._add_step(step)
            else:
                self.leaving = {other for other in self.steps if other > step}
                self._truncate(step)
        if is_resolved:
            self.leaving = set()
            if self.targets and self.started:  # they may have been published, and dropped older steps, before they were rolled back
                self.kept = self.kept[-max(1, self.retained_steps - len(self.started)) :]
            self.started.clear()
            self.targets = {at: None for at in self.opening.values() if at is not None}

    def must_have(self) -> set[int]:
        """Lists steps that can surely be opened now. While a rollback's outcome is open, these are only steps up to its target.

        Each step that is being published may drop another one, before a rollback behind it begins: commits under way, and the
        prepared step at which a writer opens.
        """
        published = {*self.started, *self.targets} - set(self.steps)
        count = max(0, self.retained_steps - len(published))
        bound = min(self.targets, default=None)
        steps = [step for step in self.kept[len(self.kept) - min(count, len(self.kept)) :] if bound is None or step <= bound]
        return self.snapshots.sure | set(steps)

    def check_steps(self, found: Sequence[int]) -> None:
        """Checks `found`, the steps that can be opened according to the core."""
        known = {*self.steps, *self.started, *self.leaving, *(self.prepared.steps.keys() & self.targets.keys())}
        if list(found) != sorted(set(found)) or not set(found) <= known or not self.must_have() <= set(found):
            raise Broken(f"{self.name}: steps {list(found)}; must have {sorted(self.must_have())}, may have {sorted(known)}")

    def check_snapshots(self, found: Sequence[int]) -> None:
        sure, unsure = self.snapshots.sure, self.snapshots.unsure
        if not sure <= set(found) <= sure | unsure.keys():
            raise Broken(f"{self.name}: snapshots {list(found)}; {sorted(sure)} are kept, {sorted(unsure)} unsure")

    # --- what is seen

    def known(self, key: Key, identity: tuple[int, int]) -> Value:
        """Gives the value of an identity, whoever sees it."""
        value = self.identities.get((key, *identity))
        if value is None:
            raise Broken(f"{self.name}: {key} in {identity}: nobody ever made that")
        return value

    # --- the end of a life

    def daemon_gone(self) -> None:
        """Ends a life: whatever was asked for and not answered may have happened, or not; nothing is pending."""
        self.writer = None
        self.opening.clear()
        self.pending = {}
        self.is_broken = False
