"""The requests, which a client sends. See `paramstore.wire.messages`."""

from __future__ import annotations

from typing import Any, ClassVar

from paramstore.wire.applies import Apply, AwaitRoom, BeginApply, EndApply, EndLayers
from paramstore.wire.base import ExtentKeys, Key, Keys, Message, Modes, Seconds, VisitPairs
from paramstore.wire.steps import (
    AwaitStep,
    Commit,
    DropSnapshot,
    Extra,
    Finalize,
    Prepare,
    Refresh,
    Rollback,
    Snapshot,
    Snapshots,
    Steps,
)


class Hello(Message, tag="hello"):
    """Begins a connection. Answered by Done with a `welcome` mapping, or Failed(VersionMismatch)."""

    id: int
    magic: str
    major: int
    minor: int
    pid: int
    label: str = ""


class Namespaces(Message, tag="namespaces"):
    """Lists the namespaces. Result: list of {name, schema, layers, experts, committed_step, prepared_step, epoch}."""

    id: int


class CreateNamespace(Message, tag="create"):
    """Creates a namespace, opened as writer. Result as of OpenNamespace. Errors: NamespaceExists, CapacityError, SchemaMismatch."""

    id: int
    name: str
    schema: dict[str, Any]
    layers: list[int]
    experts: int
    host_bytes: int | None = None


class OpenNamespace(Message, tag="open"):
    """Opens a namespace. mode: "read" or "write". at: a step; None: the newest committed one. min_lease_slots: since PROMISE_MINOR.
    max_lease_slots: the most that a reader is to be promised, if that is not less; None: no bound. Since BOUND_MINOR.

    Result: mapping {handle, name, schema, layers, experts, committed_step, view_step, epoch, lease_slots, wait_timeout_s}.
    Opening as writer fences earlier writers and rolls back to that step; a prepared one is committed if it is `at`.
    Error: StepPrepared, to a writer without `at` while a step is prepared; CapacityError where fewer slots than asked for are left.
    """

    ADDED_FIELDS: ClassVar[int] = 2

    id: int
    name: str
    mode: str
    at: int | None = None
    host_bytes: int | None = None
    min_lease_slots: int = 0
    max_lease_slots: int | None = None


class CreateRank(CreateNamespace, tag="create_rank"):
    """CreateNamespace sent by one of `world_size` ranks that write together. `group` names this start of the job.

    Answered when all ranks have sent it with equal arguments. Error: StepMismatch if they differ, or one does not come in time.
    """

    rank: int = 0
    world_size: int = 1
    group: str = ""


class OpenRank(Message, tag="open_rank"):
    """OpenNamespace of mode "write", sent by one of `world_size` ranks that write together; see CreateRank."""

    ADDED_FIELDS: ClassVar[int] = 1

    id: int
    name: str
    mode: str
    at: int | None = None
    host_bytes: int | None = None
    rank: int = 0
    world_size: int = 1
    group: str = ""
    min_lease_slots: int = 0


class CloseNamespace(Message, tag="close"):
    """Closes a handle."""

    id: int
    handle: int


class OpenUpload(Message, tag="upload"):
    """Asks for `size_bytes` more of writable memory for this session. Answered by Uploaded, or Failed(CapacityError)."""

    id: int
    size_bytes: int


class InitializeBegin(Message, tag="init_begin"):
    """Begins an initialization, which starts the namespace over without any record; `is_resumed` (from minor 3 on): with those of
    its draft. `heat` (from minor 10 on): how much each key is to be used, four bytes each in key order, little-endian; empty if
    nobody knows. Records are spread over faster and slower volumes by it.

    Result: mapping {present, extra}: a bit per key in key order, lowest first, that is set if the key has its value; and what
    the draft was saved with, None without one. Errors: StepOutOfOrder once it has a committed step; ProtocolError for a heat of
    another length.
    """

    ADDED_FIELDS: ClassVar[int] = 2

    id: int
    handle: int
    is_resumed: bool = False
    heat: bytes = b""


class InitializePut(Message, tag="init_put"):
    """Gives the initial value of one key, laid out as `schema.initial_fields()` at `offset_bytes` of an upload segment.

    Answered when the bytes have been taken; the range may be reused then.
    """

    id: int
    handle: int
    key: Key
    segment: int
    offset_bytes: int


class InitializeSave(Message, tag="init_save"):
    """Makes the values put so far durable as the namespace's draft, for an initialization that resumes. From minor 3 on.

    Result, once durable: {records, bytes_written, seconds}, of the values that were in no earlier draft. Error: StepOutOfOrder
    outside of an initialization.
    """

    id: int
    handle: int
    extra: bytes = b""


class InitializeEnd(Message, tag="init_end"):
    """Ends an initialization. Answered when every key has a whole record on a volume. Error: StepFailed naming a key without
    one."""

    id: int
    handle: int


class Prefetch(Message, tag="prefetch"):
    """Loads keys ahead of use. Result: {loaded, resident, skipped, bytes}: keys loaded, present before, without room; bytes
    moved."""

    id: int
    handle: int
    keys: Keys
    part: str
    deadline_s: Seconds | None = None


class Acquire(Message, tag="acquire"):
    """Leases all keys or none. Answered by Granted; this request's id names the lease until it is released."""

    id: int
    handle: int
    keys: Keys
    part: str
    timeout_s: Seconds


class Release(Message, tag="release"):
    """Ends leases (one-way). An id that names no lease is ignored (it was cancelled or its namespace closed)."""

    leases: list[int]


