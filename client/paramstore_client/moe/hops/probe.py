"""Measures how fast ranks exchange rows in each way: a few messages at first use, the same times on all ranks.

All ranks send at once, as in a layer: what a link gives one pair of ranks says nothing of what it gives all of them.
"""

from __future__ import annotations

import time
from statistics import median

import torch

from paramstore_client.moe.exchange import Exchange, FlatExchange
from paramstore_client.moe.hops.choice import ExchangeChoice, Line, Speeds
from paramstore_client.moe.hops.nodes import Nodes
from paramstore_client.moe.hops.two_hops import TwoHopExchange

SIZES_BYTES = (1 << 16, 1 << 20)
"""What each rank sends. The larger one is more than what links and sockets hold back on its way."""
REPEATS = 5
PROBE_S = 1.0
"""Time after which no other round begins: what there is must do."""
ROW_BYTES = 1024


def measured(flat: FlatExchange, nodes: Nodes, device: torch.device) -> ExchangeChoice:
    """What wins by the clock. All ranks call it at once; each sends some 16 MiB at most. Raises RankLost, StepMismatch.

    The ways take turns, and the median of each counts: what else happens on a link meets them all.
    """
    hopping = TwoHopExchange(flat, nodes, lambda _: ExchangeChoice(("two_hops",), "to be measured", nodes))
    mates = set(nodes.ranks[nodes.place(flat.rank)[0]])
    everyone = set(range(nodes.world_size))
    sends: dict[str, tuple[Exchange, set[int]]] = {
        "flat": (flat, everyone), "two_hops": (hopping, everyone), "inside": (flat, mates)
    }  # fmt: skip
    seconds: dict[str, dict[int, list[float]]] = {way: {} for way in sends}
    spent_s = 0.0
    for size in [size for size in SIZES_BYTES for _ in range(REPEATS)]:
        if spent_s > PROBE_S:
            break
        for way, (exchange, ranks) in sends.items():
            seconds[way].setdefault(size, []).append(_slowest_s(hopping, exchange, ranks, size, device))
            spent_s += seconds[way][size][-1]
    typical = {way: {size: median(taken) for size, taken in seconds[way].items()} for way in sends}
    return ExchangeChoice.measured(nodes, Speeds(**{way: Line.through(times) for way, times in typical.items()}))


def _slowest_s(clock: TwoHopExchange, exchange: Exchange, ranks: set[int], size: int, device: torch.device) -> float:
    """Seconds that the slowest rank waits when each sends `size` bytes, as much to each of `ranks`. clock: by which they tell."""
    counts = [size // ROW_BYTES // len(ranks) if rank in ranks else 0 for rank in range(exchange.world_size)]
    rows = torch.zeros(sum(counts), ROW_BYTES, dtype=torch.uint8, device=device)
    clock.told(torch.zeros(exchange.world_size, 1, dtype=torch.float64, device=device))
    began_s = time.monotonic()
    exchange.rows(rows, to_each=counts, from_each=counts)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    taken = torch.full((exchange.world_size, 1), time.monotonic() - began_s, dtype=torch.float64, device=device)
    return float(clock.told(taken).max())
