"""Draws a report: how much of the disk's own rate each way of moving records reaches, with targets marked."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from paramstore.bench.report.rows import RAW, SUBJECT, Report, Row
from paramstore.bench.report.table import machine_line
from paramstore.directories import check_writable
from paramstore.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

OURS, PEER, LIMIT, TARGET = "#1f6f8b", "#b8bfc6", "#e3e7ea", "#c8553d"
"""Colours: our bars, the peers', raw I/O with other kinds of memory, and the mark of a target."""
TEXT_WIDTH = 0.42
"""Room to the right of the longest bar for its figures, as a ratio."""
READ, WRITE = "volume to host", "host to volume"
"""Names of the rows that are drawn: one panel per name and record size."""
BAR_HEIGHT_INCHES, PANEL_HEIGHT_INCHES = 0.34, 1.0


def panels_of(report: Report) -> dict[tuple[str, int], list[Row]]:
    """Groups rows with a ratio to raw by work and nominal record size in MiB; best first, reads before writes."""
    panels: dict[tuple[str, int], list[Row]] = {}
    for row in report.rows:
        if row.name in (READ, WRITE) and row.ratio is not None and row.record_bytes is not None:
            panels.setdefault((row.name, round(row.record_bytes / (1 << 20))), []).append(row)
    ordered = sorted(panels, key=lambda panel: (panel[0] != READ, panel[1]))
    return {panel: sorted(panels[panel], key=lambda row: row.ratio or 0.0, reverse=True) for panel in ordered}


def draw(report: Report, file: Path) -> None:
    """Writes the picture to `file`; its suffix chooses the format. Raises ValueError if the report has nothing to draw."""
    panels = panels_of(report)
    if not panels:
        raise ValueError("the report has no row with a ratio to raw: nothing to draw")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = min(2, len(panels))
    lines = -(-len(panels) // columns)
    bars = max(len(rows) for rows in panels.values())
    height = lines * (bars * BAR_HEIGHT_INCHES + PANEL_HEIGHT_INCHES) + 0.9
    figure = Figure(figsize=(6.6 * columns, height), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(lines, columns, squeeze=False)
    for axes in grid.flat[len(panels) :]:
        axes.set_axis_off()
    top = max(1.0, *(row.ratio_max or row.ratio or 0.0 for rows in panels.values() for row in rows))
    for axes, ((name, _), rows) in zip(grid.flat, panels.items(), strict=False):
        _draw_panel(axes, name, rows, top=top)
    figure.suptitle("Records between volume and host memory, as a share of raw O_DIRECT in the same minute", fontsize=13)
    figure.supxlabel(machine_line(report), fontsize=7.5, color="#666666")
    figure.savefig(file, dpi=130)


def check_target(file: Path, name: str = "--plot") -> None:
    """Checks that a picture can be drawn into `file`, and leaves nothing behind. name: the flag that it was given as. Raises
    ConfigError, so that it is known before measuring."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
    except ImportError as error:
        raise ConfigError(f"{name} {file}: pictures need matplotlib: pip install matplotlib") from error

    kinds = FigureCanvasAgg.get_supported_filetypes()
    if file.suffix.lower().removeprefix(".") not in kinds:
        raise ConfigError(f"{name} {file}: the suffix chooses the format: use {', '.join(f'.{kind}' for kind in sorted(kinds))}")
    check_writable(name, file)


def label_of(row: Row) -> str:
    return f"{row.subject}: {row.case}" if row.case else row.subject


def _draw_panel(axes: Axes, name: str, rows: list[Row], *, top: float) -> None:
    """Draws one panel. top: the highest ratio of all panels, so that all have one scale."""
    positions = list(range(len(rows), 0, -1))
    ratios = [row.ratio or 0.0 for row in rows]
    spread = [
        [ratio - (row.ratio_min if row.ratio_min is not None else ratio) for row, ratio in zip(rows, ratios, strict=True)],
        [(row.ratio_max if row.ratio_max is not None else ratio) - ratio for row, ratio in zip(rows, ratios, strict=True)],
    ]
    colours = [{SUBJECT: OURS, RAW: LIMIT}.get(row.subject, PEER) for row in rows]
    axes.barh(positions, ratios, height=0.66, color=colours, zorder=2)
    axes.errorbar(ratios, positions, xerr=spread, fmt="none", ecolor="#33383d", elinewidth=1, capsize=2.5, zorder=3)
    axes.axvline(1.0, color="#33383d", linewidth=1, zorder=1)
    for position, row, ratio in zip(positions, rows, ratios, strict=True):
        text = f"{ratio:.2f}  ({row.value:.1f} {row.unit})"
        axes.text(top + 0.04, position, text, va="center", fontsize=8, fontweight="bold" if row.subject == SUBJECT else None)
        if row.target is not None:
            axes.plot([row.target.bound] * 2, [position - 0.45, position + 0.45], color=TARGET, linewidth=2.2, zorder=4)
    axes.set_yticks(positions, [label_of(row) for row in rows], fontsize=8.5)
    axes.set_xlim(0, top + TEXT_WIDTH)
    axes.set_xticks([0, 0.25, 0.5, 0.75, 1.0], ["0", "0.25", "0.5", "0.75", "raw"], fontsize=8)
    axes.grid(axis="x", color="#e4e7ea", zorder=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(axis="y", length=0)
    targets = " (target in red)" if any(row.target for row in rows) else ""
    size_mib = (rows[0].record_bytes or 0) / (1 << 20)
    axes.set_title(f"{name}, records of {size_mib:.3g} MiB{targets}", fontsize=10, loc="left")
