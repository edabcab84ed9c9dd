"""Measures the update phase with the states on the volume: steps of read, update and write back that follow without a pause.

Steady state is what counts: what one step leaves dirty in memory, a later one writes. A step's bound is the time of the same
bytes and parameters at the rates measured beside it, with I/O and AdamW fully overlapped: max(read + write, AdamW). The ratio of
the bound to the step is also that of the bytes a second that the pipeline moves to min(device, AdamW). Neither side flushes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from statistics import median
from typing import TYPE_CHECKING, Any, Protocol

import torch

import paramstore as ps
from paramstore.bench.context import GIGA, Bench
from paramstore.bench.limits import pages
from paramstore.bench.limits.raw import RawFile
from paramstore.bench.pairs import Sample
from paramstore.bench.plan import shuffled
from paramstore.bench.report.rows import SUBJECT, Row, Target, judged
from paramstore.bench.service.daemon import Service, serving
from paramstore.bench.service.experts import TOUCHED, WAIT_S, Key, adamw_schema, create_adamw_namespace, keys_of, random_gradients
from paramstore.bench.update_alone import UpdateAlone
from paramstore.config import Config
from paramstore.core.schema import Schema
from paramstore.engine.capacity.budget import staging_bytes_of
from paramstore.engine.records.update import LOOKAHEAD_RECORDS
from paramstore.engine.tables.arena import segment_lengths
from paramstore.engine.transfers.advance import ADVANCE_LOOKAHEAD_RECORDS

if TYPE_CHECKING:
    from paramstore_client import Namespace

NAMESPACE = "experts"
PIPELINE = "pipeline-sized"
ALL_TOUCHED, QUARTER_TOUCHED = 1.0, 0.25
WARM_UP_STEPS = 2
LIMIT_BYTES, LIMIT_RECORDS_MIN = 640 << 20, 2
"""Bytes and records to sample the limits with: enough that neither disk nor cores start from rest."""
PEER_RATIO_HALF, PEER_RATIO_QUARTER = 1.8, 0.35
OVERLAP_TARGET, PHASE_TARGET = 0.92, 0.85


@dataclass(frozen=True, slots=True)
class Cell:
    """One way of running a step. resident: share of the states that fit beside `param`; None: only the pipeline's slots.
    touched: share of the experts that have gradients, different ones in each step."""

    resident: float | None
    touched: float = ALL_TOUCHED
    rule: str = TOUCHED

    @property
    def case(self) -> str:
        held = PIPELINE if self.resident is None else f"{self.resident:.0%} of the states resident"
        experts = "all experts" if self.touched == ALL_TOUCHED else f"{self.touched:.0%} of the experts"
        return f"{held}, {experts} touched" + ("" if self.rule == TOUCHED else f", {self.rule}")


CELLS = tuple(Cell(resident, touched) for touched in (ALL_TOUCHED, QUARTER_TOUCHED) for resident in (None, 0.25, 0.5, 1.0))


def cells_of(rule: str) -> tuple[Cell, ...]:
    """Lists the cells of a rule: all for `touched`; for another rule only those in which the peers are compared."""
    return CELLS if rule == TOUCHED else tuple(replace(cell, rule=rule) for cell in CELLS if cell.resident in (None, 0.5))


@dataclass(frozen=True, slots=True)
class Rates:
    """Rates of the machine just now: bytes a second of the device, parameters a second of AdamW with all in memory."""

    read: float
    write: float
    update: float

    def bound_s(self, *, read_bytes: float, written_bytes: float, parameters: float) -> float:
        """Shortest time of a step in which everything overlaps; reads and writes share the device."""
        return max(read_bytes / self.read + written_bytes / self.write, parameters / self.update)


@dataclass(frozen=True, slots=True)
class Step:
    """One step of ours beside the bound at that moment, and the peers' steps by name."""

    seconds: float
    bound_s: float
    moved_bytes: float
    peers_s: dict[str, float]


class StepPeer(Protocol):
    """Somebody else's optimizer step over as many parameters, with states on the same disk."""

    @property
    def name(self) -> str: ...

    def step(self) -> float:
        """Makes one step; gives its seconds."""
        ...


class Limits:
    """Measures the rates for the bounds. Owner of records of a raw file, and of records in memory that are updated."""

    def __init__(self, bench: Bench, raw: RawFile, schema: Schema, *, threads: int, records: int) -> None:
        self._raw = raw
        self._alone = UpdateAlone(schema, records, threads=threads, clock=bench.clock)

    def sample(self, number: int) -> Rates:
        order = shuffled(self._raw.record_count, seed=number)
        return Rates(read=self._raw.read(order).rate, write=self._raw.write(order).rate, update=self._alone.step().rate)

    def close(self) -> None:
        self._alone.close()


