"""Measures how long rows take between the ranks of a job, by how many bytes each sends: the same times on all ranks."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from paramstore_client.moe.exchange import Exchange
from paramstore_client.moe.granularity.model import Curve

ROUNDS = 3
PROBE_S = 1.0
"""Time after which no other round begins: what there is must do."""
ROW_BYTES = 1024


def measured(exchange: Exchange, sizes_bytes: Sequence[int], device: torch.device) -> Curve:
    """The times of exchanges, by what each rank sends, as much to each. All call it at once. Raises RankLost, StepMismatch."""
    seconds: dict[int, list[float]] = {}
    for _ in range(ROUNDS):
        if sum(map(sum, seconds.values())) > PROBE_S:
            break
        for size in sizes_bytes:
            seconds.setdefault(size, []).append(_slowest_s(exchange, size, device))
    return Curve(tuple(sorted((size, min(times)) for size, times in seconds.items())))


def _slowest_s(exchange: Exchange, size: int, device: torch.device) -> float:
    """Seconds that the slowest rank waits."""
    counts = [-(-size // ROW_BYTES // exchange.world_size)] * exchange.world_size
    rows = torch.zeros(sum(counts), ROW_BYTES, dtype=torch.uint8, device=device)
    exchange.alike(torch.zeros(exchange.world_size, 1, dtype=torch.float64, device=device)).cpu()
    began_s = time.monotonic()
    exchange.rows(rows, to_each=counts, from_each=counts)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    taken = torch.full((exchange.world_size, 1), time.monotonic() - began_s, dtype=torch.float64, device=device)
    return float(exchange.alike(taken).cpu().max())
