"""Opens the exchange of a job's ranks: finds out which nodes these stand on, and what the user's word means there."""

from __future__ import annotations

import datetime
from functools import partial
from typing import Any

from paramstore.core.placement import ranks_named
from paramstore.errors import ConfigError, StepMismatch
from paramstore_client.moe.exchange import FlatExchange
from paramstore_client.moe.hops.choice import ExchangeChoice
from paramstore_client.moe.hops.node_rows import NodeRowExchange
from paramstore_client.moe.hops.nodes import Nodes, this_node
from paramstore_client.moe.hops.probe import measured


def meet_nodes(store: Any, way: str, *, rank: int, world_size: int, limit: datetime.timedelta) -> Nodes:
    """The nodes of all ranks, each of which calls it with one `way`. Raises StepMismatch where these differ, and
    torch.distributed.DistStoreError where not all ranks come in time."""
    names = [f"node/{other}" for other in range(world_size)]
    store.set(names[rank], f"{way} {this_node()}")
    store.wait(names, limit)
    ways, nodes = zip(*(store.get(name).decode().split() for name in names), strict=True)
    if len(set(ways)) > 1:
        having = {each: [other for other, own in enumerate(ways) if own == each] for each in ways}
        told = "; ".join(f"{each} on {ranks_named(ranks)}" for each, ranks in having.items())
        raise StepMismatch(f"expert-parallel ranks differ in exchange: {told}")
    return Nodes.named(nodes)


def opened(
    way: str, flat: FlatExchange, nodes: Nodes
) -> tuple[FlatExchange | NodeRowExchange, ExchangeChoice | None]:  # fmt: skip
    """The exchange that `way`, one of WAYS, asks for, and the choice that it makes; None where the first rows will be measured.
    Raises ConfigError where ranks stand so that it cannot be."""
    if way != "auto" and way != "flat" and not nodes.are_alike:
        raise ConfigError(f"exchange={way!r}: nodes have unequal numbers of ranks ({nodes}); write 'auto' or 'flat'")
    if reason := _reason_for_flat(way, nodes):
        return flat, ExchangeChoice((), reason, nodes)
    if way == "auto":
        return NodeRowExchange(flat, nodes, partial(measured, flat, nodes)), None
    choice = ExchangeChoice((way,), "as told", nodes)
    return NodeRowExchange(flat, nodes, lambda _: choice), choice


def _reason_for_flat(way: str, nodes: Nodes) -> str:
    """Why rows go in one exchange, without measuring; "" where they need not."""
    if way == "flat":
        return "as told"
    if way != "auto":
        return ""
    if len(nodes.ranks) == 1:
        return "all ranks are on one node"
    if not nodes.are_alike:
        return f"nodes have unequal numbers of ranks: {nodes}"
    return ""
