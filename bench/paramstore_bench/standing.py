"""Measures visits of keys whose leases stand, beside acquire and release of the same keys: time, bytes sent, what the daemon hears.

That a visit sends nothing is no counter's word: the daemon is stopped meanwhile, and the kernel says how many bytes wait for it.
"""

from __future__ import annotations

import fcntl
import os
import signal
import struct
import termios
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from typing import TYPE_CHECKING

import torch
from msgspec import structs

import paramstore as ps
from paramstore.bench.context import Bench
from paramstore.bench.limits.echo import time_calls
from paramstore.bench.pairs import Sample, percentile, sample_pairs
from paramstore.bench.plan import MIB
from paramstore.bench.report.rows import SUBJECT, Row, Target, judged
from paramstore.bench.service.daemon import Service, serving
from paramstore.bench.service.experts import Key, create_param_namespace, keys_of
from paramstore.errors import LeaseError
from paramstore_client.device.host_slots import REPORT_EVERY, HostSlots

if TYPE_CHECKING:
    from paramstore_client import Namespace

MICRO = 1e6
KEYS_AND_US_MAX = ((64, 25.0), (4, 4.0))
"""Keys of a visit, and the most microseconds that it may take."""
EXPERTS = 96
"""Experts of the namespace: all of them stand."""
RECORD_BYTES = 64 << 10
VISITS_SILENT = REPORT_EVERY // 2
"""Visits in a row after a report, in which nothing is sent; twice as many bring the next report."""
WARM_UP_CALLS = 200


