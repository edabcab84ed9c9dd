"""Bounds, budgets and rows of the update phase; and one cell on a small store, whose bytes must add up."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from paramstore.bench.context import Bench
from paramstore.bench.plan import Plan, RecordSize
from paramstore.bench.report.rows import Row, Verdict
from paramstore.bench.service.experts import adamw_schema, rule_is_known
from paramstore.config import Config
from paramstore.engine.capacity.budget import split_budget, staging_bytes_of
from paramstore_bench.update_phase import (
    CELLS,
    Cell,
    Rates,
    Step,
    cells_of,
    host_budget_bytes,
    measure_phases,
    rows_of,
    touched_keys,
)

RATES = Rates(read=2.0, write=4.0, update=10.0)
PEER = "DeepSpeed ZeRO-Infinity NVMe, pipelined"


class CountingPeer:
    """Every step takes 5 s, it says."""

    name = PEER

    def __init__(self) -> None:
        self.steps = 0

    def step(self) -> float:
        self.steps += 1
        return 5.0


def test_reads_and_writes_share_the_device_and_the_update_runs_beside_them() -> None:
    assert RATES.bound_s(read_bytes=4.0, written_bytes=4.0, parameters=1.0) == 3.0
    assert RATES.bound_s(read_bytes=4.0, written_bytes=4.0, parameters=100.0) == 10.0
    assert RATES.bound_s(read_bytes=0.0, written_bytes=0.0, parameters=5.0) == 0.5


def rows(cell: Cell, seconds: float) -> list[Row]:
    step = Step(seconds, bound_s=1.0, moved_bytes=4e9, peers_s={PEER: 2.0})
    return rows_of(cell, [step] * 3, 100, {"optim_slots": 6.0})


def test_a_phase_stands_to_its_bound_as_the_bound_to_its_seconds() -> None:
    phase, peer = rows(Cell(None), 1.25)
    assert (phase.value, phase.limit, phase.ratio) == (3.2, 4.0, 0.8)
    assert phase.verdict is Verdict.SHORT
    assert phase.parts["optim_slots"] == 6.0
    assert (peer.value, peer.limit, peer.ratio) == (1.25, 2.0, 0.625)
    assert peer.target is None


@pytest.mark.parametrize(
    ("cell", "seconds", "holds"),
    [
        (Cell(0.5), 1.1, True), (Cell(0.5), 1.2, False),
        (Cell(None, 0.25), 0.69, True), (Cell(None, 0.25), 0.71, False),
    ],
)  # fmt: skip
def test_the_peers_targets_are_for_half_resident_and_a_quarter_touched(cell: Cell, seconds: float, holds: bool) -> None:
    assert rows(cell, seconds)[1].holds is holds


def test_the_full_pipeline_is_held_to_more_than_the_other_cells() -> None:
    assert rows(Cell(None), 1.1)[0].holds is False
    assert rows(Cell(0.25), 1.1)[0].holds is True


def test_touched_experts_are_others_in_each_step_and_the_same_for_equal_numbers() -> None:
    assert touched_keys(32, 0.25, 1) == touched_keys(32, 0.25, 1)
    assert touched_keys(32, 0.25, 1) != touched_keys(32, 0.25, 2)
    assert len(touched_keys(32, 0.25, 1)) == 8
    assert len(touched_keys(32, 1.0, 1)) == 32


@pytest.mark.parametrize("rule", ["touched", "exact"])
@pytest.mark.parametrize("count", [32, 144])
@pytest.mark.parametrize("resident", [None, 0.25, 0.5, 1.0])
def test_a_budget_gives_the_slots_that_its_cell_names(resident: float | None, count: int, rule: str) -> None:
    schema, config = adamw_schema(RecordSize(57 << 20), torch.bfloat16, rule), Config()
    workers = len(os.sched_getaffinity(0))
    pipeline_slots = workers + 4
    split = split_budget(
        schema, key_count=count, budget_bytes=host_budget_bytes(schema, count, resident), pipeline_slots=pipeline_slots,
        staging_bytes=staging_bytes_of(
            schema, io_threads=config.io_workers, piece_bytes=config.piece_bytes, advance_buffers=workers + 2
        ),
    )  # fmt: skip
    assert split is not None
    wanted = max(pipeline_slots, round(count * (resident or 0)))
    assert wanted <= split.working_slots <= wanted + 2
    assert split.param_slots >= count


def test_every_cell_has_a_name_of_its_own() -> None:
    assert len({cell.case for cell in CELLS}) == len(CELLS)
    assert Cell(0.5, 0.25).case == "50% of the states resident, 25% of the experts touched"
    assert replace(Cell(None), rule="exact").case == "pipeline-sized, all experts touched, exact"


def test_another_rule_than_touched_stands_beside_it_without_targets() -> None:
    cells = cells_of("exact")
    assert {(cell.resident, cell.touched) for cell in cells} == {(None, 1.0), (0.5, 1.0), (None, 0.25), (0.5, 0.25)}
    assert cells_of("touched") == CELLS
    assert [row.target for cell in cells for row in rows(cell, 9.0)] == [None] * 8


def test_a_rule_that_nobody_knows_is_not_run() -> None:
    assert rule_is_known("touched")
    assert rule_is_known("exact")
    assert not rule_is_known("twice")


@pytest.mark.slow
def test_an_exact_cell_updates_what_missed_steps_beside_what_is_touched(tmp_path: Path) -> None:
    bench = Bench(replace(Plan(), expert_size=RecordSize(1 << 20)), tmp_path)
    cell = Cell(0.5, 0.25, rule="exact")
    (phase,) = measure_phases(bench, [cell], param_dtype=torch.bfloat16, count=16, threads=2, steps=2, peers=[])
    assert phase.case == "50% of the states resident, 25% of the experts touched, exact"
    assert phase.parts["host_peak_bytes"] <= phase.parts["host_budget_bytes"]


@pytest.mark.slow
def test_a_cell_moves_what_its_experts_weigh(tmp_path: Path) -> None:
    bench, peer = Bench(replace(Plan(), expert_size=RecordSize(1 << 20)), tmp_path), CountingPeer()
    count = 16
    made = measure_phases(bench, [Cell(None)], param_dtype=torch.bfloat16, count=count, threads=2, steps=2, peers=[peer])
    phase, beside = made
    record_bytes = phase.record_bytes or 0
    assert 0 < phase.parts["moved_bytes"] <= 2 * count * record_bytes
    assert phase.parts["host_peak_bytes"] <= phase.parts["host_budget_bytes"]
    assert (beside.limit, peer.steps) == (5.0, 2)
    assert list(tmp_path.iterdir()) == []
