"""The demo in one picture: loss, where weights were found, bytes moved per step, and where every expert is at the end.

Colours are Okabe and Ito's, which colour-blind people can tell apart; no fact is told by colour alone.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.artist import Artist
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator, PercentFormatter

from paramstore.demo.report import DemoReport
from paramstore.demo.trace import StepTrace
from paramstore.demo.traffic import TIERS
from paramstore.sizes import format_size

BLUE, ORANGE, GREEN, RED, SKY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#56B4E9"
GREY, INK = "#D9D9D9", "#222222"
TIER_COLOURS = (GREEN, SKY, ORANGE, "#EEEEEE")
SIZE_INCHES = (14.0, 9.2)
DPI = 120
TOKENS_AREA_MAX = 90.0
MB = 1e6

Axes = Any
"""An `Axes` of matplotlib, which ships no types."""


def draw(report: DemoReport, path: Path) -> None:
    """Writes the picture to `path` as PNG, whole or not at all."""
    layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12, wspace=0.04, hspace=0.06)
    figure = Figure(figsize=SIZE_INCHES, dpi=DPI, layout=layout, facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.subplot_mosaic([["loss", "found"], ["moved", "placed"]])
    figure.suptitle(_title(report), fontsize=15, fontweight="bold", color=INK)
    _draw_loss(axes["loss"], report)
    _draw_found(axes["found"], report)
    _draw_moved(axes["moved"], report.committed_traces)
    _draw_placed(axes["placed"], report)
    temporary = path.with_suffix(".new")
    figure.savefig(temporary, format="png")
    os.replace(temporary, path)


def _title(report: DemoReport) -> str:
    shape = report.settings.shape
    return (
        f"{shape.layers} × {shape.experts} experts, {shape.expert_parameters / 1e6:.1f} M parameters: "
        f"{format_size(shape.expert_state_bytes)} of training state behind {format_size(report.host_budget_bytes)} of host memory"
    )


def _draw_loss(ax: Axes, report: DemoReport) -> None:
    settings = report.settings
    lost = [trace for trace in report.first if trace.step > settings.resume_step]
    ax.plot(*_losses(report.committed_traces), color=BLUE, linewidth=2.2, label="out of the store", zorder=2)
    ax.plot(
        *_losses(report.reference), color=INK, linestyle="", marker="x", markersize=7, zorder=3,
        label=f"in memory: {_equal(report.losses_bitwise_equal and report.weights_bitwise_equal)}",
    )  # fmt: skip
    ax.plot(
        *_losses(lost), color=RED, linestyle="", marker="o", markersize=8, markerfacecolor="none", markeredgewidth=1.6, zorder=3,
        label=f"lost at the kill, repeated: {_equal(report.resume_exact)}",
    )  # fmt: skip
    ax.axvspan(settings.resume_step, settings.kill_step, color=RED, alpha=0.08, linewidth=0)
    ax.axvline(settings.kill_step, color=RED, linewidth=1.2, linestyle="--")
    ax.annotate(
        f"daemon killed after step {settings.kill_step}, resumed at {settings.resume_step}", (settings.resume_step - 0.5, 0.96),
        xycoords=("data", "axes fraction"), ha="right", va="top", color=RED, fontsize=10.5,
    )  # fmt: skip
    _label(ax, "Training loss", "step", "cross-entropy, nats per byte")
    ax.set_xlim(0.5, settings.steps + 0.5)
    _legend_below(ax, columns=2)


def _equal(is_equal: bool) -> str:
    return "bitwise equal" if is_equal else "DIFFERENT"


def _losses(traces: Sequence[StepTrace]) -> tuple[list[int], list[float]]:
    return [trace.step for trace in traces], [trace.loss for trace in traces]


def _draw_found(ax: Axes, report: DemoReport) -> None:
    traces = report.committed_traces
    steps = [trace.step for trace in traces]
    prefetched = np.array([trace.traffic.prefetch_rate for trace in traces])
    kept = np.array([trace.traffic.host_hit_rate for trace in traces]) - prefetched
    missed = np.array([trace.traffic.nvme_rate for trace in traces])
    bottom = np.zeros(len(traces))
    for share, colour, hatch, name in (
        (kept, GREEN, "", "weights: in host memory"),
        (prefetched, SKY, "//", "weights: prefetched, there or on their way"),
        (missed, GREY, "", "weights: demanded from NVMe"),
    ):
        ax.bar(steps, share, bottom=bottom, width=1.0, color=colour, hatch=hatch, edgecolor="white", linewidth=0.4, label=name)
        bottom = bottom + share
    optimizer = [trace.traffic.optim_hit_rate for trace in traces]
    ax.plot(steps, optimizer, color=INK, linewidth=2, linestyle=":", label="optimizer: in host memory")
    _label(ax, "Where experts were found", "step", "share of lookups")
    ax.set_xlim(steps[0] - 0.5, steps[-1] + 0.5)
    ax.set_ylim(0, 1)
    ax.yaxis.set_major_formatter(PercentFormatter(1.0))
    _legend_below(ax, columns=2)


def _draw_moved(ax: Axes, traces: Sequence[StepTrace]) -> None:
    steps = [trace.step for trace in traces]
    read = np.array([trace.traffic.nvme_read_bytes for trace in traces]) / MB
    written = np.array([trace.traffic.nvme_written_bytes for trace in traces]) / MB
    leased = [trace.traffic.host_bytes / MB for trace in traces]
    ax.bar(steps, read, width=0.85, color=BLUE, label="read from NVMe")
    ax.bar(
        steps, written, bottom=read, width=0.85, color=ORANGE, hatch="//", edgecolor="white", linewidth=0.4,
        label="written to NVMe",
    )  # fmt: skip
    ax.plot(steps, leased, color=INK, linewidth=1.6, drawstyle="steps-mid", label="leased out of host memory")
    _label(ax, "Bytes moved, by tier", "step", "MB per step")
    ax.set_xlim(steps[0] - 0.5, steps[-1] + 0.5)
    ax.set_ylim(0, 1.05 * max([*(read + written), *leased, 1.0]))
    _legend_below(ax, columns=2)


def _draw_placed(ax: Axes, report: DemoReport) -> None:
    tiers = np.array([[TIERS.index(tier) for tier in row] for row in report.placement.tiers])
    tokens = np.array(report.routed_tokens)
    layers, experts = tiers.shape
    colours = ListedColormap(TIER_COLOURS)
    ax.pcolormesh(tiers, cmap=colours, vmin=-0.5, vmax=len(TIERS) - 0.5, edgecolors="white", linewidth=1.5)
    x, y = np.meshgrid(np.arange(experts) + 0.5, np.arange(layers) + 0.5)
    area = TOKENS_AREA_MAX * tokens / max(int(tokens.max()), 1)
    ax.scatter(x, y, s=area, color=INK, linewidths=0)
    _label(ax, f"Where the experts are after step {report.settings.steps}", "expert", "layer")
    ax.grid(visible=False)
    ax.set_yticks(np.arange(layers) + 0.5, [str(layer) for layer in range(layers)])
    marks = range(0, experts, max(1, experts // 8))
    ax.set_xticks([mark + 0.5 for mark in marks], [str(mark) for mark in marks])
    counts = [int((tiers == index).sum()) for index in range(len(TIERS))]
    patches = [
        Patch(facecolor=colour, edgecolor="#999999", label=f"{name}: {count}")
        for colour, name, count in zip(TIER_COLOURS, TIERS, counts, strict=True)
    ]
    dot_name = f"tokens since step {report.settings.resume_step}"
    dot = Line2D([], [], linestyle="", marker="o", markersize=6, color=INK, label=dot_name)
    _legend_below(ax, columns=3, handles=[*patches, dot])


def _label(ax: Axes, title: str, x: str, y: str) -> None:
    ax.set_title(title, loc="left", fontsize=12.5, fontweight="bold", color=INK)
    ax.set_xlabel(x)
    ax.set_ylabel(y)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(visible=True, axis="y", color="#E6E6E6", linewidth=0.8)
    ax.set_axisbelow(True)


def _legend_below(ax: Axes, *, columns: int, handles: Sequence[Artist] | None = None) -> None:
    """Puts the legend under the axis, where it can cover nothing."""
    options = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.14), "ncols": columns, "frameon": False, "fontsize": 9.5}
    if handles is None:
        ax.legend(**options)
    else:
        ax.legend(handles=handles, **options)
