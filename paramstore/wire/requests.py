"""The requests: what a client sends. See `paramstore.wire.messages`."""

from __future__ import annotations

from typing import Any, ClassVar

from paramstore.wire.applies import Apply, AwaitRoom, BeginApply, EndApply, EndLayers
from paramstore.wire.base import Key, Keys, Message, Seconds, VisitPairs


class Hello(Message, tag="hello"):
    """First frame of a connection. Answered by Done with a `welcome` mapping, or Failed(VersionMismatch)."""

    id: int
    magic: str
    major: int
    minor: int
    pid: int
    label: str = ""


class Namespaces(Message, tag="namespaces"):
    """Result: list of mappings {name, schema, layers, experts, committed_step, prepared_step, epoch}."""

    id: int


class CreateNamespace(Message, tag="create"):
    """Opens as writer too. Result as OpenNamespace. Errors: NamespaceExists, CapacityError, SchemaMismatch."""

    id: int
    name: str
    schema: dict[str, Any]
    layers: list[int]
    experts: int
    host_bytes: int | None = None


class OpenNamespace(Message, tag="open"):
    """mode: "read" or "write". at: a step; None means the newest committed. min_lease_slots: since PROMISE_MINOR.

    Result: mapping {handle, name, schema, layers, experts, committed_step, view_step, epoch, lease_slots, wait_timeout_s}.
    Opening as writer fences the writers before it and rolls back to that step; a prepared one is committed if it is `at`.
    Error: StepPrepared, to a writer without `at` while a step is prepared; CapacityError where fewer slots than asked for are left.
    """

    ADDED_FIELDS: ClassVar[int] = 1

    id: int
    name: str
    mode: str
    at: int | None = None
    host_bytes: int | None = None
    min_lease_slots: int = 0


class CreateRank(CreateNamespace, tag="create_rank"):
    """As CreateNamespace, by one of `world_size` ranks that write together. `group` names this start of the job.

    Answered when all ranks have sent it with equal arguments. Error: StepMismatch if they differ, or one does not come in time.
    """

    rank: int = 0
    world_size: int = 1
    group: str = ""


class OpenRank(Message, tag="open_rank"):
    """As OpenNamespace of mode "write", by one of `world_size` ranks that write together; see CreateRank."""

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
    id: int
    handle: int


class Refresh(Message, tag="refresh"):
    """Moves a reader to the newest committed step. Result: the step."""

    id: int
    handle: int


class OpenUpload(Message, tag="upload"):
    """Asks for `size_bytes` more of writable memory for this session. Answered by Uploaded, or Failed(CapacityError)."""

    id: int
    size_bytes: int


class InitializeBegin(Message, tag="init_begin"):
    """Starts the namespace over, at no record at all; `is_resumed` (from minor 3 on): at those that its draft has.

    Result: mapping {present, extra}: a bit per key in key order, lowest first, that is set if the key has its value; and what
    the draft was saved with, None without one. Error: StepOutOfOrder once it has a committed step.
    """

    ADDED_FIELDS: ClassVar[int] = 1

    id: int
    handle: int
    is_resumed: bool = False


class InitializePut(Message, tag="init_put"):
    """Initial values of one key, laid out as `schema.initial_fields()` at `offset_bytes` of an upload segment.

    Answered when the bytes have been taken; the range may be reused then.
    """

    id: int
    handle: int
    key: Key
    segment: int
    offset_bytes: int


class InitializeSave(Message, tag="init_save"):
    """Makes the values put so far durable as the namespace's draft, for an initialization that resumes. From minor 3 on.

    Result: {records, bytes_written, seconds}, once durable: of those that no draft had. Error: StepOutOfOrder outside of an
    initialization.
    """

    id: int
    handle: int
    extra: bytes = b""


class InitializeEnd(Message, tag="init_end"):
    """Answered when every key has a whole record on a volume. Error: StepFailed naming a key that was never put."""

    id: int
    handle: int


class Prefetch(Message, tag="prefetch"):
    """Result: {loaded, resident, skipped, bytes}: keys it loaded, had already, had no room for; bytes moved."""

    id: int
    handle: int
    keys: Keys
    part: str
    deadline_s: Seconds | None = None


class Acquire(Message, tag="acquire"):
    """All keys or none. Answered by Granted; the lease is named by this request's id until released."""

    id: int
    handle: int
    keys: Keys
    part: str
    timeout_s: Seconds


class Release(Message, tag="release"):
    """One-way: ends leases. An id that names no lease is ignored (it was cancelled or its namespace closed)."""

    leases: list[int]


class Cancel(Message, tag="cancel"):
    """One-way: cancels the request `target` if it can still be; its own answer says what became of it."""

    target: int


class Push(Message, tag="push"):
    """Pending gradients of keys that had none: (layer, expert, segment, offset), laid out as `schema.gradient_fields()`.

    All entries or none. The ranges belong to the daemon until the apply or abort that consumes them is answered.
    is_last: an apply is open, which may update these keys from now on: also keys that have a gradient, with their places. Since
    TRAINING_MINOR.
    """

    ADDED_FIELDS: ClassVar[int] = 1

    id: int
    handle: int
    entries: list[tuple[int, int, int, int]]
    is_last: bool = False