def measure_standing(bench: Bench) -> list[Row]:
    """Makes the rows: the time of a visit for each number of keys, bytes sent within visits, and keys whose use was told."""
    schema = ps.param_schema({"weight": ((RECORD_BYTES // 2,), torch.bfloat16)})
    budget_bytes = 3 * EXPERTS * schema.record_bytes + 64 * MIB
    with bench.folder("store") as folder, serving(folder, host_budget_bytes=budget_bytes) as service:
        bench.tell("standing: records are stored")
        namespace = create_param_namespace(service.store, "standing", schema, EXPERTS)
        service.wait_until_quiet(bench.clock)
        return [
            *(row for count, us_max in KEYS_AND_US_MAX for row in _time_rows(bench, namespace, count, us_max, schema.record_bytes)),
            *_silence_rows(bench, service, namespace),
            _touch_row(bench, namespace),
        ]


def standing_slots(namespace: Namespace, keys: Sequence[Key]) -> HostSlots:
    """Slots in front of a namespace, in which `keys` stand. Raises LeaseError where its daemon or debug mode lets nothing stand."""
    slots = HostSlots(namespace)
    if not namespace.let_stand(slots):
        raise LeaseError(f"nothing may stand in front of {namespace.name!r}: its daemon is too old, or debug mode is on")
    slots.acquire(keys).release()
    return slots


def visit(slots: HostSlots, keys: Sequence[Key]) -> Callable[[], None]:
    """Makes the function that visits `keys` once: the visit begins, finds its keys and ends."""

    def run() -> None:
        with slots.acquire(keys):
            pass

    return run


def visit_and_use(slots: HostSlots | Namespace, keys: Sequence[Key]) -> Callable[[], None]:
    """Makes the function that visits `keys` once and asks for the tensor of each, as a layer does."""

    def run() -> None:
        with slots.acquire(keys) as lease:
            for key in keys:
                lease[key]["weight"]

    return run


def _time_rows(bench: Bench, namespace: Namespace, count: int, us_max: float, record_bytes: int) -> Iterator[Row]:
    """Yields the time of visits alone, and of those in which each key is used; of these nothing is asked."""
    bench.tell(f"standing: {count} keys")
    keys = keys_of(count)
    slots = standing_slots(namespace, keys)
    alone = visit(slots, keys), lambda: namespace.acquire(keys).release()
    used = visit_and_use(slots, keys), visit_and_use(namespace, keys)
    row = _time_row(bench, *alone, case=f"p50, idle, {count} keys that stand", record_bytes=record_bytes)
    yield judged(structs.replace(row, target=Target("value", "<=", us_max)))
    yield _time_row(bench, *used, case=f"p50, idle, {count} keys that stand and are used", record_bytes=record_bytes)
    slots.give_back()


def _time_row(bench: Bench, ours: Callable[[], None], plain: Callable[[], None], *, case: str, record_bytes: int) -> Row:
    calls = bench.plan.latency_calls // bench.plan.rounds
    for call in (ours, plain):
        time_calls(call, WARM_UP_CALLS, bench.clock)

    def sample(call: Callable[[], None]) -> Callable[[int], Sample]:
        def take(_: int) -> Sample:
            seconds = time_calls(call, calls, bench.clock)
            return Sample(calls, median(seconds) * calls, parts={"p99_us": percentile(seconds, 99) * MICRO})

        return take

    pairs = sample_pairs(bench.plan.rounds, sample(ours), sample(plain))
    return Row(
        name="visit", case=case, subject=SUBJECT, record_bytes=record_bytes, unit="us",
        against="acquire and release", value=MICRO / pairs.rate, limit=MICRO / pairs.limit_rate, ratio=pairs.ratio,
        ratio_min=pairs.ratio_min, ratio_max=pairs.ratio_max,
        parts={
            "ours_us": MICRO / pairs.rate, "limit_us": MICRO / pairs.limit_rate,
            "ours_us_min": MICRO / max(pair.ours.rate for pair in pairs.pairs),
            "ours_us_max": MICRO / min(pair.ours.rate for pair in pairs.pairs), "p99_us": pairs.parts()["p99_us"],
        },
    )  # fmt: skip


def _silence_rows(bench: Bench, service: Service, namespace: Namespace) -> list[Row]:
    """Bytes that visits send to a daemon which is stopped: none, and by the next report the few of one message."""
    bench.tell("standing: the daemon is stopped")
    keys = keys_of(KEYS_AND_US_MAX[0][0])
    slots = standing_slots(namespace, keys)
    call = visit(slots, keys)
    while not namespace_is_told(namespace, call):
        pass
    namespace.steps()  # a round trip: what was told has been read
    with stopped(service.pid):
        time_calls(call, VISITS_SILENT, bench.clock)
        silent_bytes = unread_bytes(namespace)
        time_calls(call, REPORT_EVERY - VISITS_SILENT, bench.clock)
        told_bytes = unread_bytes(namespace)
    slots.give_back()
    return [
        judged(
            Row(
                name="bytes sent", case=f"{VISITS_SILENT} visits between two reports", subject=SUBJECT, unit="bytes",
                value=silent_bytes, target=Target("value", "<=", 0), parts={"visits": VISITS_SILENT, "keys": len(keys)},
            )
        ),
        judged(
            Row(
                name="bytes sent", case="with the next report, as the daemon's socket holds them", subject=SUBJECT, unit="bytes",
                value=told_bytes, target=Target("value", ">=", 1), parts={"visits": REPORT_EVERY, "keys": len(keys)},
            )
        ),
    ]  # fmt: skip


def _touch_row(bench: Bench, namespace: Namespace) -> Row:
    """The share of the visited keys whose heat the daemon has raised, less that of those which were not visited."""
    bench.tell("standing: what the daemon hears")
    keys = keys_of(KEYS_AND_US_MAX[1][0])
    slots = standing_slots(namespace, keys)
    before = namespace.residency()["heat"]
    time_calls(visit(slots, keys), REPORT_EVERY, bench.clock)
    after = namespace.residency()["heat"]
    slots.give_back()
    risen = [expert for expert in range(EXPERTS) if after[expert] > before[expert]]
    right = sum(expert < len(keys) for expert in risen)
    row = Row(
        name="uses told", case=f"{len(keys)} keys of {EXPERTS}, {REPORT_EVERY} visits", subject=SUBJECT, unit="of the keys used",
        value=(right - (len(risen) - right)) / len(keys), target=Target("value", ">=", 1.0),
        parts={"keys": len(keys), "risen": right, "risen_unused": len(risen) - right},
    )  # fmt: skip
    return judged(row)


def namespace_is_told(namespace: Namespace, call: Callable[[], None]) -> bool:
    """Visits once; whether that sent a report of what was used."""
    sent: list[object] = []
    report = namespace.report_device

    def note(**told: object) -> None:
        sent.append(told)
        report(**told)  # type: ignore[arg-type]

    namespace.report_device = note  # type: ignore[method-assign]
    try:
        call()
    finally:
        del namespace.report_device
    return bool(sent)


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """Stops a process within the block."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def unread_bytes(namespace: Namespace) -> int:
    """Memory of what this client has sent and its daemon has not read, as the kernel counts it; 0 if there is nothing."""
    size = fcntl.ioctl(namespace._connection._fd, termios.TIOCOUTQ, struct.pack("i", 0))
    return int(struct.unpack("i", size)[0])
