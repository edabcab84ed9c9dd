"""The bench of expert-parallel layers runs as a user runs it, and says what it is for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from paramstore_testkit.nodes import namespaces, quota

ROOT = Path(__file__).parents[2]


def run(directory: Path, *options: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PARAMSTORE_")}
    return subprocess.run(
        [sys.executable, str(ROOT / "bench" / "bench_moe.py"), "--quick", "--dir", str(directory), *options],
        env=environment, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip


@pytest.mark.slow
def test_a_quick_run_writes_its_rows_and_leaves_nothing(tmp_path_factory: pytest.TempPathFactory) -> None:
    directory = tmp_path_factory.mktemp("b")  # a socket's path is short
    file = directory / "moe.json"
    done = run(directory, "--out", str(file), "--only", "service,peer,capacity,auto,elastic")
    assert done.returncode in (0, 1), done.stderr  # 1: a figure falls short, which says nothing of small layers
    rows = json.loads(file.read_text())["rows"]
    assert [(row["name"], row["against"], row["target"]["bound"]) for row in rows] == [
        ("gradients pushed", "without expert parallelism", 0.26),
        ("experts leased", "without expert parallelism", 0.26),
        ("gradient norm and apply", "without expert parallelism", 1.8),
        ("training step", "without expert parallelism", 1.15),
        ("layer", "transformers' all-to-all, bare", pytest.approx(0.9524, abs=1e-4)),
        ("layer", "transformers' all-to-all, as loaded", pytest.approx(0.9524, abs=1e-4)),
        ("layer", "fixed capacity, none dropped", 3.0),
        ("layer", "one part, the pipeline searched for", pytest.approx(0.9524, abs=1e-4)),
        *([] if quota.missing_reason() else [("tasks spread over ranks", "one task on each rank", 1.12)]),
    ]
    assert [row["ratio"] for row in rows[:2]] == [0.25, 0.25], "each rank had all experts, and has a quarter of them"
    assert rows[7]["parts"]["calls_searching"] >= 6
    for row in rows[8:]:
        assert row["parts"]["rows_of_the_first_rank"] == 64
        assert row["parts"]["difference_gradients of the body"] <= 1e-5
        assert row["parts"]["difference_gradients of experts"] <= 1e-5
    for row in rows[4:8]:
        assert row["parts"]["difference_y"] <= 1e-5
        assert row["parts"]["sent_bytes"] > 0
    assert rows[6]["parts"]["fixed_bytes"] > rows[6]["parts"]["sent_bytes"]
    assert [path.name for path in directory.iterdir()] == ["moe.json"]


@pytest.mark.slow
def test_exchanges_are_measured_over_links(tmp_path: Path) -> None:
    if reason := namespaces.missing_reason():
        pytest.skip(reason)
    file = tmp_path / "moe.json"
    done = run(tmp_path, "--out", str(file), "--only", "links")
    assert done.returncode in (0, 1), done.stderr
    rows = {(row["name"], row["case"].rpartition(", ")[2]): row for row in json.loads(file.read_text())["rows"]}
    assert {name: bound["bound"] for name, row in rows.items() if (bound := row["target"])} == {
        ("rows by rails, a spine of a quarter", "auto"): 1.2,
        ("rows over one link", "auto"): 0.95,
        ("tokens over one link", "row_per_node"): 1.5,
        ("tokens over one link", "auto"): 1.5,
    }
    once = rows["tokens over one link", "row_per_node"]["parts"]
    assert once["crossing_bytes"] < once["flat_crossing_bytes"] / 3.5
    assert rows["rows by rails, a spine of a quarter", "auto"]["note"].startswith("ranks 0,1 | 2,3: ")


@pytest.mark.slow
def test_a_layer_in_parts_is_measured_over_a_link_and_by_its_memory(tmp_path: Path) -> None:
    file, has_links = tmp_path / "moe.json", not namespaces.missing_reason()
    done = run(tmp_path, "--out", str(file), "--only", "parts,memory")
    assert done.returncode in (0, 1), done.stderr
    rows = json.loads(file.read_text())["rows"]
    names = [(row["name"], row["target"]["bound"]) for row in rows if row["target"]]
    assert names.count(("layer in parts over a link", 1.25)) == (6 if has_links else 0), "the best of each case and split"
    model = {row["case"]: row for row in rows if row["name"] == "model of a layer in parts"}
    assert len(model) == (2 if has_links else 0)
    assert all(case.startswith("9 points") and row["value"] > 0 for case, row in model.items())
    assert names.count(("chosen number of parts", 1.1)) == (6 if has_links else 0)
    simulated = [row for row in rows if row["name"].startswith("simulated")]
    assert len(simulated) == (12 if has_links else 0)
    assert all("simulated from what 4 ranks measured" in row["note"] for row in simulated)
    memory = [row for row in rows if row["against"] == "all kept"]
    assert len(memory) == 16
    assert all(row["ratio"] < 1 for row in memory)
    assert all((row["parts"]["host_bytes"] == 0) == row["case"].endswith("S4") for row in memory)
    formula = {(row["name"], row["case"].rpartition(" parts of ")[2]): row for row in rows if row["name"].startswith("formula")}
    assert len(formula) == 2 * (2 * 5 + 3), "held and peak of each way, and of three ways what waits on the host"
    for row in formula.values():
        assert row["target"]["bound"] == 0.10
        measured = row["parts"]["measured_bytes"]
        assert row["value"] == pytest.approx(abs(row["parts"]["formula_bytes"] - measured) / measured)


@pytest.mark.slow
def test_a_layer_is_measured_on_devices_for_which_processors_stand(tmp_path: Path) -> None:
    file = tmp_path / "moe.json"
    done = run(tmp_path, "--out", str(file), "--device", "cpu")
    assert done.returncode == 0, done.stderr
    rows = json.loads(file.read_text())["rows"]
    assert [row["name"] for row in rows] == ["layer in parts on 1 cpu device"] * 8 + ["layer in parts on 2 cpu devices"] * 8
    for row in rows:
        if row["case"].endswith(("S1", "S2", "S3", "S4")):
            assert row["parts"]["held_bytes"] < row["parts"]["plain_held_bytes"]


def test_a_device_that_is_not_there_is_named(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    done = run(tmp_path, "--device", "cuda")
    assert done.returncode == 1
    assert done.stderr == "bench_moe: --device cuda: no CUDA device here; --device cpu shows that it runs\n"


def test_a_part_that_is_none_is_refused(tmp_path: Path) -> None:
    done = run(tmp_path, "--only", "service,pear", "--out", str(tmp_path / "moe.json"))
    assert done.returncode != 0
    assert "--only service,pear: write some of service, peer, capacity, auto, elastic, links, parts, memory, " in done.stderr
    assert list(tmp_path.iterdir()) == []
