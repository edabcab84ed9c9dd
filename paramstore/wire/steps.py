"""The requests about steps: making one, listing them, going back to one, and being told of the next.

Others import `paramstore.wire.messages`.
"""

from __future__ import annotations

from typing import ClassVar

from paramstore.wire.base import Message, Seconds


class Refresh(Message, tag="refresh"):
    """Moves a reader to the newest committed step, or to `step`. Result: the step. Error: StepDropped if there is no `step`.

    is_counted: the result is {step, keys, bytes}, how many keys have other bytes there than at the step before, and how many bytes
    their `param` copies take. Since STEPS_MINOR. step: since FOLLOW_MINOR.
    """

    ADDED_FIELDS: ClassVar[int] = 2

    id: int
    handle: int
    is_counted: bool = False
    step: int | None = None


class AwaitStep(Message, tag="await_step"):
    """Waits for a newer committed step. Result: {step, sequence} of the newest, `sequence` counting commits. Since STEPS_MINOR.

    sequence: any newest step but that of this commit is newer, after a rollback too; None: a step above `after` is; both None: any
    but the one that the handle's view stands on. Error: CapacityError above STEP_WAITS_MAX of a session, WaitTimeout.
    """

    id: int
    handle: int
    after: int | None
    sequence: int | None
    timeout_s: Seconds


class Commit(Message, tag="commit"):
    """Commits everything that has changed as `step`. Result, once durable: {step, records, bytes_written, seconds}."""

    id: int
    handle: int
    step: int
    extra: bytes = b""


class Prepare(Commit, tag="prepare"):
    """Makes `step` durable, to be committed by Finalize. Result, once durable: as of Commit. Error: StepPrepared if one is."""


class Finalize(Message, tag="finalize"):
    """Commits the prepared `step`. Result: None. Error: StepOutOfOrder if another step, or none, is prepared."""

    id: int
    handle: int
    step: int


class Steps(Message, tag="steps"):
    """Lists the steps that can be opened. Result: their numbers, oldest first."""

    id: int
    handle: int


class Extra(Message, tag="extra"):
    """Asks for the caller's bytes committed with `step`. Result: these bytes. Error: StepDropped."""

    id: int
    handle: int
    step: int


class Rollback(Message, tag="rollback"):
    """Rolls back to `step`. Result: the new epoch."""

    id: int
    handle: int
    step: int


class Snapshot(Message, tag="snapshot"):
    """Makes `step` a snapshot, which stays until DropSnapshot. Result: None. Error: StepDropped, CapacityError."""

    id: int
    handle: int
    step: int


class DropSnapshot(Message, tag="drop_snapshot"):
    """Makes a snapshot an ordinary step again. Result: None. Error: StepDropped if `step` is no snapshot."""

    id: int
    handle: int
    step: int


class Snapshots(Message, tag="snapshots"):
    """Lists the steps that are snapshots. Result: their numbers, oldest first."""

    id: int
    handle: int
