"""A timeline puts the model's work and the daemon's moves on one clock, and says how much of one lay beside the other."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from paramstore_client.training.timeline import DAEMON_PID, Timeline, find_overlap


class OneMove:
    """A store that moved one expert while the block ran."""

    def __init__(self) -> None:
        self.began_s = 0.0

    def trace_begin(self) -> None:
        self.began_s = time.monotonic()

    def trace_end(self) -> Mapping[str, Any]:
        move = ["load_param", "moe", 1, 2, "prefetch", 4096, self.began_s, self.began_s, time.monotonic()]
        return {"transfers": [move], "dropped": 7, "now_s": time.monotonic()}


def compute(start_us: float, end_us: float, name: str = "aten::mm") -> dict[str, Any]:
    return {"ph": "X", "name": name, "ts": start_us, "dur": end_us - start_us, "pid": 1, "tid": 1}


def move(start_us: float, end_us: float, *, kind: str = "load_param", urgency: str = "prefetch") -> dict[str, Any]:
    return {"ph": "X", "name": kind, "ts": start_us, "dur": end_us - start_us, "args": {"urgency": urgency}}


def test_each_kind_of_move_is_counted_apart_and_only_where_the_model_computes() -> None:
    events = [
        compute(0, 1e6), compute(0.5e6, 2e6, "aten::addmm"), compute(5e6, 6e6, "gloo:all_gather"), compute(8e6, 9e6, "aten::add"),
    ]  # fmt: skip
    moves = [
        move(1e6, 3e6), move(1.5e6, 2.5e6), move(0, 1e6, urgency="demand"),
        move(1e6, 2e6, kind="write", urgency="write_back"), move(8e6, 9e6, kind="update", urgency="demand"),
    ]  # fmt: skip
    overlap = find_overlap([*events, {"ph": "M", "name": "aten::mm"}], moves, dropped=0)
    assert overlap.compute_s == pytest.approx(2)
    assert (overlap.prefetches.seconds, overlap.prefetches.beside_compute_s) == (pytest.approx(2), pytest.approx(1))
    assert overlap.prefetches.fraction == pytest.approx(0.5)
    assert overlap.demands.fraction == pytest.approx(1)
    assert overlap.write_backs.fraction == pytest.approx(1)
    assert (overlap.dense.seconds, overlap.dense.fraction) == (pytest.approx(1), 0)
    assert (overlap.updates.seconds, overlap.updates.fraction) == (pytest.approx(1), 0)


def test_what_did_not_move_overlaps_with_nothing() -> None:
    overlap = find_overlap([], [], dropped=3)
    assert (overlap.prefetches.fraction, overlap.transfers_dropped) == (0, 3)


@pytest.mark.slow
def test_a_move_during_a_product_lies_beside_it_in_the_picture(tmp_path: Path) -> None:
    with Timeline(OneMove(), tmp_path / "picture.json") as timeline:
        matrix = torch.ones(700, 700)
        for _ in range(5):
            matrix = matrix @ matrix
    picture = json.loads((tmp_path / "picture.json").read_text())
    moves = [event for event in picture["traceEvents"] if event.get("pid") == DAEMON_PID and event["ph"] == "X"]
    assert [(event["name"], event["args"]["layer"], event["args"]["expert"]) for event in moves] == [("load_param", 1, 2)]
    products = [event for event in picture["traceEvents"] if event.get("name") == "aten::mm"]
    assert len(products) == 5
    assert all(moves[0]["ts"] <= product["ts"] <= moves[0]["ts"] + moves[0]["dur"] for product in products)
    assert timeline.overlap.prefetches.beside_compute_s == pytest.approx(timeline.overlap.compute_s)
    assert timeline.overlap.transfers_dropped == 7


def test_a_block_that_fails_leaves_its_picture_and_its_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="as planned"), Timeline(OneMove(), tmp_path / "picture.json"):
        raise ValueError("as planned")
    assert (tmp_path / "picture.json").exists()
