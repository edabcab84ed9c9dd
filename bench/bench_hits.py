"""Measures hit rates: replays recorded routing traces through the planner with each policy at each size of the arenas, beside
Belady's optimum in the same planner; and those of decoding through a client's slots, with each policy that slots have.

`python bench/bench_hits.py [--quick] [--out FILE]`. No figure depends on the machine's speed or load. Writes
bench/results/hits-<date>.json and a picture beside it. `--quick` replays the beginnings of the traces alone.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from paramstore.core.trace import Trace, unpack_trace
from paramstore.policy.make import SLOT_POLICIES, make_slot_policy
from paramstore.policy.slot_plan import SlotPlan
from paramstore.sim.picture import STYLES
from paramstore.sim.replay import Outcome, replay, slots_of
from paramstore.sim.slot_replay import replay_visits
from paramstore.sim.sweep import POLICIES as KNOWN
from paramstore.sim.sweep import READER, arena_policies, beginning, slot_counts
from paramstore_bench.frame import Script

HERE = Path(__file__).parent
TRACES = ("train", "train-small", "train-accumulate", "decode-1", "decode-4", "decode-16")
"""The traces replayed: all but generate.trace, in which a barely trained model repeats itself."""
SHARES = (0.10, 0.25, 0.50, 0.75)
POLICIES = ("lru", "decayed_lfu", "schedule", "belady")
BESIDE = ("algorithm2",)
"""Policies that are measured for comparison alone: no user can choose them, and no figure is drawn of them."""
QUICK_USES = 6000
"""Uses of experts in which every policy has shown what it is at every size, in a second each."""
TARGET = 0.95
"""Least share of Belady's hits that `schedule` must have in training."""
DECODE_NEAR = 0.02
"""How much lower than the best online policy's the hit rate of `schedule` may be in decoding."""
DECODE_NEAR_FROM = {"decode-16": 0.25}
"""Least share of slots at which that is asked; for all others any."""
DECODE_TARGETS = {("decode-1", 0.10): 0.35, ("decode-1", 0.25): 0.55, ("decode-1", 0.50): 0.75}
"""Least share of Belady's hits that `schedule` must have in decoding, by trace and share of slots."""
BYPASS_KEYS, BYPASS_SLOTS, BYPASS_PASSING, BYPASS_ROUNDS = 64, 32, 4, 20
BYPASS_TARGET = 0.9
"""Least share of the most hits that a dispatch of more keys than slots may have again and again: all slots but the passing ones."""


SCRIPT = Script("hits", __doc__, quick=f"the first {QUICK_USES} uses of each trace: a check, no figures")


def main() -> int:
    """Runs the bench. Gives 0 when every target holds, 1 otherwise: the figures are written either way."""
    arguments = SCRIPT.parser().parse_args()
    out, about, progress = SCRIPT.file(arguments), SCRIPT.heading(arguments), Console(stderr=True)
    rows: list[dict[str, Any]] = []
    slots: list[dict[str, Any]] = []
    with progress.status("bench hits") as status:
        for name in TRACES:
            trace = beginning(load(name), QUICK_USES) if arguments.quick else load(name)
            for share in SHARES:
                status.update(f"{trace.header.name}, {share:.0%}")
                rows.append(row_of(trace, share))
                if not trace.has_applies:
                    slots.append(slots_row_of(trace, share))
    bypass = bypass_row()
    report = {
        **about, "decode_model": json.loads((HERE / "traces" / "decode.json").read_text()), "bypass": bypass, "slots": slots,
        "traces": {name: load(name).header.how for name in TRACES}, "rows": rows,
    }  # fmt: skip
    out.write_text(json.dumps(report, indent=1) + "\n")
    draw(rows, out.with_suffix(".png"))
    render(rows, Console())
    render_slots(slots, bypass, Console())
    progress.print(f"written: {out}")
    return 0 if all(row["holds"] for row in (*rows, *slots, bypass)) else 1


def load(name: str) -> Trace:
    return unpack_trace((HERE / "traces" / f"{name}.trace").read_bytes())


def row_of(trace: Trace, share: float) -> dict[str, Any]:
    """Replays one trace at one size with every policy; judges whether `schedule` is near enough to the optimum and the others."""
    slots = slots_of(trace, share)
    outcomes = {name: replay(trace, slots, arena_policies(name, trace, slots)) for name in (*POLICIES, *BESIDE)}
    found = {name: figures(outcome) for name, outcome in outcomes.items()}
    rates = {name: figure["hit_rate"] for name, figure in found.items()}
    best_other = max(rates["lru"], rates["decayed_lfu"]) / rates["belady"]
    ratio = rates["schedule"] / rates["belady"]
    return {
        "trace": trace.header.name, "share": share, "is_training": trace.has_applies, "ratio": ratio, "best_other": best_other,
        "holds": ratio >= max(best_other, TARGET) if trace.has_applies else decode_holds(trace.header.name, share, rates),
        "policies": {name: asdict(outcome) | found[name] for name, outcome in outcomes.items()},
    }  # fmt: skip


