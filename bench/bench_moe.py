"""Measures expert-parallel layers with four ranks of gloo on this machine, one thread each: a job that trains through one daemon,
with expert parallelism beside without; one layer beside the all-to-all of transformers, beside one of fixed capacity, and with a
pipeline that is searched for beside the same in one part; tasks of different size spread over ranks beside one on each, where
control groups give each rank a share of a processor (root); exchanges beside the flat one, and a layer in parts beside one in one
and beside its model, over links of a known rate (root alone can make those); what a layer in parts takes of memory, beside
one that keeps all and beside a formula. A run ends where outputs or gradients differ by more than rounding, or other rows are sent
than the routing says.

Run it on an idle machine: `python bench/bench_moe.py [--quick] [--only PARTS] [--dir DIR] [--out FILE]`. The figures go to
bench/results/moe-<date>.json. `--device cuda` measures a layer on one GPU, and on several where there are, in place of the rest.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from collections.abc import Iterator
from functools import partial

import torch

from paramstore.bench.context import Bench
from paramstore.bench.plan import MIB
from paramstore.bench.report.rows import Row
from paramstore.bench.service.daemon import serving
from paramstore.errors import ConfigError
from paramstore_bench.frame import Script
from paramstore_bench.moe.device.rows import DEVICES, MOST_RANKS, device_rows, missing_devices
from paramstore_bench.moe.links import link_rows, missing_links
from paramstore_bench.moe.memory import memory_rows
from paramstore_bench.moe.parts.rows import parts_rows
from paramstore_bench.moe.rows import elastic_row, layer_row, service_rows
from paramstore_bench.moe.service import schema_of
from paramstore_bench.moe.sizes import RANKS, Sizes
from paramstore_bench.moe.task import Part, Task, found_by_ranks
from paramstore_testkit.nodes.quota import missing_reason, open_quotas

SERVICE = Sizes(layers=2, experts=32, width=128, inner=256, tokens=256, top_k=4, skew=0.7)
PEER = (
    Sizes(experts=32, width=128, inner=256, tokens=256, top_k=4, skew=0.7),
    Sizes(experts=32, width=256, inner=512, tokens=512, top_k=4, skew=0.7),
)
CAPACITY = Sizes(experts=16, width=256, inner=1024, tokens=512, top_k=2, skew=1.2)
QUICK = Sizes(layers=2, experts=8, width=32, inner=32, tokens=64, top_k=2, skew=0.7, rounds=2, passes=1)
QUICK_LAYER = Sizes(experts=8, width=32, inner=32, tokens=64, top_k=2, skew=1.2, rounds=2, passes=1)
SLACK_BYTES = 256 * MIB
ELASTIC = Sizes(experts=16, width=256, inner=256, tokens=256, top_k=2, skew=0.7, passes=2)
MEMORY = Sizes(experts=32, width=256, inner=512, tokens=512, top_k=4, skew=0.0)
SKEWED_MEMORY = Sizes(experts=24, width=384, inner=256, tokens=768, top_k=2, skew=0.7)
SHARE = 0.8
"""The part of the cores that the ranks with a quota have together: the rest is left to the others of this machine."""
PARTS = ("service", "peer", "capacity", "auto", "elastic", "links", "parts", "memory")
DEVICE = Sizes(experts=32, width=1024, inner=2048, tokens=8192, top_k=4, skew=0.0)
PEER_MODULE = "transformers.distributed.expert_parallel"

SCRIPT = Script("moe", __doc__, quick="small layers, two pairs: a check, not figures to quote")


def main() -> int:
    """Runs the bench. Parts left out are named in the file, with reasons."""
    parser = SCRIPT.parser()
    parser.add_argument("--only", default=",".join(PARTS), help=f"of {', '.join(PARTS)}")
    parser.add_argument("--device", choices=DEVICES, help="measures one layer on a device, and on several, and nothing else")
    arguments = parser.parse_args()
    if arguments.device:
        return run_on_devices(arguments)
    parts, left_out = arguments.only.split(","), dict[str, str]()
    missing = {"peer": missing_peer, "elastic": missing_quotas, "links": missing_links, "parts": missing_links}
    for part, reason in ((part, look()) for part, look in missing.items() if part in parts):
        if reason:
            parts.remove(part)
            left_out[part] = reason
    return SCRIPT.run(arguments, partial(measure, parts=parts, is_quick=arguments.quick), left_out=left_out)


def run_on_devices(arguments: argparse.Namespace) -> int:
    """Runs the bench on devices alone."""
    device, sizes = arguments.device, QUICK_LAYER if arguments.quick else DEVICE
    if device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("bench_moe: --device cuda: no CUDA device here; --device cpu shows that it runs")
    reason = missing_devices(device)

    def rows(bench: Bench) -> Iterator[Row]:
        for ranks in (1,) if reason else (1, most_ranks(device)):
            bench.tell(f"one layer, ranks on devices: {ranks}")
            with bench.folder(f"ranks{ranks}") as folder:
                yield from device_rows(sizes, device, folder, ranks=ranks)

    return SCRIPT.run(arguments, rows, left_out={"several devices": reason} if reason else {})


def most_ranks(device: str) -> int:
    """As many ranks as devices, up to four; two processors."""
    return min(MOST_RANKS, torch.cuda.device_count()) if device == "cuda" else 2


def missing_peer() -> str:
    """Why this transformers has no all-to-all to stand beside; "" where it has."""
    import transformers

    package = PEER_MODULE.rpartition(".")[0]
    is_there = importlib.util.find_spec(package) is not None and importlib.util.find_spec(PEER_MODULE) is not None
    return "" if is_there else f"transformers {transformers.__version__} has no expert parallelism of its own"


def missing_quotas() -> str:
    """Why no rank can have a share of a processor here; "" where it can."""
    reason = missing_reason()
    return f"no quotas: {reason}" if reason else ""


def measure(bench: Bench, *, parts: list[str], is_quick: bool) -> Iterator[Row]:
    """Measures the parts named. Raises ConfigError where one is none."""
    if not set(parts) <= set(PARTS):
        raise ConfigError(f"--only {','.join(parts)}: write some of {', '.join(PARTS)}, with commas")
    if "service" in parts:
        yield from measure_service(bench, QUICK if is_quick else SERVICE)
    tasks = layer_tasks(parts, is_quick=is_quick)
    if tasks:
        bench.tell("one layer beside others")
        with bench.folder("ranks") as folder:
            for task, found in zip(tasks, found_by_ranks(tasks, folder), strict=True):
                yield layer_row(task.part, task.sizes, found)
    if "elastic" in parts:
        yield measure_elastic(bench, QUICK_LAYER if is_quick else ELASTIC)
    if "links" in parts:
        bench.tell("exchanges over links")
        with bench.folder("links") as folder:
            yield from link_rows(folder, is_quick=is_quick)
    if "parts" in parts:
        bench.tell("a layer in parts over a link")
        with bench.folder("parts") as folder:
            yield from parts_rows(folder, is_quick=is_quick)
    if "memory" in parts:
        bench.tell("memory of a layer in parts")
        with bench.folder("memory") as folder:
            yield from memory_rows([QUICK_LAYER] if is_quick else [MEMORY, SKEWED_MEMORY], folder)


def measure_service(bench: Bench, sizes: Sizes) -> Iterator[Row]:
    """Makes the rows of training through a daemon, in which all experts are resident."""
    bench.tell("training through a daemon")
    budget_bytes = 3 * sizes.layers * sizes.experts * schema_of(sizes).record_bytes + SLACK_BYTES
    with bench.folder("store") as store, bench.folder("ranks") as folder, serving(store, host_budget_bytes=budget_bytes) as service:
        (found,) = found_by_ranks([Task(Part.SERVICE, sizes, service.store.address)], folder)
        yield from service_rows(sizes, found)


def measure_elastic(bench: Bench, sizes: Sizes) -> Row:
    """Makes the row of several tasks. Its ranks have a quota each, and stay there until they end."""
    bench.tell("tasks of different size")
    with bench.folder("ranks") as folder, open_quotas(RANKS, share=SHARE * core_count() / RANKS) as quotas:
        groups = tuple(str(quota.group) for quota in quotas)
        (found,) = found_by_ranks([Task(Part.ELASTIC, sizes, quotas=groups)], folder)
    return elastic_row(sizes, found)


def core_count() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0))


def layer_tasks(parts: list[str], *, is_quick: bool) -> list[Task]:
    """What one layer is set beside, for the parts named."""
    peers = [Task(part, sizes) for sizes in ((QUICK_LAYER,) if is_quick else PEER) for part in (Part.BARE, Part.LOADED)]
    fixed = [Task(Part.CAPACITY, QUICK_LAYER if is_quick else CAPACITY)]
    searched = [Task(Part.AUTO, sizes) for sizes in ((QUICK_LAYER,) if is_quick else PEER)]
    return peers * ("peer" in parts) + fixed * ("capacity" in parts) + searched * ("auto" in parts)


if __name__ == "__main__":
    sys.exit(main())
