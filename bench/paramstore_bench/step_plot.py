"""Draws optimizer steps: our seconds, the bound beside them, and the peers', one line per cell."""

from __future__ import annotations

from pathlib import Path

from paramstore.bench.report.plot import LIMIT, OURS, PEER, TARGET
from paramstore.bench.report.rows import Report
from paramstore.bench.report.table import machine_line
from paramstore.sizes import format_size
from paramstore_bench.training import TRAINING

PHASE, STEP = "update phase", "optimizer step"
"""Names of the rows that are drawn: the phases give our seconds and the bound, the steps the peers'."""
LINE_INCHES, EDGE_INCHES = 0.26, 1.6

Lines = list[tuple[str, float, str]]
"""(label, seconds, colour), from top to bottom."""


def lines_of(report: Report) -> Lines:
    """Lists for each cell our line and the bound's; then each peer once, with the median of its seconds."""
    lines: Lines = []
    for row in (row for row in report.rows if row.name == PHASE):
        size = format_size(row.record_bytes or 0)
        lines.append((f"{row.case}, {size}", row.parts["step_s"], OURS))
        lines.append(("bound", row.parts["bound_s"], LIMIT))
    peers: dict[str, list[float]] = {}
    for row in (row for row in report.rows if row.name == STEP and row.limit is not None):
        peers.setdefault(row.against, []).append(row.limit or 0.0)
    lines += [(name, sorted(seconds)[len(seconds) // 2], PEER) for name, seconds in peers.items()]
    return lines


def draw_steps(report: Report, file: Path) -> None:
    """Writes the picture to `file`; its suffix chooses the format. Raises ValueError if the report has nothing to draw."""
    lines = lines_of(report)
    if not lines:
        raise ValueError("the report has no update phase: nothing to draw")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11.0, len(lines) * LINE_INCHES + EDGE_INCHES), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    positions = list(range(len(lines), 0, -1))
    labels, seconds, colours = zip(*lines, strict=True)
    axes.barh(positions, seconds, color=colours, height=0.8)
    axes.set_yticks(positions, labels, fontsize=8)
    axes.set_ylim(0.2, len(lines) + 0.8)
    for position, value in zip(positions, seconds, strict=True):
        axes.text(value, position, f" {value:.2f}", va="center", fontsize=8)
    axes.set_xlabel("seconds a step")
    figure.suptitle("One optimizer step, states on the volume: ours, the bound max(read + write, AdamW), and peers", fontsize=12)
    figure.supxlabel(machine_line(report), fontsize=7.5, color="#666666")
    figure.savefig(file, dpi=130)


def draw_training(report: Report, file: Path) -> None:
    """Draws tokens a second by host budget: ours, the roofline, everything in memory. Raises ValueError if the report has none."""
    rows = [row for row in report.rows if row.name == TRAINING]
    if not rows:
        raise ValueError("the report has no training: nothing to draw")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.0, len(rows) * 2 * LINE_INCHES + EDGE_INCHES), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    positions = list(range(len(rows), 0, -1))
    axes.barh(positions, [row.value for row in rows], color=OURS, height=0.6, label="paramstore", zorder=2)
    for position, row in zip(positions, rows, strict=True):
        axes.text(0.0, position, f" {row.value:.0f}, {row.ratio:.2f} of memory", va="center", fontsize=8, color="white", zorder=3)
    in_memory = [row.limit or 0.0 for row in rows]
    roofline = [row.parts["roofline_tokens_per_s"] for row in rows]
    for values, label, colour, length in ((in_memory, "everything in memory", PEER, 30), (roofline, "roofline", TARGET, 16)):
        axes.plot(values, positions, "|", markersize=length, markeredgewidth=3, color=colour, label=label, zorder=4)
    axes.set_yticks(positions, [row.case for row in rows], fontsize=8)
    axes.set_ylim(0.3, len(rows) + 0.7)
    axes.set_xlabel("tokens a second")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.08), ncols=3, fontsize=8, markerscale=0.4)
    figure.suptitle("Training with a part of the states in host memory", fontsize=12)
    figure.supxlabel(machine_line(report), fontsize=7.5, color="#666666")
    figure.savefig(file, dpi=130)
