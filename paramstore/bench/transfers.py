"""Measures records between volume and host through the service, each sample beside raw I/O into memory of the same kind.

- volume to host, `param`: evict all, then prefetch and acquire in random order, as many as one lease may hold; timed from the
  prefetch to the lease granted.
- volume to host, `optim`: evict all, then prefetch all in random order; timed from the prefetch to the ticket done.
- host to volume: make everything dirty, then `write_back` beside raw overwrites, or `commit` beside overwrites and flush.
Checksums are verified by the daemon on every load; one loaded record is compared with what was stored.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import xxhash

from paramstore.bench.context import Bench, row_of_pairs
from paramstore.bench.limits import pages
from paramstore.bench.limits.raw import RawFile
from paramstore.bench.pairs import Pairs, Sample, sample_pairs
from paramstore.bench.plan import LARGE, MIB, RecordSize, shuffled
from paramstore.bench.process import cpu_s
from paramstore.bench.report.plot import READ, WRITE
from paramstore.bench.report.rows import SUBJECT, Row, Target, judged
from paramstore.bench.service.daemon import Service, counted_seconds, serving
from paramstore.bench.service.experts import (
    WAIT_S,
    Gradients,
    adamw_schema,
    check_all,
    create_adamw_namespace,
    create_param_namespace,
    keys_of,
    param_schema,
    param_values,
)
from paramstore.bench.service.footprint import budget_row, memory_row
from paramstore.core.schema import CHUNK_BYTES, Schema
from paramstore.errors import CorruptRecord
from paramstore.limits import RETAINED_STEPS
from paramstore_native import libpmem2

if TYPE_CHECKING:
    from paramstore_client import Namespace

BUDGET_SETS = 3
"""Host budget, in sets of records: all fit, with slots to spare for leases and next versions."""
READ_TARGET_LARGE, READ_TARGET_SMALL, WRITE_TARGET = 0.93, 0.90, 0.90
CPU_ABOVE_RAW_S_PER_GB = 0.05


class Transfers:
    """The records of one namespace, moved as a whole, in a daemon that serves nothing else."""

    def __init__(self, bench: Bench, service: Service, namespace: Namespace, schema: Schema, count: int) -> None:
        self._bench = bench
        self._service = service
        self._namespace = namespace
        self._schema = schema
        self._keys = keys_of(count)
        self._gradients = Gradients(namespace, schema, count) if schema.is_trainable else None
        self._step = 1

    def load_param(self, number: int) -> Sample:
        """Evicts all, then times from the prefetch to the lease on all keys granted."""
        self._evict()
        keys = self._order(number)[: self._namespace.lease_slots]
        started = self._start()
        ticket = self._namespace.prefetch(keys, part="param")
        asked_s = self._bench.clock.now_s()
        lease = self._namespace.acquire(keys, part="param", timeout_s=WAIT_S)
        sample = self._finish(started, len(keys) * self._schema.record_bytes)
        with lease:
            if number < 0:
                self._check(keys[0], lease[keys[0]])
        ticket.wait(WAIT_S)
        return replace(sample, parts={**sample.parts, "prefetch_call_s": asked_s - started[0], **self._hand_over(keys)})

    def load_optim(self, number: int) -> Sample:
        """Evicts all, then times from the prefetch to its ticket done."""
        self._evict()
        keys = self._order(number)
        started = self._start()
        result = self._namespace.prefetch(keys, part="optim").wait(WAIT_S)
        sample = self._finish(started, len(keys) * self._schema.record_bytes)
        check_all(len(keys), int(result["loaded"]), what="prefetch of optim")
        return sample

    def write_back(self, number: int) -> Sample:
        """Makes everything dirty, then times until all of it is on the volume (not flushed)."""
        self._make_dirty(number)
        started = self._start()
        result = self._namespace.write_back().wait(WAIT_S)
        sample = self._finish(started, int(result["bytes"]))
        check_all(len(self._keys), int(result["written"]), what="write_back")
        self._commit()
        return sample

    def commit(self, number: int) -> Sample:
        """Makes everything dirty, then times until a commit of it is durable."""
        self._make_dirty(number)
        started = self._start()
        result = self._commit()
        sample = self._finish(started, int(result["bytes_written"]))
        check_all(len(self._keys), int(result["records"]), what="commit")
        return sample

    def _make_dirty(self, number: int) -> None:
        assert self._gradients is not None
        self._gradients.push(number)
        self._gradients.apply()

    def _commit(self) -> dict[str, float]:
        self._step += 1
        return self._namespace.commit(self._step).wait(WAIT_S)

    def _evict(self) -> None:
        check_all(0, len(self._namespace.evict().wait(WAIT_S)["skipped"]), what="keys that evict skipped")

    def _order(self, number: int) -> list[tuple[int, int]]:
        return [self._keys[index] for index in shuffled(len(self._keys), seed=number)]

    def _start(self) -> tuple[float, float, float, dict[str, object]]:
        counters = self._service.stats()
        own_cpu_s, daemon_cpu_s = cpu_s(os.getpid()), self._service.cpu_s()
        return self._bench.clock.now_s(), own_cpu_s, daemon_cpu_s, counters

    def _finish(self, started: tuple[float, float, float, dict[str, object]], work_bytes: int) -> Sample:
        seconds = self._bench.clock.now_s() - started[0]
        daemon_cpu_s, own_cpu_s = self._service.cpu_s() - started[2], cpu_s(os.getpid()) - started[1]
        self._service.watch_budget()
        parts = {"client_cpu_s": own_cpu_s, **counted_seconds(started[3], self._service.stats())}
        return Sample(work_bytes, seconds, daemon_cpu_s, parts)

    def _hand_over(self, keys: list[tuple[int, int]]) -> dict[str, float]:
        """Times the same request when all is resident: planning, both messages, mapping."""
        started_s = self._bench.clock.now_s()
        with self._namespace.acquire(keys, part="param", timeout_s=WAIT_S):
            return {"hand_over_s": self._bench.clock.now_s() - started_s}

    def _check(self, key: tuple[int, int], fields: Mapping[str, torch.Tensor]) -> None:
        for name, stored in param_values(self._schema, key).items():
            if not torch.equal(fields[name].view(torch.uint8), stored.view(torch.uint8)):
                raise CorruptRecord(f"key {key}, field {name}: what was loaded is not what was stored")


def measure_volumes(bench: Bench, size: RecordSize) -> list[Row]:
    """Measures the rate of loads from two volumes on the disk, and from a PMem volume on its file system where libpmem2 is there.
    They stand beside one file that is read with O_DIRECT, of which they are no part, so they have no target."""
    places = {"two volumes": ("first", "second")} | ({} if libpmem2.missing_reason() else {"a PMem volume": ("pmem:mapped",)})
    return [
        _measure_param(bench, size, case=f"param from {case}, to lease granted", target=None, volumes=volumes)[0]
        for case, volumes in places.items()
    ]


def measure_param(bench: Bench, size: RecordSize) -> list[Row]:
    """Measures loads of a `param_schema` namespace: rate and the daemon's CPU."""
    return _measure_param(bench, size, case="param, to lease granted", target=_read_target(size))


