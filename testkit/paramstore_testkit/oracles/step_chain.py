"""A model, without a daemon, of what every step of a namespace must hold, and which steps its trainer was promised.

It hears of each request before the trainer sends it, and again when the answer came. After a death `reopen` takes the step
at which the store came back: *last acknowledged <= step <= last started*, or AssertionError.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from paramstore.core.key import ExpertKey
from paramstore.limits import RETAINED_STEPS
from paramstore_testkit.oracles.experts import Expert, State, Tensors

Rule = Callable[[Expert, Tensors], Expert]
"""Function from an expert and its gradients to the expert after the update."""


class StepChain:
    """Owner of the model. working: the writer's view. committed: steps known to be durable, oldest first. openable: the committed
    steps that must be open to readers: at any time the newest `retained`."""

    def __init__(self, rule: Rule, *, retained: int = RETAINED_STEPS) -> None:
        self._rule = rule
        self._retained = retained
        self.states: dict[int, State] = {}
        """Contents of every step that was ever started, as last started."""
        self.extras: dict[int, bytes] = {}
        self.working: State = {}
        self.committed: list[int] = []
        self.openable: list[int] = []
        self.started: list[int] = []
        """Commits sent and not yet answered, in order."""
        self.rolling_to: int | None = None

    @property
    def acknowledged(self) -> int | None:
        return self.committed[-1] if self.committed else None

    def initialize(self, values: Mapping[ExpertKey, Tensors]) -> None:
        self.working = {key: Expert.initial(value) for key, value in values.items()}

    def apply(self, gradients: Mapping[ExpertKey, Tensors]) -> None:
        self.working = {**self.working, **{key: self._rule(self.working[key], value) for key, value in gradients.items()}}

    def start(self, step: int, extra: bytes) -> None:
        """Hears that a commit is about to be sent."""
        self.started.append(step)
        self.states[step] = self.working
        self.extras[step] = extra

    def acknowledge(self, step: int) -> None:
        """Hears that a commit was answered, and with it those sent before."""
        position = self.started.index(step) + 1
        self.committed += self.started[:position]
        self.openable = [*self.openable, *self.started[:position]][-self._retained :]
        del self.started[:position]

    def start_rollback(self, step: int) -> None:
        """Hears that a rollback is about to be sent; no commit is under way."""
        assert not self.started
        assert step in self.openable
        self.rolling_to = step

    def acknowledge_rollback(self) -> None:
        """Hears that the rollback was answered."""
        assert self.rolling_to is not None
        self._roll_back(self.rolling_to)

    def reopen(self, found: int | None) -> None:
        """Hears that the store came back at step `found`. On return nothing is under way. Raises AssertionError if it may not."""
        allowed = {self.acknowledged, *self.started, *(() if self.rolling_to is None else (self.rolling_to,))}
        assert found in allowed, (
            f"came back at step {found}; acknowledged {self.acknowledged}, started {self.started}, rollback to {self.rolling_to}"
        )
        if found in self.started:
            self.acknowledge(found)
        elif found is not None and found != self.acknowledged:
            self._roll_back(found)
        self.started = []
        self.rolling_to = None
        self.working = {} if found is None else self.states[found]

    def check_steps(self, found: list[int]) -> None:
        """Checks `found`, the steps that can be opened: all that were promised, and none that is not committed."""
        assert found == sorted(found)
        assert set(self.openable) <= set(found) <= set(self.committed), (found, self.openable, self.committed)

    def _roll_back(self, step: int) -> None:
        del self.committed[self.committed.index(step) + 1 :]
        self.openable = [kept for kept in self.openable if kept <= step]
        self.rolling_to = None
        self.working = self.states[step]
