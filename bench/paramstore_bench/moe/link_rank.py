"""A process that is one rank of a job on a node: `-m paramstore_bench.moe.link_rank FOLDER` does the tasks that lie there, with the
others. The first rank leaves what was found beside them.
"""

# T tokens, N rows of them
# ruff: noqa: N806 - shape suffixes, as the legend says

from __future__ import annotations

import datetime
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from paramstore.bench.pairs import Sample, sample_pairs
from paramstore.errors import StepMismatch
from paramstore_bench.moe.found import check_sent
from paramstore_bench.moe.links import FOUND, TASKS, LinkFound, LinkTask
from paramstore_bench.moe.meeting import seconds_of, sums
from paramstore_bench.moe.sizes import RANKS, Batch, Sizes
from paramstore_client.moe.exchange import Exchange, FlatExchange
from paramstore_client.moe.hops.node_rows import NodeRowExchange
from paramstore_client.moe.hops.nodes import Nodes
from paramstore_client.moe.hops.opening import meet_nodes, opened
from paramstore_testkit.training.counted_exchange import CountedExchange

EXCHANGE_S = 60.0
WIDTH = 256
TOLD_BYTES = 32
"""What a rank tells each other of the tokens that it sends once."""


class Ranks:
    """The exchanges of this rank. ways: those that were opened, by name."""

    def __init__(self) -> None:
        store = dist.distributed_c10d.PrefixStore("bench", dist.distributed_c10d._get_default_store())
        limit = datetime.timedelta(seconds=EXCHANGE_S)
        self.nodes = meet_nodes(store, "auto", rank=dist.get_rank(), world_size=RANKS, limit=limit)
        flat = FlatExchange(dist.new_group(), dist.new_group(), store, timeout_s=EXCHANGE_S, lost=lambda: None)
        self.flat = CountedExchange.of(flat, self.nodes)
        self.ways: dict[str, NodeRowExchange] = {}

    def exchange(self, way: str) -> NodeRowExchange:
        if way not in self.ways:
            exchange, _ = opened(way, self.flat, self.nodes)
            assert isinstance(exchange, NodeRowExchange)
            self.ways[way] = exchange
        return self.ways[way]


def found_of(task: LinkTask, ranks: Ranks) -> LinkFound:
    """Does a task. Raises StepMismatch where rows are not those of the flat exchange."""
    exchange = ranks.exchange(task.way)
    send, facts = _rows(task) if task.sizes is None else _tokens(task, task.sizes, ranks.nodes)
    if not torch.equal(send(ranks.flat), send(exchange)):
        raise StepMismatch(f"{task.name}: other rows came than by the flat exchange")
    sent_bytes = []
    for each in (exchange, ranks.flat):
        before_bytes, crossing_before_bytes = ranks.flat.sent_bytes, ranks.flat.crossing_bytes
        send(each)
        sent_bytes += sums([ranks.flat.sent_bytes - before_bytes, ranks.flat.crossing_bytes - crossing_before_bytes])
    if "once_bytes" in facts:
        check_sent(sent_bytes[1], sums([facts.pop("once_bytes")])[0])
    sample = partial(_sample, send, sent_bytes[2])
    pairs = sample_pairs(task.rounds, partial(sample, exchange), partial(sample, ranks.flat))
    assert exchange.chosen is not None
    names = ("sent_bytes", "crossing_bytes", "flat_sent_bytes", "flat_crossing_bytes")
    told = dict(zip(names, sent_bytes, strict=True))
    return LinkFound(pairs, {**facts, **told}, exchange.chosen.why)


def _rows(task: LinkTask) -> tuple[Callable[[Exchange], Tensor], dict[str, float]]:
    """Sends rows of which each rank gets another number."""
    rank = dist.get_rank()
    shares = torch.rand(RANKS, RANKS, generator=torch.Generator().manual_seed(0)) + 0.5
    counts = (shares / shares.sum(1, keepdim=True) * (task.row_bytes // (4 * WIDTH))).int().tolist()
    rows, came = torch.randn(sum(counts[rank]), WIDTH), [row[rank] for row in counts]
    return lambda exchange: exchange.rows(rows, to_each=counts[rank], from_each=came), {}


def _tokens(task: LinkTask, sizes: Sizes, nodes: Nodes) -> tuple[Callable[[Exchange], Tensor], dict[str, float]]:
    """Sends the tokens of a batch to the ranks of their experts. once_bytes: what that is where each goes to each node once."""
    rank = dist.get_rank()
    to_ranks = [Batch.draw(sizes, rank=other, number=0).ids[0] // sizes.rank_experts for other in range(RANKS)]
    counts = [ids.flatten().bincount(minlength=RANKS).tolist() for ids in to_ranks]
    order = to_ranks[rank].flatten().argsort(stable=True)
    x_TD, token_N = Batch.draw(sizes, rank=rank, number=0).x, order // sizes.top_k
    came = [row[rank] for row in counts]

    def send(exchange: Exchange) -> Tensor:
        arrived = exchange.start_tokens(x_TD, token_N, to_each=counts[rank], from_each=came).wait()
        return exchange.rows(arrived, to_each=came, from_each=counts[rank]) if task.is_there_and_back else arrived

    if task.way != "row_per_node":
        return send, {}
    node_of = torch.tensor([nodes.place(other)[0] for other in range(RANKS)])
    crossing = {(one, node) for one, node in zip(token_N.tolist(), node_of[to_ranks[rank].flatten()[order]].tolist(), strict=True)}
    tokens_away = sum(node != node_of[rank] for _, node in crossing)
    ranks_away = [other for other in range(RANKS) if node_of[other] != node_of[rank]]
    rows_away = sum(counts[rank][other] for other in ranks_away)
    told_bytes = len(ranks_away) * TOLD_BYTES
    return send, {"once_bytes": float(tokens_away * (sizes.row_bytes + nodes.width) + 4 * rows_away + told_bytes)}


def _sample(send: Callable[[Exchange], Tensor], work_bytes: float, exchange: Exchange, _: int) -> Sample:
    (seconds,) = seconds_of(partial(send, exchange))
    return Sample(work_bytes, seconds)


def main(folder: Path) -> None:
    """Does the tasks in `folder`."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    ranks = Ranks()
    found = [found_of(task, ranks) for task in msgspec.json.decode((folder / TASKS).read_bytes(), type=list[LinkTask])]
    if dist.get_rank() == 0:
        (folder / FOUND).write_bytes(msgspec.json.encode(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
