"""The requests about steps: making one, listing them, going back to one. Others import `paramstore.wire.messages`."""

from __future__ import annotations

from paramstore.wire.base import Message


class Refresh(Message, tag="refresh"):
    """Moves a reader to the newest committed step. Result: the step."""

    id: int
    handle: int


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
