"""The chain of commits as a handle sees it: making a step, listing the steps, going back to one, and keeping one for good."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from paramstore.core.arguments import seconds, whole_number
from paramstore.errors import WaitTimeout
from paramstore.wire import messages
from paramstore_client.connection import answers
from paramstore_client.connection.answers import Moved, NewStep, Result
from paramstore_client.connection.ticket import Ticket
from paramstore_client.handle.base import ANSWER_GRACE_S, Handle, plain_extra


class Refreshed(int):
    """The step to which a reader has moved, a number like any other, and how much it changed for the reader.

    changed_keys: how many keys have other bytes than at the step it stood on; all of them where that was rolled back, since nobody
    can tell any more. changed_bytes: bytes of their `param` copies. Both are None with a daemon before protocol 1.5.
    """

    changed_keys: int | None = None
    changed_bytes: int | None = None

    @classmethod
    def counted(cls, answer: object) -> Refreshed:
        """Takes the answer of a daemon that counts."""
        found = answers.result_of(answer, Moved)
        moved = cls(found.step)
        moved.changed_keys, moved.changed_bytes = found.keys, found.bytes
        return moved

    @classmethod
    def uncounted(cls, answer: object) -> Refreshed:
        """Takes the answer of a daemon that gives the step alone."""
        return cls(answers.number(answer))


class Steps(Handle):
    """The part of `Namespace` that is about steps."""

    @property
    def apply_count(self) -> int:
        """How many applies this handle has called."""
        return self._applies

    @property
    def uncommitted_applies(self) -> int:
        """How many applies of this handle are in no commit that it has seen settled, and were dropped by no rollback."""
        return self._applies - self._committed_applies

    def commit(self, step: int, extra: bytes = b"") -> Ticket[Result]:
        """Makes everything applied so far durable as `step`. Cannot be cancelled. extra: up to 64 KiB, kept with it.

        Result: {step, records, bytes_written, seconds}. Raises StepOutOfOrder, StepFailed, VolumeError.
        """
        self._check_writes("commit")
        step, covered = whole_number("step", step), self._applies

        def committed(answer: object) -> Result:
            result = answers.mapping(answer)
            self._committed_step, self._committed_applies = step, covered
            return result

        message = messages.Commit(self._next_id(), self._handle, step, plain_extra(extra))
        return self._send(message, f"commit {step}", committed, is_cancellable=False)

    def prepare(self, step: int, extra: bytes = b"") -> Ticket[Result]:
        """Makes the first half of a commit, for a job over several nodes: all is durable as `step`, which `finalize(step)` commits.

        When every node has prepared, every node finalizes: whatever dies in between, all of them can be opened at one common
        step (`open_namespace(mode="write", at=...)`). Until then `apply`, `commit` and another `prepare` raise StepPrepared, as
        does a new writer who does not say `at`; pushed gradients stay pending; readers see the steps before.
        Result and errors are those of `commit`; StepOutOfOrder before the first commit too.
        """
        self._check_writes("prepare")
        self._connection.check_minor(messages.PREPARE_MINOR, "prepare")
        step = whole_number("step", step)
        message = messages.Prepare(self._next_id(), self._handle, step, plain_extra(extra))
        return self._send(message, f"prepare {step}", answers.mapping, is_cancellable=False)

    def finalize(self, step: int) -> Ticket[None]:
        """Commits the prepared `step`, in one small transaction. Calling it again is no error. Cannot be cancelled.

        Raises StepOutOfOrder if another step, or none, is prepared; CatalogError, and then the step is still prepared.
        """
        self._check_writes("finalize")
        self._connection.check_minor(messages.PREPARE_MINOR, "finalize")
        step = whole_number("step", step)

        def committed(answer: object) -> None:
            answers.nothing(answer)
            self._committed_step, self._committed_applies = step, self._applies  # none came since `prepare`

        message = messages.Finalize(self._next_id(), self._handle, step)
        return self._send(message, f"finalize {step}", committed, is_cancellable=False)

    def steps(self) -> list[int]:
        """The steps that can be opened, oldest first: the newest `retained_steps`, snapshots, and those readers stand on."""
        return self._send(messages.Steps(self._next_id(), self._handle), "steps", answers.numbers).wait()

    def extra(self, step: int) -> bytes:
        """The bytes committed with `step`. Raises StepDropped."""
        return self._send(messages.Extra(self._next_id(), self._handle, whole_number("step", step)), "extra", answers.data).wait()

    def rollback(self, step: int) -> int:
        """Goes back to `step`, any of `steps()`: later steps, pending gradients and working copies are gone for good, readers
        of later steps have lost theirs. Returns the new epoch.

        Raises StepDropped, and StepFailed while a later step is a snapshot; then nothing has changed.
        """
        self._check_writes("rollback")
        step = whole_number("step", step)

        def rolled_back(answer: object) -> int:
            self._epoch, self._committed_step = answers.number(answer), step
            self._committed_applies = self._applies
            self._count_view_change()
            return self._epoch

        return self._consume(messages.Rollback(self._next_id(), self._handle, step), "rollback", rolled_back).wait()

    def wait_for_step(self, after: int | None = None, timeout_s: float | None = None) -> int:
        """Waits until there is a committed step above `after`, and returns the newest. Steps that were committed in between are
        skipped. It moves nothing: `refresh` moves a reader to that step or a newer one.

        after: None means the step that a reader stands on, or a writer's `committed_step`. A rollback makes numbers come again.
        With a number given, the wait goes on until steps have passed it; with None, a reader whose step was rolled back is told of
        the newest at once, though that is lower, or has the same number. timeout_s: None means the daemon's `wait_timeout_s`.

        Raises WaitTimeout; CapacityError where one connection waits 64 times already; LeaseError when the handle is closed
        meanwhile; WriterFenced; VersionMismatch with a daemon before protocol 1.5.
        """
        limit_s = self.wait_timeout_s if timeout_s is None else seconds("timeout_s", timeout_s)
        ticket = self.begin_await_step(self._stood(after), None, limit_s)
        try:
            return ticket.wait().step
        except BaseException:
            ticket.abandon()
            raise

    def steps_as_they_come(self, after: int | None = None) -> AsyncGenerator[int]:
        """Returns an asynchronous iterator over the committed steps: `async for step in reader.steps_as_they_come()`.

        The first is what `wait_for_step(after)` would return. Each later one is the newest, as soon as that is another commit than
        the last: after a rollback lower numbers come, and numbers that came already. It waits as long as it takes. It ends with the
        errors of `wait_for_step`, but with WaitTimeout only where the daemon does not answer in time.
        """
        self._check_open()
        stood = self._stood(after)

        async def newer_steps() -> AsyncGenerator[int]:
            sequence: int | None = None
            while True:
                ticket = self.begin_await_step(stood, sequence, self.wait_timeout_s)
                try:
                    newest = await ticket
                except BaseException as error:
                    if isinstance(error, WaitTimeout) and ticket.is_settled:
                        continue  # the daemon lives, and has no newer step yet
                    ticket.abandon()
                    raise
                sequence = newest.sequence
                yield newest.step

        return newer_steps()

    def _stood(self, after: int | None) -> int | None:
        """The step that newer ones are compared with; None for the one that a reader stands on, which the daemon knows."""
        self._connection.check_minor(messages.STEPS_MINOR, "waiting for a step")
        if after is not None:
            return whole_number("after", after)
        return self._committed_step if self.mode == "write" else None

    def begin_await_step(self, after: int | None, sequence: int | None, limit_s: float) -> Ticket[NewStep]:
        """Begins to wait for a newer step, and returns at once. `after` is as for `wait_for_step`, but None means the step that a
        reader stands on; sequence: that of the commit that was told last, which makes any other newest one newer. Cancel a ticket
        nobody waits for. It raises what `wait_for_step` raises, WaitTimeout after `limit_s`."""

        def told(answer: object) -> NewStep:
            newest = answers.result_of(answer, NewStep)
            self._committed_step = newest.step
            return newest

        message = messages.AwaitStep(self._next_id(), self._handle, after, sequence, limit_s)
        return self._send(message, "wait_for_step", told, timeout_s=limit_s + ANSWER_GRACE_S)

    def drop_snapshot(self, step: int) -> None:
        """Ends a snapshot: `step` stays as long as any other would. Raises StepDropped if it is none."""
        message = messages.DropSnapshot(self._next_id(), self._handle, whole_number("step", step))
        self._send(message, f"drop_snapshot {step}", answers.nothing).wait()

    def snapshots(self) -> list[int]:
        """The steps that are snapshots, oldest first."""
        return self._send(messages.Snapshots(self._next_id(), self._handle), "snapshots", answers.numbers).wait()
