"""The chain of commits as a handle sees it: which steps there are, going back to one, and keeping one for good."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from paramstore.wire import messages
from paramstore.wire.messages import Request
from paramstore_client import answers
from paramstore_client.answers import Opened

if TYPE_CHECKING:
    from paramstore_client.namespace import Namespace
    from paramstore_client.ticket import Ticket

T = TypeVar("T")


class Steps(ABC):
    """The part of `Namespace` that is about steps. Its other parts own the connection, the handle and the state."""

    name: str
    _handle: int
    _epoch: int
    _committed_step: int | None

    @abstractmethod
    def _next_id(self) -> int:
        """An id for the next request."""

    @abstractmethod
    def _send(self, message: Request, call: str, convert: Callable[[Any], T]) -> Ticket[T]:
        """Sends a request and gives its ticket."""

    @abstractmethod
    def _consume(self, message: Request, call: str, convert: Callable[[Any], T]) -> Ticket[T]:
        """Sends a request that ends what is pending, and cannot be cancelled."""

    @abstractmethod
    def _count_view_change(self) -> None:
        """The bytes behind this handle's keys may have become others."""

    @abstractmethod
    def _reader(self, opened: Opened) -> Namespace:
        """A handle of what an open answered."""

    def steps(self) -> list[int]:
        """The steps that can be opened, oldest first: the newest `retained_steps`, snapshots, and those readers stand on."""
        return self._send(messages.Steps(self._next_id(), self._handle), "steps", answers.numbers).wait()

    def extra(self, step: int) -> bytes:
        """The bytes committed with `step`. Raises StepDropped."""
        return self._send(messages.Extra(self._next_id(), self._handle, step), "extra", answers.data).wait()

    def rollback(self, step: int) -> int:
        """Back to `step`, any of `steps()`: later steps, pending gradients and working copies are gone for good, readers of
        later steps have lost theirs. Returns the new epoch.

        Raises StepDropped, and StepFailed while a later step is a snapshot; then nothing has changed.
        """

        def rolled_back(answer: object) -> int:
            self._epoch, self._committed_step = answers.number(answer), step
            self._count_view_change()
            return self._epoch

        return self._consume(messages.Rollback(self._next_id(), self._handle, step), "rollback", rolled_back).wait()

    def snapshot(self, step: int) -> Namespace:
        """Keeps `step` until `drop_snapshot(step)`, whatever happens to this process or the daemon, and opens a reader on it.

        Takes the namespace's state once more on the volumes. May be called on any handle, again for a step that is one, and
        waits for a commit under way. Raises StepDropped, and CapacityError naming the bytes that are missing.
        """
        self._send(messages.Snapshot(self._next_id(), self._handle, step), f"snapshot {step}", answers.nothing).wait()
        message = messages.OpenNamespace(self._next_id(), self.name, "read", step, None)
        opened = self._send(message, f"open_namespace at {step}", partial(answers.result_of, kind=Opened)).wait()
        return self._reader(opened)

    def drop_snapshot(self, step: int) -> None:
        """Ends a snapshot: `step` stays as long as any other would. Raises StepDropped if it is none."""
        message = messages.DropSnapshot(self._next_id(), self._handle, step)
        self._send(message, f"drop_snapshot {step}", answers.nothing).wait()

    def snapshots(self) -> list[int]:
        """The steps that are snapshots, oldest first."""
        return self._send(messages.Snapshots(self._next_id(), self._handle), "snapshots", answers.numbers).wait()
