"""The pictures of steps and of training."""

from __future__ import annotations

from pathlib import Path

import pytest

from paramstore.bench.report.rows import Report, Row
from paramstore_bench.step_plot import draw_steps, draw_training, lines_of
from paramstore_bench.training import PairedStep, Phases, row_of
from paramstore_bench.update_phase import Cell, Step, rows_of

PNG = b"\x89PNG"


def report(rows: list[Row]) -> Report:
    return Report(machine={"cpu": "x"}, commit="c", command="b", date="d", seconds=1, rows=rows)


def steps_report() -> Report:
    steps = [Step(1.25, bound_s=1.0, moved_bytes=4e9, peers_s={"Peer": 2.0})]
    return report([row for cell in (Cell(None), Cell(0.5)) for row in rows_of(cell, steps, 57 << 20, {})])


def test_each_cell_has_a_line_and_its_bound_and_each_peer_one() -> None:
    assert [(label, seconds) for label, seconds, _ in lines_of(steps_report())] == [
        ("pipeline-sized, all experts touched, 57 MiB", 1.25), ("bound", 1.0),
        ("50% of the states resident, all experts touched, 57 MiB", 1.25), ("bound", 1.0), ("Peer", 2.0),
    ]  # fmt: skip


@pytest.mark.slow
def test_pictures_are_drawn(tmp_path: Path) -> None:
    draw_steps(steps_report(), tmp_path / "steps.png")
    paired = PairedStep(Phases(1.0, 1.0, 1.0), Phases(1.0, 1.0, 0.5), io_s=0.5, moved_bytes=8.0)
    draw_training(report([row_of(0.5, [paired], tokens=10, record_bytes=7, facts={})]), tmp_path / "training.png")
    assert (tmp_path / "steps.png").read_bytes().startswith(PNG)
    assert (tmp_path / "training.png").read_bytes().startswith(PNG)


def test_nothing_to_draw_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="update phase"):
        draw_steps(report([]), tmp_path / "x.png")
    with pytest.raises(ValueError, match="training"):
        draw_training(report([]), tmp_path / "x.png")
