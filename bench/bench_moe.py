"""Measures expert-parallel layers with four ranks of gloo on this machine, one thread each: a job that trains through one daemon,
with expert parallelism beside without; one layer beside the all-to-all of transformers, and beside one of fixed capacity; exchanges
beside the flat one, over links of a known rate (root alone can make those). A run ends where outputs or gradients differ by more
than rounding, or other rows are sent than the routing says.

Run it on an idle machine: `python bench/bench_moe.py [--quick] [--only PARTS] [--dir DIR] [--out FILE]`. The figures go to
bench/results/moe-<date>.json.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from functools import partial

from paramstore.bench.context import Bench
from paramstore.bench.plan import MIB
from paramstore.bench.report.rows import Row
from paramstore.bench.service.daemon import serving
from paramstore.errors import ConfigError
from paramstore_bench.frame import Script
from paramstore_bench.moe.links import link_rows, missing_links
from paramstore_bench.moe.rows import layer_row, service_rows
from paramstore_bench.moe.service import schema_of
from paramstore_bench.moe.sizes import Sizes
from paramstore_bench.moe.task import Part, Task, found_by_ranks

SERVICE = Sizes(layers=2, experts=32, width=128, inner=256, tokens=256, top_k=4, skew=0.7)
PEER = (
    Sizes(experts=32, width=128, inner=256, tokens=256, top_k=4, skew=0.7),
    Sizes(experts=32, width=256, inner=512, tokens=512, top_k=4, skew=0.7),
)
CAPACITY = Sizes(experts=16, width=256, inner=1024, tokens=512, top_k=2, skew=1.2)
QUICK = Sizes(layers=2, experts=8, width=32, inner=32, tokens=64, top_k=2, skew=0.7, rounds=2, passes=1)
QUICK_LAYER = Sizes(experts=8, width=32, inner=32, tokens=64, top_k=2, skew=1.2, rounds=2, passes=1)
SLACK_BYTES = 256 * MIB
PARTS = ("service", "peer", "capacity", "links")
PEER_MODULE = "transformers.distributed.expert_parallel"

SCRIPT = Script("moe", __doc__, quick="small layers, two pairs: a check, not figures to quote")


def main() -> int:
    """Runs the bench. Parts left out are named in the file, with reasons."""
    parser = SCRIPT.parser()
    parser.add_argument("--only", default=",".join(PARTS), help=f"of {', '.join(PARTS)}")
    arguments = parser.parse_args()
    parts, left_out = arguments.only.split(","), dict[str, str]()
    for part, missing in (("peer", missing_peer), ("links", missing_links)):
        if part in parts and (reason := missing()):
            parts.remove(part)
            left_out[part] = reason
    return SCRIPT.run(arguments, partial(measure, parts=parts, is_quick=arguments.quick), left_out=left_out)


def missing_peer() -> str:
    """Why this transformers has no all-to-all to stand beside; "" where it has."""
    import transformers

    package = PEER_MODULE.rpartition(".")[0]
    is_there = importlib.util.find_spec(package) is not None and importlib.util.find_spec(PEER_MODULE) is not None
    return "" if is_there else f"transformers {transformers.__version__} has no expert parallelism of its own"


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
    if "links" in parts:
        bench.tell("exchanges over links")
        with bench.folder("links") as folder:
            yield from link_rows(folder, is_quick=is_quick)


def measure_service(bench: Bench, sizes: Sizes) -> Iterator[Row]:
    """Makes the rows of training through a daemon, in which all experts are resident."""
    bench.tell("training through a daemon")
    budget_bytes = 3 * sizes.layers * sizes.experts * schema_of(sizes).record_bytes + SLACK_BYTES
    with bench.folder("store") as store, bench.folder("ranks") as folder, serving(store, host_budget_bytes=budget_bytes) as service:
        (found,) = found_by_ranks([Task(Part.SERVICE, sizes, service.store.address)], folder)
        yield from service_rows(sizes, found)


def layer_tasks(parts: list[str], *, is_quick: bool) -> list[Task]:
    """What one layer is set beside, for the parts named."""
    peers = [Task(part, sizes) for sizes in ((QUICK_LAYER,) if is_quick else PEER) for part in (Part.BARE, Part.LOADED)]
    fixed = [Task(Part.CAPACITY, QUICK_LAYER if is_quick else CAPACITY)]
    return peers * ("peer" in parts) + fixed * ("capacity" in parts)


if __name__ == "__main__":
    sys.exit(main())
