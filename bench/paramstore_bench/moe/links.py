"""Exchanges over links of a known rate: network namespaces stand for nodes, and ranks of one thread each run on them.

- *Rails*: two machines of two devices; devices of one number are on one rail, and the spine between rails has a quarter of its
  rate.
- *Shared link*: two machines of two ranks, and one link for all.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from paramstore.bench.pairs import Pairs
from paramstore.bench.plan import MIB
from paramstore.bench.report.rows import SUBJECT, Row, Target, judged
from paramstore.errors import StoreUnavailable
from paramstore_bench.moe.sizes import RANKS, Sizes
from paramstore_testkit.nodes.links import Topology, rails, shared_link
from paramstore_testkit.nodes.namespaces import missing_reason, open_network
from paramstore_testkit.nodes.ranks import start_ranks

RATE_MBIT_S = 100.0
JOB_S = 300.0
TASKS, FOUND = "tasks.json", "found.json"
FLAT = "flat exchange"


class LinkTask(msgspec.Struct, frozen=True):
    """One exchange beside the flat one. way: as of `ExpertParallel`. sizes: of the layer whose tokens are sent; row_bytes, without
    them: what each rank sends. is_there_and_back: whether rows come back too."""

    name: str
    way: str
    rounds: int
    least: float | None = None
    row_bytes: int = 0
    sizes: Sizes | None = None
    is_there_and_back: bool = False

    @property
    def case(self) -> str:
        what = f"{self.row_bytes / MIB:g} MiB a rank" if self.sizes is None else str(self.sizes)
        return f"{what}, {self.way}"


class LinkFound(msgspec.Struct, frozen=True):
    """What ranks found. facts: bytes and counts. why: the choice that was made, in its words."""

    pairs: Pairs
    facts: dict[str, float]
    why: str


def link_rows(folder: Path, *, is_quick: bool) -> Iterator[Row]:
    """Makes the rows of all links; in an empty folder. Raises StoreUnavailable where a rank ends early."""
    rounds, sizes = (3 if is_quick else 11), (2 * MIB, 8 * MIB)
    tokens = Sizes(experts=64, width=512, inner=1, tokens=512, top_k=8, skew=0.0)
    slow_spine = [LinkTask("rows by rails, a spine of a quarter", "auto", rounds, 1.2, size) for size in sizes]
    one_link = [
        LinkTask("rows over one link", "auto", rounds, 0.95, sizes[0]),
        LinkTask("rows over one link", "two_hops", rounds, None, sizes[0]),
        LinkTask("tokens over one link", "row_per_node", rounds, 1.5, sizes=tokens),
        LinkTask("tokens over one link", "auto", rounds, 1.5, sizes=tokens),
        LinkTask("tokens over one link, and rows back", "auto", rounds, sizes=tokens, is_there_and_back=True),
    ]
    yield from _rows(rails(RATE_MBIT_S, spine_rate_mbit_s=RATE_MBIT_S / 4), slow_spine, folder)
    yield from _rows(shared_link(RATE_MBIT_S), one_link, folder)


def missing_links() -> str:
    """Why there can be no links of a known rate here; "" where there can."""
    return missing_reason() or ""


def _rows(topology: Topology, tasks: Sequence[LinkTask], folder: Path) -> Iterator[Row]:
    for task, found in zip(tasks, _found(topology, tasks, folder), strict=True):
        taken = found.pairs.parts()
        yield judged(
            Row(
                name=task.name, case=task.case, subject=SUBJECT, value=found.pairs.rate, unit="B/s", against=FLAT,
                limit=found.pairs.limit_rate, ratio=found.pairs.ratio, ratio_min=found.pairs.ratio_min,
                ratio_max=found.pairs.ratio_max, target=None if task.least is None else Target("ratio", ">=", task.least),
                parts={"ours_s": taken["ours_s"], "limit_s": taken["limit_s"], **found.facts}, note=found.why,
            )
        )  # fmt: skip


def _found(topology: Topology, tasks: Sequence[LinkTask], folder: Path) -> list[LinkFound]:
    (folder / TASKS).write_bytes(msgspec.json.encode(tasks))
    run_on(topology, "paramstore_bench.moe.link_rank", folder)
    return msgspec.json.decode((folder / FOUND).read_bytes(), type=list[LinkFound])


def run_on(topology: Topology, module: str, folder: Path) -> None:
    """Runs a module as each rank, on the nodes of a topology. Raises StoreUnavailable where a rank ends early."""
    command = [sys.executable, "-m", module, str(folder)]
    with (
        open_network(topology) as network,
        start_ranks(network, command, ranks_per_node=RANKS // len(topology.machines)) as ranks,
    ):
        ended = ranks.wait(timeout_s=JOB_S)
    for rank, each in enumerate(ended):
        if each.exit_code != 0:
            raise StoreUnavailable(f"rank {rank} ended with {each.exit_code}: {each.errors[-2000:]}")
