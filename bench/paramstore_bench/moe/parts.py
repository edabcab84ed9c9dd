"""A layer in parts over a link of a known rate, beside the same layer in one: two nodes of two ranks each.

Experts leave the host alone while they compute, as a GPU does: they sleep, as long as their rows say. A layer could take at least
what its exchanges take without experts, or its experts without exchanges: both are timed in the same run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from paramstore.bench.pairs import Pairs
from paramstore.bench.report.rows import SUBJECT, Row, Target, judged
from paramstore_bench.moe.links import run_on
from paramstore_bench.moe.sizes import Sizes
from paramstore_testkit.nodes.links import shared_link

RATE_MBIT_S = 200.0
TASKS, FOUND = "parts_tasks.json", "parts_found.json"
COUNTS = 2, 4, 8
SPEED_TARGET, BOUND_TARGET = Target("ratio", ">=", 1.25), Target("ratio", ">=", 0.55)
"""On the best number of parts: beside one part, and beside the longer of exchanging and computing."""


class PartsTask(msgspec.Struct, frozen=True):
    """A layer and how often its pairs are taken. row_us: how long an expert takes for a row."""

    sizes: Sizes
    row_us: float
    rounds: int


class PartsFound(msgspec.Struct, frozen=True):
    """What one number of parts took beside one. exchange_s, compute_s: of the exchanges and of the busiest rank's experts alone."""

    split: str
    parts: int
    pairs: Pairs
    exchange_s: float
    compute_s: float


def parts_rows(folder: Path, *, is_quick: bool) -> Iterator[Row]:
    """Makes the rows; in an empty folder. Raises StoreUnavailable where a rank ends early."""
    for tokens, row_us in ((1024, 160.0), (1024, 320.0), (2048, 160.0)):
        sizes = Sizes(experts=32, width=512, inner=1, tokens=tokens // 8 if is_quick else tokens, top_k=1, skew=0.0)
        task = PartsTask(sizes, row_us, rounds=2 if is_quick else 7)
        for split in ("experts", "tokens"):
            found = [each for each in _found(task, folder) if each.split == split]
            best = max(found, key=lambda each: each.pairs.ratio)
            for each in found:
                yield from _rows(task, each, is_best=each is best)


def _rows(task: PartsTask, found: PartsFound, *, is_best: bool) -> Iterator[Row]:
    taken = found.pairs.parts()
    bound_s = max(found.exchange_s, found.compute_s)
    case = f"{task.sizes}, {task.row_us:g} us a row, {found.parts} parts of {found.split}"
    times = {"exchange_s": found.exchange_s, "compute_s": found.compute_s}
    yield judged(
        Row(
            name="layer in parts over a link", case=case, subject=SUBJECT, value=found.pairs.rate, unit="rows/s",
            against="one part", limit=found.pairs.limit_rate, ratio=found.pairs.ratio, ratio_min=found.pairs.ratio_min,
            ratio_max=found.pairs.ratio_max,
            target=SPEED_TARGET if is_best else None, parts={**{name: taken[name] for name in ("ours_s", "limit_s")}, **times},
        )
    )  # fmt: skip
    bounds = [bound_s / pair.ours.seconds for pair in found.pairs.pairs]
    yield judged(
        Row(
            name="layer in parts, beside its bound", case=case, subject=SUBJECT, value=taken["ours_s"], unit="s",
            against="the longer of exchanging and computing", limit=bound_s, ratio=sorted(bounds)[len(bounds) // 2],
            ratio_min=min(bounds), ratio_max=max(bounds), target=BOUND_TARGET if is_best else None,
        )
    )  # fmt: skip


def _found(task: PartsTask, folder: Path) -> Sequence[PartsFound]:
    (folder / TASKS).write_bytes(msgspec.json.encode(task))
    run_on(shared_link(RATE_MBIT_S), "paramstore_bench.moe.parts_rank", folder)
    return msgspec.json.decode((folder / FOUND).read_bytes(), type=list[PartsFound])