def host_budget_bytes(schema: Schema, count: int, resident: float | None) -> int:
    """A host budget whose split leaves working slots for that share of `count` records, after `param` for all of them.

    None: the least with which the pipeline has its full depth and every `param` has a slot.
    """
    config, workers = Config(), len(os.sched_getaffinity(0))
    pipeline = min(count, workers + LOOKAHEAD_RECORDS)
    working = max(pipeline, 0 if resident is None else round(count * resident))
    staging_bytes = staging_bytes_of(
        schema, io_threads=config.io_workers, piece_bytes=config.piece_bytes, advance_buffers=workers + ADVANCE_LOOKAHEAD_RECORDS
    )
    params = 2 * count if resident == 1.0 else count
    arenas = ((working, schema.record_bytes), (params, schema.part("param").image_bytes))
    return staging_bytes + sum(sum(segment_lengths(slots, slot_bytes)) for slots, slot_bytes in arenas)


def touched_keys(count: int, share: float, number: int) -> list[Key]:
    """Chooses the experts with gradients in step `number`: the same for equal numbers, others for other numbers."""
    return sorted(Random(number).sample(keys_of(count), max(1, round(count * share))))


@contextmanager
def stepping(bench: Bench, folder: Path, schema: Schema, count: int, cell: Cell) -> Iterator[tuple[Service, Namespace]]:
    """Runs a daemon on the store in `folder` with the cell's budget; opens its namespace for writing, and makes it at first."""
    budget_bytes = host_budget_bytes(schema, count, cell.resident)
    with serving(folder, host_budget_bytes=budget_bytes, settings={"held_steps": 0, "scrub_days": 0}) as service:
        if service.store.namespaces():
            namespace = service.store.open_namespace(NAMESPACE, mode="write")
        else:
            namespace = create_adamw_namespace(service.store, NAMESPACE, schema, count)
        service.wait_until_quiet(bench.clock)
        yield service, namespace


def measure_cell(
    bench: Bench, folder: Path, schema: Schema, count: int, cell: Cell, *, limits: Limits, peers: Sequence[StepPeer], steps: int
) -> list[Row]:
    """Makes the rows of one cell: the phase beside its bound, then the step beside each peer's."""
    bench.tell(f"update phase: {cell.case}")
    with stepping(bench, folder, schema, count, cell) as (service, namespace):
        for number in range(WARM_UP_STEPS):
            _push(namespace, schema, touched_keys(count, cell.touched, -1 - number))
            _apply(namespace)
        taken = [_step(bench, service, namespace, schema, count, cell, limits, peers, number) for number in range(steps)]
        figures = service.stats()
    counted, host = figures["namespaces"][NAMESPACE], figures["tiers"]["host"]
    slots = {
        "optim_slots": float(counted["optim"]["slots"]), "param_slots": float(counted["param"]["slots"]), "records": float(count),
        "host_peak_bytes": float(host["kernel_peak_bytes"]), "host_budget_bytes": float(service.host_budget_bytes),
        "is_native": float(figures["daemon"]["adamw"] == "native"),
    }  # fmt: skip
    return rows_of(cell, taken, schema.record_bytes, slots)


def rows_of(cell: Cell, steps: Sequence[Step], record_bytes: int, facts: dict[str, float]) -> list[Row]:
    """The cell's rows out of its steps."""
    ratios = [step.bound_s / step.seconds for step in steps]
    bound = OVERLAP_TARGET if cell.resident is None and cell.touched == ALL_TOUCHED else PHASE_TARGET
    seconds = median(step.seconds for step in steps)
    parts = {
        **facts, "step_s": seconds, "bound_s": median(step.bound_s for step in steps),
        "moved_bytes": median(step.moved_bytes for step in steps),
    }  # fmt: skip
    phase = Row(
        name="update phase", case=cell.case, subject=SUBJECT, record_bytes=record_bytes, unit="GB/s",
        value=parts["moved_bytes"] / seconds / GIGA, limit=parts["moved_bytes"] / parts["bound_s"] / GIGA,
        against="min(device, AdamW), fully overlapped", ratio=median(ratios), ratio_min=min(ratios), ratio_max=max(ratios),
        target=Target("ratio", ">=", bound) if cell.rule == TOUCHED else None, parts=parts,
    )  # fmt: skip
    names = steps[0].peers_s
    return [judged(phase), *(judged(_peer_row(cell, steps, name, record_bytes)) for name in names)]


