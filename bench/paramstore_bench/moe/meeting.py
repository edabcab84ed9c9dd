"""What the ranks of a job tell each other beside what is measured: when the last one was ready, and sums of counts.

Ranks of one machine have one monotonic clock, so that the end of a piece of work is the latest of theirs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist


def seconds_of(*pieces: Callable[[], object]) -> list[float]:
    """Seconds of pieces of work that all ranks do, each begun when all have ended the one before: from the last rank's begin to
    the last one's end."""
    marks = []
    for piece in pieces:
        dist.barrier()
        marks.append(time.monotonic())
        piece()
        marks.append(time.monotonic())
    latest = torch.tensor(marks, dtype=torch.float64)
    dist.all_reduce(latest, op=dist.ReduceOp.MAX)
    return (latest[1::2] - latest[::2]).tolist()


def sums(values: Sequence[float]) -> list[float]:
    """The sum over ranks of each value."""
    total = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(total)
    return total.tolist()


def greatest(value: float) -> float:
    """The greatest of the ranks' values."""
    found = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return float(found)