def _measure_param(
    bench: Bench, size: RecordSize, *, case: str, target: Target | None, volumes: Sequence[str] = ()
) -> list[Row]:
    """volumes: directories beside the store, each with its prefix; none: the store's own."""
    schema = param_schema(size)
    count = bench.plan.record_count(schema.record_bytes)
    with (
        bench.folder("raw") as folder,
        bench.raw_file(folder, pages.param_kind(), record_bytes=schema.record_bytes, record_count=count) as raw,
        bench.folder("store") as store_folder,
        serving(
            store_folder / "store", host_budget_bytes=budget_bytes(schema, count), volumes=_placed(volumes, store_folder)
        ) as service,
    ):
        bench.tell(f"service, param, records of {schema.record_bytes / MIB:.3g} MiB: {count} records are stored")
        namespace = create_param_namespace(service.store, "param", schema, count)
        service.wait_until_quiet(bench.clock)
        transfers = Transfers(bench, service, namespace, schema, count)
        bench.tell(f"service, param, records of {schema.record_bytes / MIB:.3g} MiB: loads")
        pairs = sample_pairs(
            bench.plan.rounds,
            transfers.load_param,
            lambda n: raw.read(shuffled(count, seed=n)[: namespace.lease_slots]),
            warm_up_rounds=2,
        )
        rows = _load_rows(pairs, raw, case=case, target=target)
        return [*rows, budget_row(service, case=f"param, records of {schema.record_bytes / MIB:.3g} MiB")]