def _peer_row(cell: Cell, steps: Sequence[Step], name: str, record_bytes: int) -> Row:
    """Makes the row of a peer. The ratio is our seconds over the peer's: below 1 is faster."""
    ratios = [step.seconds / step.peers_s[name] for step in steps]
    target = None
    if cell.rule != TOUCHED:
        target = None  # the peer's targets are for `touched`; this row stands beside that one
    elif name.endswith("pipelined") and cell.touched == ALL_TOUCHED and cell.resident == 0.5:
        target = Target("ratio", "<=", 1 / PEER_RATIO_HALF)
    elif name.endswith("pipelined") and cell.touched == QUARTER_TOUCHED and cell.resident is None:
        target = Target("ratio", "<=", PEER_RATIO_QUARTER)
    return Row(
        name="optimizer step", case=cell.case, subject=SUBJECT, record_bytes=record_bytes, unit="s",
        value=median(step.seconds for step in steps), limit=median(step.peers_s[name] for step in steps), against=name,
        ratio=median(ratios), ratio_min=min(ratios), ratio_max=max(ratios), target=target,
    )  # fmt: skip


def _step(
    bench: Bench, service: Service, namespace: Namespace, schema: Schema, count: int, cell: Cell, limits: Limits,
    peers: Sequence[StepPeer], number: int,
) -> Step:  # fmt: skip
    """Makes one step; the limits and the peers are sampled before it in even rounds, after it in odd ones."""
    others: dict[str, Any] = {"limits": lambda: limits.sample(number), **{peer.name: peer.step for peer in peers}}
    found: dict[str, Any] = {}
    keys = touched_keys(count, cell.touched, number)

    def ours() -> Sample:
        _push(namespace, schema, keys)
        before, started_s = _moved(service), bench.clock.now_s()
        records = _apply(namespace)
        seconds, after = bench.clock.now_s() - started_s, _moved(service)
        parts = {name: after[name] - before[name] for name in after}
        return Sample(records * schema.parameter_elements, seconds, parts=parts)

    order: list[tuple[str, Callable[[], Any]]] = [("ours", ours), *others.items()]
    for name, take in order if number % 2 else [*order[1:], order[0]]:
        found[name] = take()
    sample: Sample = found["ours"]
    read_bytes, written_bytes = sample.parts["bytes_read"], sample.parts["bytes_written"]
    bound_s = found["limits"].bound_s(read_bytes=read_bytes, written_bytes=written_bytes, parameters=sample.work)
    return Step(sample.seconds, bound_s, read_bytes + written_bytes, {peer.name: found[peer.name] for peer in peers})


def _push(namespace: Namespace, schema: Schema, keys: Sequence[Key]) -> None:
    namespace.push(dict.fromkeys(keys, random_gradients(schema, seed=0)))


def _apply(namespace: Namespace) -> int:
    """Makes one step; gives the number of records that it changed."""
    return int(namespace.apply(ps.AdamW(lr=1e-4)).wait(WAIT_S)["records"])


def _moved(service: Service) -> dict[str, float]:
    figures = service.stats()["namespaces"][NAMESPACE]
    return {name: float(figures[name]) for name in ("bytes_read", "bytes_written")}


def measure_phases(
    bench: Bench, cells: Sequence[Cell], *, param_dtype: torch.dtype, count: int, threads: int, steps: int,
    peers: Sequence[StepPeer],
) -> list[Row]:  # fmt: skip
    """Measures the rows of all cells, over one store of `count` records for each rule."""
    schema = adamw_schema(bench.plan.expert_size, param_dtype)
    sampled = min(count, max(LIMIT_RECORDS_MIN, LIMIT_BYTES // schema.record_bytes))
    rows: list[Row] = []
    with (
        bench.folder("raw") as raw_folder,
        bench.raw_file(raw_folder, pages.optim_kind(), record_bytes=schema.record_bytes, record_count=sampled) as raw,
    ):
        limits = Limits(bench, raw, schema, threads=threads, records=sampled)
        try:
            for rule in dict.fromkeys(cell.rule for cell in cells):
                with bench.folder("store") as folder:
                    made = adamw_schema(bench.plan.expert_size, param_dtype, rule)
                    for cell in (cell for cell in cells if cell.rule == rule):
                        rows += measure_cell(bench, folder, made, count, cell, limits=limits, peers=peers, steps=steps)
        finally:
            limits.close()
    return rows