class GradientNorm(Message, tag="norm"):
    """Result: the L2 norm over everything pending in the namespace, a float."""

    id: int
    handle: int


class Abort(Message, tag="abort"):
    """Drops pending gradients, and an open apply that has claimed none. Result: how many keys had some."""

    id: int
    handle: int


class WriteBack(Message, tag="write_back"):
    """Result: {written, bytes}. keys None: all that are dirty."""

    id: int
    handle: int
    keys: Keys | None = None


class Evict(Message, tag="evict"):
    """Result: {evicted, skipped: [[layer, expert], ...]}; skipped ones are leased or in use."""

    id: int
    handle: int
    keys: Keys | None = None
    part: str | None = None


class Protect(Message, tag="protect"):
    """A wish to keep `param` copies of these keys (is_wanted) or its end (not is_wanted)."""

    id: int
    handle: int
    keys: Keys
    is_wanted: bool


class DeclareSchedule(Message, tag="schedule"):
    """In which cycles of (layer, kind) the client visits its layers, by part; both empty: it takes that back. Kinds: `core.visits`.

    Result: None. Error: ConfigError, naming the first visit that is of no layer or kind. Ends with the handle.
    """

    id: int
    handle: int
    param_visits: VisitPairs = ()
    optim_visits: VisitPairs = ()


class Commit(Message, tag="commit"):
    """Result: {step, records, bytes_written, seconds}, once durable."""

    id: int
    handle: int
    step: int
    extra: bytes = b""


class Prepare(Commit, tag="prepare"):
    """Result: as of Commit, once durable; the step is committed by Finalize. Error: StepPrepared if one is prepared."""


class Finalize(Message, tag="finalize"):
    """Result: None; the prepared `step` is committed. Error: StepOutOfOrder if another step, or none, is prepared."""

    id: int
    handle: int
    step: int


class Steps(Message, tag="steps"):
    """Result: the steps that can be opened, oldest first."""

    id: int
    handle: int


class Extra(Message, tag="extra"):
    """Result: the bytes committed with `step`. Error: StepDropped."""

    id: int
    handle: int
    step: int


class Rollback(Message, tag="rollback"):
    """Result: the new epoch."""

    id: int
    handle: int
    step: int


class Snapshot(Message, tag="snapshot"):
    """Result: None; `step` stays until DropSnapshot. Error: StepDropped, CapacityError."""

    id: int
    handle: int
    step: int


class DropSnapshot(Message, tag="drop_snapshot"):
    """Result: None. Error: StepDropped if `step` is no snapshot."""

    id: int
    handle: int
    step: int


class Snapshots(Message, tag="snapshots"):
    """Result: the steps that are snapshots, oldest first."""

    id: int
    handle: int


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
    """Result: {layers, experts, optim: [...], param: [...], heat: [...]} per key in key order (see engine.store)."""

    id: int
    handle: int


class Stats(Message, tag="stats"):
    """Result: the daemon's counters and sizes, a mapping; see docs/protocol.md."""

    id: int


class Verify(Message, tag="verify"):
    """Reads and checks records where they lie; one at a time. namespace None: all; keys None: all of it.

    Result, once all are checked: {namespaces, bytes_per_s, state, records, records_total, bytes_read, bytes_total,
    superseded, found, findings, seconds}. Damage is a finding, not an error.
    """

    id: int
    namespace: str | None = None
    keys: Keys | None = None
    bytes_per_s: int | None = None


class TraceBegin(Message, tag="trace_begin"):
    """From now on the daemon logs transfers for this session. Result: None."""

    id: int


class TraceEnd(Message, tag="trace_end"):
    """Result: {transfers, dropped, now_s}: those submitted since `TraceBegin` that have ended, as [kind, namespace, layer, expert,
    urgency, bytes, submitted_s, started_s, ended_s]; times are CLOCK_MONOTONIC."""

    id: int


class Unmapped(Message, tag="unmapped"):
    """One-way: the client has unmapped these segments."""

    segments: list[int]


class DeviceReport(Message, tag="device"):
    """One-way: what the client's HBM tier holds now, and keys it used there since the last report."""

    handle: int
    resident: Keys
    touched: Keys
    bytes_resident: int


Request = (
    Hello | Namespaces | CreateNamespace | OpenNamespace | CreateRank | OpenRank | CloseNamespace | Refresh | OpenUpload
    | InitializeBegin | InitializePut | InitializeSave | InitializeEnd | Prefetch | Acquire | Release | Cancel | Push
    | GradientNorm | Apply | BeginApply | EndLayers | AwaitRoom | EndApply | Abort | WriteBack | Evict | Protect | DeclareSchedule
    | Commit | Prepare | Finalize | Steps | Extra | Rollback | Snapshot | DropSnapshot | Snapshots | Read | Residency | Stats
    | Verify | TraceBegin | TraceEnd | Unmapped | DeviceReport
)  # fmt: skip