def slots_row_of(trace: Trace, share: float) -> dict[str, Any]:
    """Hits of a client's cache of slots on a reader's visits, by policy; what does not fit passes by."""
    slots = slots_of(trace, share)
    found = {name: slot_counts(trace, slots, name) for name in KNOWN[READER]}
    uses = found["belady"].hits + found["belady"].loads
    counts = {name: asdict(one) for name, one in found.items()}
    rates = {name: one.hits / uses for name, one in found.items()}
    return {
        "trace": trace.header.name, "share": share, "slots": slots, "uses": uses, "ratio": rates["schedule"] / rates["belady"],
        "holds": decode_holds(trace.header.name, share, rates), "policies": counts,
    }  # fmt: skip


def decode_holds(name: str, share: float, rates: dict[str, float]) -> bool:
    """Judges the hit rates of all policies in decoding: whether that of `schedule` is near the best that does not know the future,
    and far enough towards Belady's."""
    best = max(rate for policy, rate in rates.items() if policy != "belady")
    is_near = rates["schedule"] >= best - DECODE_NEAR or share < DECODE_NEAR_FROM.get(name, 0.0)
    return is_near and rates["schedule"] >= DECODE_TARGETS.get((name, share), 0.0) * rates["belady"]


def bypass_row() -> dict[str, Any]:
    """Hits of a dispatch of twice the slots, again and again, by policy, as shares of the most that it may have."""
    visits = [[(0, expert) for expert in range(BYPASS_KEYS)]] * BYPASS_ROUNDS
    bound = (BYPASS_SLOTS - BYPASS_PASSING) * BYPASS_ROUNDS
    ratios = {}
    for name in SLOT_POLICIES:
        plan = SlotPlan(BYPASS_SLOTS, make_slot_policy(name, BYPASS_SLOTS, [0]), passing_slots=BYPASS_PASSING)
        ratios[name] = replay_visits(visits, plan).hits / bound
    return {"keys": BYPASS_KEYS, "slots": BYPASS_SLOTS, "holds": min(ratios.values()) >= BYPASS_TARGET, "ratios": ratios}


def figures(outcome: Outcome) -> dict[str, float]:
    uses = outcome.param_uses + outcome.optim_uses
    return {
        "hits": outcome.hits, "hit_rate": outcome.hits / uses, "param_hit_rate": outcome.param_hits / outcome.param_uses,
        "optim_hit_rate": outcome.optim_hits / max(1, outcome.optim_uses), "bytes_moved": outcome.bytes_moved,
    }  # fmt: skip


def render(rows: list[dict[str, Any]], console: Console) -> None:
    table = Table(title="Hits of both arenas, and bytes read and written, as shares of Belady's")
    for column in ("trace", "slots", *(f"{name} hits" for name in POLICIES[:3]), *(f"{name} bytes" for name in POLICIES[:3]), ""):
        table.add_column(column, justify="right")
    for row in rows:
        found = row["policies"]
        hits = [found[name]["hits"] / found["belady"]["hits"] for name in POLICIES[:3]]
        moved = [found[name]["bytes_moved"] / found["belady"]["bytes_moved"] for name in POLICIES[:3]]
        marks = "" if row["holds"] else "short"
        table.add_row(row["trace"], f"{row['share']:.0%}", *(f"{value:.3f}" for value in (*hits, *moved)), marks)
    console.print(table)


def render_slots(rows: list[dict[str, Any]], bypass: dict[str, Any], console: Console) -> None:
    table = Table(title="Hits of a client's slots, as shares of all uses; of a dispatch that does not fit, of the most it may have")
    for column in ("trace", "slots", *SLOT_POLICIES, *BESIDE, "belady", ""):
        table.add_column(column, justify="right")
    for row in rows:
        rates = [row["policies"][name]["hits"] / row["uses"] for name in (*SLOT_POLICIES, *BESIDE, "belady")]
        table.add_row(row["trace"], f"{row['share']:.0%}", *(f"{rate:.3f}" for rate in rates), "" if row["holds"] else "short")
    ratios = [f"{bypass['ratios'][name]:.3f}" for name in SLOT_POLICIES]
    bound = [*("" for _ in BESIDE), "1", "" if bypass["holds"] else "short"]
    table.add_row("dispatch", f"{bypass['slots']} of {bypass['keys']}", *ratios, *bound)
    console.print(table)


def draw(rows: list[dict[str, Any]], file: Path) -> None:
    """Draws hit rate against size, a panel for each trace."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    traces = list(dict.fromkeys(row["trace"] for row in rows))
    figure = Figure(figsize=(12.6, 3.6 * -(-len(traces) // 3)), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, trace in zip(figure.subplots(-(-len(traces) // 3), 3, squeeze=False).flat, traces, strict=False):
        chosen = [row for row in rows if row["trace"] == trace]
        for name in POLICIES:
            rates = [row["policies"][name]["hit_rate"] for row in chosen]
            colour, marker, line = STYLES[name]
            axes.plot([row["share"] for row in chosen], rates, line, marker=marker, color=colour, label=name)
        axes.set_title(trace, fontsize=10, loc="left")
        axes.set_xlabel("slots, as a share of the experts", fontsize=8)
        axes.set_ylim(0, 1.02)
        axes.grid(color="#e4e7ea")
    figure.axes[0].set_ylabel("hit rate, both arenas", fontsize=8)
    figure.axes[0].legend(fontsize=8)
    figure.savefig(file, dpi=130)


if __name__ == "__main__":
    sys.exit(main())