def measure_optim(bench: Bench, size: RecordSize) -> list[Row]:
    """Measures loads, write-backs and commits of an `adamw_schema` namespace; the daemon's memory with torch loaded."""
    schema = adamw_schema(size, torch.bfloat16)
    count = bench.plan.record_count(schema.record_bytes)
    with (
        bench.folder("raw") as folder,
        bench.raw_file(folder, pages.optim_kind(), record_bytes=schema.record_bytes, record_count=count) as raw,
        bench.folder("store") as store_folder,
        serving(store_folder, host_budget_bytes=budget_bytes(schema, count)) as service,
    ):
        bench.tell(f"service, optim, records of {schema.record_bytes / MIB:.3g} MiB: {count} records are stored")
        namespace = create_adamw_namespace(service.store, "optim", schema, count)
        service.wait_until_quiet(bench.clock)
        transfers = Transfers(bench, service, namespace, schema, count)
        # Each committed step takes fresh extents until those of dropped steps come back: write all of them once.
        for number in range(RETAINED_STEPS + 1):
            transfers.commit(-1 - number)
        bench.tell(f"service, optim, records of {schema.record_bytes / MIB:.3g} MiB: loads")
        loads = sample_pairs(
            bench.plan.rounds, transfers.load_optim, lambda n: raw.read(shuffled(count, seed=n)), warm_up_rounds=2
        )
        bench.tell(f"service, optim, records of {schema.record_bytes / MIB:.3g} MiB: write-back, commit")
        write_backs = sample_pairs(
            bench.plan.write_rounds, transfers.write_back, lambda n: _unflushed(raw.write(shuffled(count, seed=n)))
        )
        commits = sample_pairs(bench.plan.write_rounds, transfers.commit, lambda n: raw.write(shuffled(count, seed=n)))
        return [
            *_load_rows(loads, raw, case="optim, to ticket done", target=_read_target(size)),
            _write_row(write_backs, raw, case="write_back"),
            _write_row(commits, raw, case="commit, durable"),
            memory_row(service, case=f"torch loaded, records of {schema.record_bytes / MIB:.3g} MiB"),
            budget_row(service, case=f"optim, records of {schema.record_bytes / MIB:.3g} MiB"),
        ]


def _placed(volumes: Sequence[str], folder: Path) -> list[str]:
    """The paths of volumes in `folder`."""
    split = [volume.rpartition(":") for volume in volumes]
    return [f"{kind}{colon}{folder.absolute() / name}" for kind, colon, name in split]


def budget_bytes(schema: Schema, count: int) -> int:
    """The host budget of a daemon whose namespace has `count` such records."""
    param_bytes = schema.part("param").image_bytes
    return BUDGET_SETS * count * (schema.record_bytes + param_bytes) + 256 * MIB


def _read_target(size: RecordSize) -> Target:
    return Target("ratio", ">=", READ_TARGET_LARGE if size == LARGE else READ_TARGET_SMALL)


def _unflushed(sample: Sample) -> Sample:
    return replace(sample, seconds=sample.seconds - sample.parts["flush_s"])


def _load_rows(pairs: Pairs, raw: RawFile, *, case: str, target: Target | None) -> list[Row]:
    """Makes the row of the rate and, from the same pairs, the row of the daemon's CPU."""
    rate = row_of_pairs(
        pairs, name=READ, case=case, subject=SUBJECT, record_bytes=raw.record_bytes, against=raw.name, target=target
    )
    rate.parts["checksum_one_core_s"] = _checksum_s(raw) * raw.record_count
    cpu = Row(
        name="daemon's CPU while loading", case=case, subject=SUBJECT, record_bytes=raw.record_bytes, unit="core-s/GB",
        value=pairs.cpu_s_per_gb, against=f"{raw.name}, its own", limit=pairs.limit_cpu_s_per_gb,
        target=Target("value", "<=", pairs.limit_cpu_s_per_gb + CPU_ABOVE_RAW_S_PER_GB), parts=dict(rate.parts),
    )  # fmt: skip
    return [rate, judged(cpu)]


def _write_row(pairs: Pairs, raw: RawFile, *, case: str) -> Row:
    return row_of_pairs(
        pairs, name=WRITE, case=case, subject=SUBJECT, record_bytes=raw.record_bytes, against=raw.name,
        target=Target("ratio", ">=", WRITE_TARGET),
    )  # fmt: skip


def _checksum_s(raw: RawFile) -> float:
    """Times the checksums of one record (xxh3 by chunks) here, on one core."""
    record = raw.slab.view[: raw.record_bytes]
    started_s = raw.clock.now_s()
    for start in range(0, len(record), CHUNK_BYTES):
        xxhash.xxh3_64_intdigest(record[start : start + CHUNK_BYTES])
    return raw.clock.now_s() - started_s
