"""Counts how evenly a layer's tokens are spread over 8 devices by each way of placing its experts: in order, greedy,
anti-correlation, and the one that is chosen on history.

`python bench/bench_balance.py [--out FILE]`. The first two thirds of each routing trace are the history, of which the first half is
what placements are fitted to and the second what the choice is made on; the figures are of the last third, which nothing has seen.
A figure is the busiest device's share of a batch's tokens, as the mean over batches and layers; where nobody counted tokens an
active expert has one. Counts only: load on the machine changes nothing. Writes bench/results/balance-<date>.json.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from paramstore.bench.context import Bench
from paramstore.bench.report.rows import SUBJECT, Row, Target, judged
from paramstore.core.balancing import ANTI_CORRELATION, AS_IT_IS, GREEDY, History, busiest_share, choose_placement, read_history
from paramstore.core.placement import Placement
from paramstore.core.trace import Trace, unpack_trace
from paramstore_bench.frame import Script

TRACES = Path(__file__).parent / "traces"
DEVICES = 8
TARGET = Target("ratio", "<=", 1.0)
"""The choice is never worse than in order."""
TARGETS = {"generate": Target("value", "<=", 0.20)}
"""What is asked instead of a trace of which more is known."""

SCRIPT = Script("balance", __doc__)


@dataclass(frozen=True, slots=True)
class Layer:
    """Shares of the busiest device on one layer's last third. shares: by placement; least: no placement without replicas has less,
    as a device has all of an expert's tokens."""

    shares: dict[str, float]
    chosen: str
    least: float


def main() -> int:
    return SCRIPT.run(SCRIPT.parser().parse_args(), rows)


def rows(bench: Bench) -> Iterator[Row]:
    for file in sorted(TRACES.glob("*.trace")):
        bench.tell(file.stem)
        trace = unpack_trace(file.read_bytes())
        yield row_of(file.stem, [judge(history) for history in histories(trace)], counted=any(e.tokens for e in trace.events))


def histories(trace: Trace) -> Iterator[History]:
    """The history of each layer."""
    header = trace.header
    return (read_history(trace.events, layer=layer, experts=header.experts) for layer in header.layers)


def judge(history: History) -> Layer:
    """Chooses a placement by the first two thirds of a layer's batches, and measures all of them on the rest."""
    cut = 2 * len(history) // 3
    choice = choose_placement(history[:cut], Placement.in_order(len(history[0]), DEVICES))
    unseen = history[cut:]
    shares = {name: busiest_share(unseen, placement) for name, placement in choice.placements.items()}
    return Layer(shares, choice.name, fmean(max(1 / DEVICES, max(batch) / sum(batch)) for batch in unseen))


def row_of(name: str, layers: list[Layer], *, counted: bool) -> Row:
    chosen = [layer.shares[layer.chosen] for layer in layers]
    means = {way: fmean(layer.shares[way] for layer in layers) for way in (AS_IT_IS, GREEDY, ANTI_CORRELATION)}
    ratios = [share / layer.shares[AS_IT_IS] for share, layer in zip(chosen, layers, strict=True)]
    names = Counter(layer.chosen for layer in layers)
    return judged(
        Row(
            name=f"share of the busiest of {DEVICES} devices", case=name, subject=SUBJECT, value=fmean(chosen), unit="of a batch",
            against="in order", limit=means[AS_IT_IS], ratio=fmean(chosen) / means[AS_IT_IS],
            ratio_min=min(ratios), ratio_max=max(ratios), target=TARGETS.get(name, TARGET),
            parts={
                "greedy": means[GREEDY], "anti_correlation": means[ANTI_CORRELATION],
                "least": fmean(layer.least for layer in layers), "worst_layer": max(chosen),
                "worst_layer_in_order": max(layer.shares[AS_IT_IS] for layer in layers),
                "layers_in_order": names[AS_IT_IS], "layers_greedy": names[GREEDY],
                "layers_anti_correlation": names[ANTI_CORRELATION],
                "layers_worse_than_in_order": sum(ratio > 1 for ratio in ratios),
            },
            note="tokens" if counted else "active experts",
        )
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
