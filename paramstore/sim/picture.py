"""Draws what replays of one trace have counted: miss rate against slots, as figure 12 of "Towards MoE Deployment" does (arXiv
2303.06182), and beside it what memory buys, as its figure 13 does.

Time is modelled from counts: what a step moves between volume and memory, at a rate that was given or measured, and then its
arithmetic, with nothing hidden behind it. Without a rate the bytes themselves are drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from paramstore.core.trace import Trace
from paramstore.errors import ConfigError
from paramstore.sim.sweep import ALGORITHM2, BELADY, READER, Point

if TYPE_CHECKING:
    from matplotlib.axes import Axes

STYLES = {
    "schedule": ("#1f6f8b", "o", "-"), "decayed_lfu": ("#d9a441", "s", "-"), "lru": ("#8d98a1", "^", "-"),
    "lifo_inactive": ("#c8553d", "D", "-"), "ring": ("#6f9e3f", "v", "-"), ALGORITHM2: ("#8e63a8", "P", ":"),
    BELADY: ("#22262a", "o", "--"),
}  # fmt: skip
"""Policy -> colour, marker and line."""
GRID = "#e4e7ea"
MIB, GIB = 1 << 20, 1 << 30


@dataclass(frozen=True, slots=True)
class Cost:
    """What a step takes besides what it counts. source: where the rate is from, in words. compute_s: of a step; None: left out."""

    bytes_per_s: float
    source: str
    compute_s: float | None = None

    def step_s(self, point: Point, steps: int) -> float:
        """Modelled time of one of the `steps` of a replay."""
        return point.bytes_moved / steps / self.bytes_per_s + (self.compute_s or 0.0)


def check_steps(trace: Trace) -> int:
    """The number of the trace's steps. Raises ConfigError where none was marked: nothing can be said of one."""
    if not trace.steps:
        raise ConfigError(f"trace {trace.header.name!r} marks no step: what one takes cannot be said")
    return trace.steps


def draw(trace: Trace, points: Sequence[Point], file: Path, cost: Cost | None) -> None:
    """Writes the picture to `file`; its suffix chooses the format. points: of one place. Raises as `check_steps`."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    steps, place = check_steps(trace), points[0].place
    figure = Figure(figsize=(12.0, 5.2), layout="constrained")
    FigureCanvasAgg(figure)
    rates, times = figure.subplots(1, 2)
    plot_policies(rates, points, lambda point: point.slots, lambda point: point.miss_rate)
    rates.set_ylim(0, None)
    rates.set_xlabel("slots" if place == READER else "slots of each arena")
    rates.set_ylabel("miss rate")
    keys = len(trace.header.space)
    above = rates.secondary_xaxis("top", functions=(lambda slots: slots / keys * 100, lambda share: share / 100 * keys))
    above.set_xlabel(f"% of the {keys} experts", fontsize=9)
    above.spines["top"].set_visible(False)
    unit, unit_bytes = ("GiB", GIB) if max(point.memory_bytes for point in points) >= GIB else ("MiB", MIB)
    plot_policies(times, points, lambda point: point.memory_bytes / unit_bytes, lambda point: _height(point, steps, cost))
    times.set_ylim(0, None)
    times.set_xlabel(f"memory of the slots, {unit}")
    times.set_ylabel(_label(cost))
    where = "a reader's slots" if place == READER else "the arenas of a daemon"
    figure.suptitle(f"{trace.header.name}: {steps:,} steps replayed through {where}\n{_said(cost)}", fontsize=11)
    figure.legend(*rates.get_legend_handles_labels(), loc="outside lower center", ncols=len(STYLES), frameon=False)
    figure.savefig(file, dpi=130)


def plot_policies(axes: Axes, points: Sequence[Point], x: Callable[[Point], float], y: Callable[[Point], float]) -> None:
    """Draws a curve for each policy of `points`."""
    for policy, (colour, marker, line) in STYLES.items():
        if chosen := [point for point in points if point.policy == policy]:
            axes.plot(
                [x(point) for point in chosen], [y(point) for point in chosen], line, marker=marker, markersize=5, color=colour,
                label=policy, linewidth=1.6,
            )  # fmt: skip
    axes.grid(color=GRID)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _height(point: Point, steps: int, cost: Cost | None) -> float:
    return point.bytes_moved / steps / MIB if cost is None else cost.step_s(point, steps) * 1e3


def _label(cost: Cost | None) -> str:
    if cost is None:
        return "MiB moved in a step"
    return f"{'loads' if cost.compute_s is None else 'latency'} of a step, ms (modelled from counts)"


def _said(cost: Cost | None) -> str:
    if cost is None:
        return "misses, and bytes moved from and to the volumes, as counted: no time is modelled"
    compute = "arithmetic left out" if cost.compute_s is None else f"and {cost.compute_s * 1e3:g} ms of arithmetic"
    return f"latency modelled: bytes moved at {cost.source}, {compute}"
