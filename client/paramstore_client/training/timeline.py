"""One picture of a few training steps: what the model and its experts computed, what ranks fetched, summed and exchanged, what
the store moved.

A `Timeline` joins torch's profiler with the daemon's log of transfers into one Chrome trace (open it in Perfetto or
chrome://tracing), on one clock: both processes run on one node, so CLOCK_MONOTONIC is theirs in common. Its report says how much of
the moving lay beside computing: what the two dimensions of MoESys' prefetch (arXiv 2205.10034, section 3.2.2) are for.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, runtime_checkable

import torch
from torch.profiler import ProfilerActivity, profile

from paramstore.core import arguments
from paramstore_client.ranges import ACQUIRE, EXCHANGE, EXPERTS, PUSH
from paramstore_client.training.intervals import Interval, common, length, union

COMPUTE = ("aten::mm", "aten::addmm", "aten::bmm", "aten::_grouped_mm", "aten::_scaled_dot_product", "aten::linear")
"""Ops whose time counts as computing: the matrix products, which are nearly all of a step's work."""
DENSE = ("gloo:all_gather", "gloo:_allgather_base", "nccl:all_gather", "nccl:_all_gather_base", "ncclDevKernel_AllGather")
"""Names under which the profiler sees FSDP2's unsharding of dense slices: its fused gathers."""
BUCKETS = (
    "gloo:all_reduce", "gloo:reduce", "nccl:all_reduce", "nccl:_reduce_scatter_base", "nccl:reduce_scatter",
    "ncclDevKernel_AllReduce", "ncclDevKernel_ReduceScatter",
)  # fmt: skip
"""Names of what sums gradients over ranks, a bucket at a time: DDP's all-reduces, FSDP2's reduce-scatters, which gloo makes of
all-reduces. Whatever else a loop reduces has these names too."""
EXCHANGES = (EXCHANGE, "gloo:all_to_all", "nccl:all_to_all", "ncclDevKernel_SendRecv")
"""Names of expert-parallel exchanges, of rows and of the messages before them: under way, and waited for."""
DAEMON_PID = 1 << 30
"""Process id of the daemon's row in the picture: a number that no process has."""
LOADS = ("load_param", "load_working", "materialise", "advance")


@runtime_checkable
class TransferSource(Protocol):
    """A store that can say what it moved."""

    def trace_begin(self) -> None: ...

    def trace_end(self) -> Mapping[str, Any]: ...


@dataclass(frozen=True, slots=True)
class Beside:
    """Time of moves of one kind. seconds: with at least one of them under way. beside_compute_s: of these, those in which the
    model computed."""

    seconds: float
    beside_compute_s: float

    @property
    def fraction(self) -> float:
        """Fraction of the time that lay beside computing; 0 where nothing moved."""
        return self.beside_compute_s / self.seconds if self.seconds else 0.0


@dataclass(frozen=True, slots=True)
class Overlap:
    """How moving overlapped with computing. compute_s: all computing. dense: unsharding of dense slices, the horizontal dimension;
    buckets: gradients summed over ranks; exchanges: tokens on their way to other ranks' experts, and back;
    prefetches: experts loaded ahead of use, the vertical one; demands: experts a layer waited for; write_backs: records written;
    updates: records that an optimizer stepped. experts_s: in which experts computed; acquires_s: in which a lease was waited for;
    pushes_s: in which gradients were pushed. transfers_dropped: moves that the daemon's log had no room for."""

    compute_s: float
    experts_s: float
    acquires_s: float
    pushes_s: float
    dense: Beside
    buckets: Beside
    exchanges: Beside
    prefetches: Beside
    demands: Beside
    updates: Beside
    write_backs: Beside
    transfers_dropped: int


