"""A rank of a job whose experts are spread over its ranks, that goes wrong as it is told.

`-m paramstore_testkit.training.parallel_rank ADDRESS PORT RANK WORLD_SIZE START FAULT VICTIM`: at PORT the ranks meet, START
names the job's start, FAULT is one of FAULTS, at the second step of rank VICTIM. It writes one line of JSON: what it raised, after
how many seconds, how many slots were leased then, and a digest of the experts.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from xxhash import xxh3_64_hexdigest

import paramstore_client as ps
from paramstore_client.moe.exchange import FlatExchange
from paramstore_testkit.training.toy_moe import EXPERTS, FIELDS, LAYERS, batch, initial_value, make_stored

STEPS = 3
FAULT_STEP = 2
LIMIT_S = 6.0
"""How long ranks wait for each other, in exchanges and in the daemon."""
FAULTS = ("none", "kill in dispatch", "kill in backward", "kill before apply", "stop in dispatch", "one forward less")


def main() -> None:
    address, port, rank, world_size, start, fault, victim = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=int(rank), world_size=int(world_size))
    told: dict[str, Any] = {"rank": int(rank)}
    with ps.connect(address) as store:
        namespace = _opened(store, {"rank": int(rank), "world_size": int(world_size), "group": start})
        model = make_stored(namespace, parallel=ps.moe.ExpertParallel(timeout_s=LIMIT_S))
        is_victim = fault != "none" and rank == victim
        assert namespace.committed_step is not None
        began_s = time.monotonic()
        try:
            for step in range(namespace.committed_step + 1, STEPS + 1):
                began_s = time.monotonic()
                _step(model, namespace, step, int(rank), int(world_size), fault if is_victim and step == FAULT_STEP else "none")
            told["digest"] = _digest(namespace)
        except ps.ParamStoreError as error:
            told |= {"error": type(error).__name__, "message": str(error), "seconds": time.monotonic() - began_s}
            told["leased"] = store.stats()["namespaces"]["moe"]["leased_slots"]
    sys.stdout.write(json.dumps(told) + "\n")
    sys.stdout.flush()


def _opened(store: ps.Store, group: dict[str, Any]) -> ps.Namespace:
    if any(known["committed_step"] is not None for known in store.namespaces()):
        return store.open_namespace("moe", mode="write", **group)
    schema = ps.adamw_schema(FIELDS, param_dtype="float32")
    namespace = store.create_namespace("moe", schema, layers=LAYERS, experts=EXPERTS, **group)
    namespace.initialize(initial_value)
    namespace.commit(0).wait()
    return namespace


def _step(model: torch.nn.Module, namespace: ps.Namespace, step: int, rank: int, world_size: int, fault: str) -> None:
    """Trains one step, which it commits; the dense part stays as it is."""
    if fault in ("kill in dispatch", "stop in dispatch"):
        _at_exchange(1, signal.SIGKILL if fault.startswith("kill") else signal.SIGSTOP)
    if fault == "kill in backward":
        _at_exchange(2 * LAYERS + 2, signal.SIGKILL)
    if fault != "one forward less":
        model(batch(step * world_size + rank)).backward()
    if fault == "kill before apply":
        os.kill(os.getpid(), signal.SIGKILL)
    namespace.gradient_norm()
    namespace.apply(ps.AdamW(lr=1e-2)).wait()
    namespace.commit(step).wait()


def _at_exchange(number: int, what: signal.Signals) -> None:
    """Has a signal sent to this process when its rows are exchanged for the `number`-th time from now."""
    exchange: Callable[..., Any] = FlatExchange.start_rows
    left = [number]

    def start_rows(self: FlatExchange, *arguments: Any, **options: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), what)
        return exchange(self, *arguments, **options)

    FlatExchange.start_rows = start_rows  # type: ignore[method-assign]


def _digest(namespace: ps.Namespace) -> str:
    """Gives one checksum of every field of every record, moments too, as they are committed."""
    records = [namespace.read(key) for key in namespace.space]
    return xxh3_64_hexdigest(b"".join(value.numpy().tobytes() for record in records for value in record.values()))


if __name__ == "__main__":
    main()
