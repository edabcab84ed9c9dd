"""Every message that crosses the socket. `docs/protocol.md` describes the conversation; these messages are the contract.

A request carries `id`, chosen by the client, unique among its unanswered requests, never 0. The daemon answers each with one
`Done`, `Granted`, `GrantedExtents`, `Lent`, `Uploaded` or `Failed` of the same id, in any order: a ticket stands for one request.
`Release`, `GiveBack`, `Cancel`, `Unmapped`, `DeviceReport` and `ExtentModes` are one-way. Unasked the daemon sends `Unmap` (before
minor 4 also `LeaseSlots`), and `Failed` with id 0, which says why it hangs up.

Descriptors travel by SCM_RIGHTS at the first byte of the frame that names their segments, in that order, to the client only.
"""

from __future__ import annotations

from paramstore.wire.answers import Answer as Answer
from paramstore.wire.answers import Done as Done
from paramstore.wire.answers import Failed as Failed
from paramstore.wire.answers import Granted as Granted
from paramstore.wire.answers import GrantedExtents as GrantedExtents
from paramstore.wire.answers import LeaseSlots as LeaseSlots
from paramstore.wire.answers import Lent as Lent
from paramstore.wire.answers import Unmap as Unmap
from paramstore.wire.answers import Uploaded as Uploaded
from paramstore.wire.applies import Apply as Apply
from paramstore.wire.applies import AwaitRoom as AwaitRoom
from paramstore.wire.applies import BeginApply as BeginApply
from paramstore.wire.applies import EndApply as EndApply
from paramstore.wire.applies import EndLayers as EndLayers
from paramstore.wire.base import ABSENT_MINOR as ABSENT_MINOR
from paramstore.wire.base import BOUND_MINOR as BOUND_MINOR
from paramstore.wire.base import EXTENT_KEYS_MAX as EXTENT_KEYS_MAX
from paramstore.wire.base import EXTENTS_MINOR as EXTENTS_MINOR
from paramstore.wire.base import EXTRA_BYTES_MAX as EXTRA_BYTES_MAX
from paramstore.wire.base import FOLLOW_MINOR as FOLLOW_MINOR
from paramstore.wire.base import HEAT_MINOR as HEAT_MINOR
from paramstore.wire.base import KEYS_MAX as KEYS_MAX
from paramstore.wire.base import LABEL_MAX as LABEL_MAX
from paramstore.wire.base import LOANS_MINOR as LOANS_MINOR
from paramstore.wire.base import MAGIC as MAGIC
from paramstore.wire.base import PREPARE_MINOR as PREPARE_MINOR
from paramstore.wire.base import PROMISE_MINOR as PROMISE_MINOR
from paramstore.wire.base import PROTOCOL_MAJOR as PROTOCOL_MAJOR
from paramstore.wire.base import PROTOCOL_MINOR as PROTOCOL_MINOR
from paramstore.wire.base import ROOM_MINOR as ROOM_MINOR
from paramstore.wire.base import SEGMENTS_PER_FRAME_MAX as SEGMENTS_PER_FRAME_MAX
from paramstore.wire.base import STEP_WAITS_MAX as STEP_WAITS_MAX
from paramstore.wire.base import STEPS_MINOR as STEPS_MINOR
from paramstore.wire.base import TRAINING_MINOR as TRAINING_MINOR
from paramstore.wire.base import VERIFY_MINOR as VERIFY_MINOR
from paramstore.wire.base import VISITS_MAX as VISITS_MAX
from paramstore.wire.base import Key as Key
from paramstore.wire.base import Keys as Keys
from paramstore.wire.base import Message as Message
from paramstore.wire.base import VisitPairs as VisitPairs
from paramstore.wire.requests import Abort as Abort
from paramstore.wire.requests import Acquire as Acquire
from paramstore.wire.requests import AcquireExtents as AcquireExtents
from paramstore.wire.requests import Borrow as Borrow
from paramstore.wire.requests import Cancel as Cancel
from paramstore.wire.requests import CloseNamespace as CloseNamespace
from paramstore.wire.requests import CreateNamespace as CreateNamespace
from paramstore.wire.requests import CreateRank as CreateRank
from paramstore.wire.requests import DeclareSchedule as DeclareSchedule
from paramstore.wire.requests import DeviceReport as DeviceReport
from paramstore.wire.requests import Evict as Evict
from paramstore.wire.requests import ExtentModes as ExtentModes
from paramstore.wire.requests import GiveBack as GiveBack
from paramstore.wire.requests import GradientNorm as GradientNorm
from paramstore.wire.requests import Hello as Hello
from paramstore.wire.requests import InitializeBegin as InitializeBegin
from paramstore.wire.requests import InitializeEnd as InitializeEnd
from paramstore.wire.requests import InitializePut as InitializePut
from paramstore.wire.requests import InitializeSave as InitializeSave
from paramstore.wire.requests import Namespaces as Namespaces
from paramstore.wire.requests import OpenNamespace as OpenNamespace
from paramstore.wire.requests import OpenRank as OpenRank
from paramstore.wire.requests import OpenUpload as OpenUpload
from paramstore.wire.requests import Prefetch as Prefetch
from paramstore.wire.requests import Protect as Protect
from paramstore.wire.requests import Push as Push
from paramstore.wire.requests import Read as Read
from paramstore.wire.requests import Release as Release
from paramstore.wire.requests import Request as Request
from paramstore.wire.requests import Residency as Residency
from paramstore.wire.requests import Stats as Stats
from paramstore.wire.requests import TraceBegin as TraceBegin
from paramstore.wire.requests import TraceEnd as TraceEnd
from paramstore.wire.requests import Unmapped as Unmapped
from paramstore.wire.requests import Verify as Verify
from paramstore.wire.requests import WriteBack as WriteBack
from paramstore.wire.steps import AwaitStep as AwaitStep
from paramstore.wire.steps import Commit as Commit
from paramstore.wire.steps import DropSnapshot as DropSnapshot
from paramstore.wire.steps import Extra as Extra
from paramstore.wire.steps import Finalize as Finalize
from paramstore.wire.steps import Prepare as Prepare
from paramstore.wire.steps import Refresh as Refresh
from paramstore.wire.steps import Rollback as Rollback
from paramstore.wire.steps import Snapshot as Snapshot
from paramstore.wire.steps import Snapshots as Snapshots
from paramstore.wire.steps import Steps as Steps
