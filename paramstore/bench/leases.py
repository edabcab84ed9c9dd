"""Measures the control plane: the time of `acquire` and release of 64 resident keys, and that no byte is copied on the way.

Idle: nothing else runs, calls come back to back, releases are one-way. Loaded: another client reads the volume at full speed,
and calls are paced, since calls back to back would take the cores that the loads need.
"""

from __future__ import annotations

import gc
import os
import threading
from statistics import median
from typing import TYPE_CHECKING

import torch

import paramstore as ps
from paramstore.bench.context import Bench
from paramstore.bench.limits.echo import Echo, time_calls
from paramstore.bench.pairs import Pairs, Sample, percentile, sample_pairs
from paramstore.bench.plan import MIB
from paramstore.bench.process import cpu_s, rss_anon_bytes
from paramstore.bench.report.rows import SUBJECT, Row, Target, judged
from paramstore.bench.service.daemon import Service, serving
from paramstore.bench.service.experts import create_param_namespace, keys_of, param_schema
from paramstore.bench.service.stream import Stream
from paramstore.core.schema import PAGE_BYTES, Schema

if TYPE_CHECKING:
    from paramstore_client import Namespace

MICRO = 1e6
P50_IDLE_US_MAX, P99_LOADED_US_MAX = 200.0, 2000.0
SIZE_RATIO_MIN = 0.90
"""Least rate with large records over that with small ones. It should not depend on the size; two medians add some noise."""
PRIVATE_SHARE_MAX = 0.01
PACE_S = 0.001
WARM_UP_CALLS = 200
SPARE_KEYS = 4
"""Spare experts: one for each so many that are leased, since a lease may hold all slots but a reserve."""
SEGMENT_SPARE_BYTES = 64 * MIB
"""Spare bytes of the host budget, since arenas grow by whole segments."""


class Leases:
    """Calls of `acquire` and release for all keys of one namespace, everything resident."""

    def __init__(self, bench: Bench, service: Service, namespace: Namespace, schema: Schema) -> None:
        self._bench = bench
        self._service = service
        self._namespace = namespace
        self._keys = keys_of(bench.plan.latency_key_count)
        self.record_bytes = schema.record_bytes

    def acquire_and_release(self) -> None:
        self._namespace.acquire(self._keys, part="param").release()

    def p50(self, _: int) -> Sample:
        """Times a block of calls back to back; its seconds are the median's times the count. parts: CPU a call, of both sides."""
        count = self._bench.plan.latency_calls // self._bench.plan.rounds
        daemon_cpu_s, client_cpu_s = self._service.cpu_s(), cpu_s(os.getpid())
        seconds = time_calls(self.acquire_and_release, count, self._bench.clock)
        parts = {
            "daemon_cpu_us": (self._service.cpu_s() - daemon_cpu_s) / count * MICRO,
            "client_cpu_us": (cpu_s(os.getpid()) - client_cpu_s) / count * MICRO,
            "p99_us": percentile(seconds, 99) * MICRO,
        }
        return Sample(count, median(seconds) * count, parts=parts)

    def paced(self, duration_s: float) -> list[float]:
        """Makes one call every PACE_S; gives the seconds of each."""
        pause, seconds = threading.Event(), []
        end_s = self._bench.clock.now_s() + duration_s
        while self._bench.clock.now_s() < end_s:
            seconds += time_calls(self.acquire_and_release, 1, self._bench.clock)
            pause.wait(PACE_S)
        return seconds

    def private_share(self) -> tuple[float, float]:
        """Measures by how many bytes private memory grows while all leased bytes are read: as a share of them, and in bytes."""
        leased_bytes = len(self._keys) * self.record_bytes
        gc.collect()
        before_bytes = rss_anon_bytes(os.getpid())
        with self._namespace.acquire(self._keys, part="param") as lease:
            for key in self._keys:
                for tensor in lease[key].values():
                    tensor.view(torch.uint8).flatten()[::PAGE_BYTES].sum().item()
            grown_bytes = rss_anon_bytes(os.getpid()) - before_bytes
        return max(0, grown_bytes) / leased_bytes, leased_bytes