class AcquireExtents(Message, tag="acquire_extents"):
    """Leases the extents of the records that the handle sees of these keys. From EXTENTS_MINOR on. Answered by GrantedExtents; this
    request's id names the lease until it is released. Errors: LeaseError, SchemaMismatch, CapacityError."""

    id: int
    handle: int
    keys: ExtentKeys


class Borrow(Message, tag="borrow"):
    """Asks for `count` lease slots in all beyond the handle's promise, those among them that it has borrowed. Answered by Lent: as
    many as can be lent now, and no fewer than it has. A writer is lent nothing."""

    id: int
    handle: int
    count: int


class GiveBack(Message, tag="give_back"):
    """Gives borrowed slots back, all but `kept` of them (one-way). Sent behind the releases of what was leased in them."""

    handle: int
    kept: int


class Cancel(Message, tag="cancel"):
    """Cancels the request `target` if that is still possible (one-way); the answer to `target` says what became of it."""

    target: int


class Push(Message, tag="push"):
    """Makes gradients pending for keys that had none: (layer, expert, segment, offset), laid out as `schema.gradient_fields()`.

    Takes all entries or none. The ranges belong to the daemon until the apply or abort that consumes them is answered.
    is_last: an apply is open, and may update these keys from now on; keys that have a pending gradient are named too, with its
    place. Since TRAINING_MINOR.
    """

    ADDED_FIELDS: ClassVar[int] = 1

    id: int
    handle: int
    entries: list[tuple[int, int, int, int]]
    is_last: bool = False


class GradientNorm(Message, tag="norm"):
    """Computes the L2 norm over all pending gradients of the namespace. Result: a float."""

    id: int
    handle: int


class Abort(Message, tag="abort"):
    """Drops pending gradients, and an open apply that has claimed none. Result: how many keys had pending gradients."""

    id: int
    handle: int


class WriteBack(Message, tag="write_back"):
    """Writes dirty records. keys None: all. Result: {written, bytes}."""

    id: int
    handle: int
    keys: Keys | None = None


class Evict(Message, tag="evict"):
    """Evicts copies from host memory. Result: {evicted, skipped: [[layer, expert], ...]}; skipped ones are leased or in use."""

    id: int
    handle: int
    keys: Keys | None = None
    part: str | None = None


class Protect(Message, tag="protect"):
    """Wishes that `param` copies of these keys are kept (is_wanted), or takes that wish back (not is_wanted)."""

    id: int
    handle: int
    keys: Keys
    is_wanted: bool


class DeclareSchedule(Message, tag="schedule"):
    """Declares the cycles of (layer, kind), one a part, in which the client visits its layers; both empty: takes that back. Kinds:
    `core.visits`.

    Result: None. Error: ConfigError, naming the first visit that is of no layer or kind. Ends with the handle.
    """

    id: int
    handle: int
    param_visits: VisitPairs = ()
    optim_visits: VisitPairs = ()


class Read(Message, tag="read"):
    """Copies one record's stored part (its image, `schema.stored`) to an upload range of `record_bytes`.

    Result: {epoch, version}.
    """

    id: int
    handle: int
    key: Key
    segment: int
    offset_bytes: int


class Residency(Message, tag="residency"):
    """Asks where experts are. Result: {layers, experts, optim: [...], param: [...], heat: [...], hbm: [...]}, each list with an
    item per key in key order (see `engine.report.residency`)."""

    id: int
    handle: int


class Stats(Message, tag="stats"):
    """Asks for the daemon's counters and sizes. Result: a mapping; see docs/protocol.md."""

    id: int


class Verify(Message, tag="verify"):
    """Reads and checks records where they lie; one Verify runs at a time. namespace None: all; keys None: all of the namespace's.

    Result, once all are checked: {namespaces, bytes_per_s, state, records, records_total, bytes_read, bytes_total,
    superseded, copies, found, findings, copy_findings, seconds}. Damage is a finding, not an error.
    """

    id: int
    namespace: str | None = None
    keys: Keys | None = None
    bytes_per_s: int | None = None


class TraceBegin(Message, tag="trace_begin"):
    """Makes the daemon log transfers for this session from now on. Result: None."""

    id: int


class TraceEnd(Message, tag="trace_end"):
    """Ends the log that `TraceBegin` began. Result: {transfers, dropped, now_s}: the transfers that ended meanwhile, as [kind,
    namespace, layer, expert, urgency, bytes, submitted_s, started_s, ended_s]; times are CLOCK_MONOTONIC."""

    id: int


class Unmapped(Message, tag="unmapped"):
    """Says that the client has unmapped these segments (one-way)."""

    segments: list[int]


class DeviceReport(Message, tag="device"):
    """Says what the client's HBM tier holds now, and which keys it used there since the last report (one-way)."""

    handle: int
    resident: Keys
    touched: Keys
    bytes_resident: int


class ExtentModes(Message, tag="extent_modes"):
    """Says how the client has found extents of each volume to be read to its device (one-way)."""

    handle: int
    modes: Modes


Request = (
    Hello | Namespaces | CreateNamespace | OpenNamespace | CreateRank | OpenRank | CloseNamespace | Refresh | AwaitStep
    | OpenUpload
    | InitializeBegin | InitializePut | InitializeSave | InitializeEnd | Prefetch | Acquire | AcquireExtents
    | Release | Borrow | GiveBack
    | Cancel | Push | GradientNorm | Apply | BeginApply | EndLayers | AwaitRoom | EndApply | Abort | WriteBack | Evict | Protect
    | DeclareSchedule
    | Commit | Prepare | Finalize | Steps | Extra | Rollback | Snapshot | DropSnapshot | Snapshots | Read | Residency | Stats
    | Verify | TraceBegin | TraceEnd | Unmapped | DeviceReport | ExtentModes
)  # fmt: skip