class Timeline:
    """Records what happens inside its `with`; afterwards the file is there and `overlap` says what it shows.

    store: a `Store` whose daemon serves the experts. path: of the Chrome trace; written at the end of the block, also where an
    error ends it. The profiler slows small ops by a few microseconds each: a timeline is for looking, not for timing.

        with ps.training.Timeline(store, "steps.json") as timeline:
            train(steps=3)
        print(timeline.overlap)
    """

    def __init__(self, store: TransferSource, path: str | Path) -> None:
        if not isinstance(store, TransferSource):
            raise arguments.wrong("store", store, "the store that ps.connect(...) gave")
        self._store = store
        self._path = Path(arguments.path("path", path))
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
        self._profile = profile(activities=activities)
        self._overlap: Overlap | None = None

    @property
    def overlap(self) -> Overlap:
        """The overlap in the picture of the block, which must have ended."""
        assert self._overlap is not None, "the block has not ended"
        return self._overlap

    def __enter__(self) -> Timeline:
        self._store.trace_begin()
        self._profile.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._profile.stop()
        log = self._store.trace_end()
        with tempfile.TemporaryDirectory(dir=self._path.parent) as folder:
            profiled = Path(folder, "profile.json")
            self._profile.export_chrome_trace(str(profiled))
            picture = json.loads(profiled.read_text())
        base_s = picture.get("baseTimeNanoseconds", 0) / 1e9
        shift_s = time.time() - time.monotonic() - base_s  # from the daemon's clock to the picture's
        moves = [_event(row, shift_s) for row in log["transfers"]]
        self._overlap = find_overlap(picture["traceEvents"], moves, dropped=log["dropped"])
        picture["traceEvents"] += [*_names(moves), *moves]
        self._path.write_text(json.dumps(picture))


def _event(row: list[Any], shift_s: float) -> dict[str, Any]:
    """A row of the daemon's log as an event of the picture."""
    kind, namespace, layer, expert, urgency, bytes_moved, submitted_s, started_s, ended_s = row
    return {
        "ph": "X", "cat": "paramstore", "name": kind, "pid": DAEMON_PID, "tid": f"{kind} ({urgency})",
        "ts": (started_s + shift_s) * 1e6, "dur": (ended_s - started_s) * 1e6,
        "args": {
            "namespace": namespace, "layer": layer, "expert": expert, "urgency": urgency, "bytes": bytes_moved,
            "queued_us": (started_s - submitted_s) * 1e6,
        },
    }  # fmt: skip


def _names(moves: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"ph": "M", "name": "process_name", "pid": DAEMON_PID, "args": {"name": "paramstore daemon"}}] if moves else []


def find_overlap(events: Iterable[Mapping[str, Any]], moves: Iterable[Mapping[str, Any]], *, dropped: int) -> Overlap:
    """How much of each kind of moving lies beside computing. events: those of torch's profiler; moves: as the picture has them."""
    whole = [event for event in events if event.get("ph") == "X" and "dur" in event]
    compute = union(_named(whole, *COMPUTE))
    moves = list(moves)

    def beside(intervals: Iterable[Interval]) -> Beside:
        merged = union(intervals)
        return Beside(length(merged), length(common(merged, compute)))

    def moved(kinds: tuple[str, ...], urgency: str | None = None) -> Beside:
        return beside(
            _intervals(
                move for move in moves
                if move["name"] in kinds and (urgency is None or move["args"]["urgency"] == urgency)
            )
        )  # fmt: skip

    return Overlap(
        compute_s=length(compute), experts_s=length(union(_named(whole, EXPERTS))),
        acquires_s=length(union(_named(whole, ACQUIRE))), pushes_s=length(union(_named(whole, PUSH))),
        dense=beside(_named(whole, *DENSE)), buckets=beside(_named(whole, *BUCKETS)), exchanges=beside(_named(whole, *EXCHANGES)),
        prefetches=moved(LOADS, "prefetch"), demands=moved(LOADS, "demand"),
        updates=moved(("update",)), write_backs=moved(("write",)), transfers_dropped=dropped,
    )  # fmt: skip


def _named(events: Iterable[Mapping[str, Any]], *names: str) -> list[Interval]:
    """The intervals of the events whose names begin with one of `names`."""
    return _intervals(event for event in events if str(event["name"]).startswith(names))


def _intervals(events: Iterable[Mapping[str, Any]]) -> list[Interval]:
    """The intervals of `events` in seconds, on the picture's clock."""
    return [(event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6) for event in events]