def measure_leases(bench: Bench) -> list[Row]:
    """Makes the rows: latency idle and loaded, independence of the record's size, private memory."""
    with bench.folder("store") as folder:
        schemas = [_schema_of(record_bytes) for record_bytes in bench.plan.latency_record_bytes]
        stream_schema = param_schema(bench.plan.expert_size)
        key_count = bench.plan.latency_key_count
        expert_count = key_count + key_count // SPARE_KEYS
        host_bytes = [schema.record_bytes * expert_count + SEGMENT_SPARE_BYTES for schema in schemas]
        stream_bytes = stream_schema.record_bytes * bench.plan.stream_records + SEGMENT_SPARE_BYTES
        with serving(folder, host_budget_bytes=sum(host_bytes) + stream_bytes) as service:
            bench.tell("leases: records are stored")
            namespaces = [
                create_param_namespace(service.store, f"leases-{i}", schema, expert_count, host_bytes=host_bytes[i])
                for i, schema in enumerate(schemas)
            ]
            service.wait_until_quiet(bench.clock)
            small, large = (Leases(bench, service, *pair) for pair in zip(namespaces, schemas, strict=True))
            bench.tell("leases: idle")
            rows = _idle_rows(bench, small, large)
            bench.tell("leases: while the volume is read at full speed")
            create_param_namespace(service.store, "stream", stream_schema, bench.plan.stream_records).close()
            service.wait_until_quiet(bench.clock)
            return [*rows, _loaded_row(bench, service, small), _private_row(large)]


def _schema_of(record_bytes: int) -> Schema:
    return ps.param_schema({"weight": ((record_bytes // 2,), torch.bfloat16)})


def _idle_rows(bench: Bench, small: Leases, large: Leases) -> list[Row]:
    echo = Echo(bench.directory / "echo", key_count=bench.plan.latency_key_count)
    try:
        for call in (echo.acquire_and_release, small.acquire_and_release, large.acquire_and_release):
            time_calls(call, WARM_UP_CALLS, bench.clock)

        def bare(_: int) -> Sample:
            count = bench.plan.latency_calls // bench.plan.rounds
            return Sample(count, median(time_calls(echo.acquire_and_release, count, bench.clock)) * count)

        beside_echo = {leases.record_bytes: sample_pairs(bench.plan.rounds, leases.p50, bare) for leases in (small, large)}
    finally:
        echo.close()
    by_size = sample_pairs(bench.plan.rounds, large.p50, small.p50)
    case = f"p50, idle, {bench.plan.latency_key_count} keys"
    return [
        *(
            _latency_row(
                pairs, case=case, record_bytes=record_bytes, against="the same frames, bare",
                target=Target("value", "<=", P50_IDLE_US_MAX),
            )
            for record_bytes, pairs in beside_echo.items()
        ),
        _latency_row(
            by_size, case="independent of record size", record_bytes=large.record_bytes,
            against=f"records of {small.record_bytes >> 10} KiB", target=Target("ratio", ">=", SIZE_RATIO_MIN),
        ),
    ]  # fmt: skip


def _latency_row(pairs: Pairs, *, case: str, record_bytes: int, against: str, target: Target) -> Row:
    """Makes a row of pairs whose work is calls: microseconds a call, ratio of rates (1.0 is as quick)."""
    row = Row(
        name="acquire and release", case=case, subject=SUBJECT, record_bytes=record_bytes, unit="us", against=against,
        value=MICRO / pairs.rate, limit=MICRO / pairs.limit_rate, target=target,
        ratio=pairs.ratio, ratio_min=pairs.ratio_min, ratio_max=pairs.ratio_max,
        parts={
            "ours_us": MICRO / pairs.rate, "limit_us": MICRO / pairs.limit_rate,
            **{part: value for part, value in pairs.parts().items() if part.endswith("_us")},
        },
    )  # fmt: skip
    return judged(row)


def _loaded_row(bench: Bench, service: Service, leases: Leases) -> Row:
    stream = Stream(service.store.address, "stream", experts=bench.plan.stream_records)
    try:
        seconds = leases.paced(bench.plan.loaded_latency_s)
    finally:
        streamed = stream.stop()
    row = Row(
        name="acquire and release", case="p99 while the volume is read at full speed", subject=SUBJECT,
        record_bytes=leases.record_bytes, unit="us", value=percentile(seconds, 99) * MICRO,
        target=Target("value", "<=", P99_LOADED_US_MAX),
        parts={
            "p50_us": percentile(seconds, 50) * MICRO, "p90_us": percentile(seconds, 90) * MICRO,
            "max_us": max(seconds) * MICRO, "calls": len(seconds), "volume_gb_per_s": streamed.rate / 1e9,
        },
    )  # fmt: skip
    return judged(row)


def _private_row(leases: Leases) -> Row:
    share, leased_bytes = leases.private_share()
    row = Row(
        name="private memory of the client", case="grows while a lease is read", subject=SUBJECT,
        record_bytes=leases.record_bytes, unit="of the bytes leased", value=share,
        target=Target("value", "<=", PRIVATE_SHARE_MAX), parts={"leased_bytes": leased_bytes},
    )  # fmt: skip
    return judged(row)
