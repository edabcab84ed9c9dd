"""The whole bench through a real daemon, so small that only its shape means anything."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from paramstore.bench.plan import MIB, Plan, RecordSize
from paramstore.bench.report.plot import READ, WRITE
from paramstore.bench.report.rows import SUBJECT, decode, encode
from paramstore.bench.tiers import run
from paramstore.errors import CapacityError
from paramstore_native import libpmem2

ROOT = Path(__file__).parent.parent.parent
PATHS = [str(path) for path in (ROOT, ROOT / "client", ROOT / "native")]
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(PATHS)}

TINY = replace(
    Plan.quick(),
    record_sizes=(RecordSize(2 * MIB),),
    expert_size=RecordSize(2 * MIB),
    set_bytes=16 * MIB,
    latency_calls=50,
    latency_record_bytes=(16 << 10, 64 << 10),
    loaded_latency_s=0.2,
)


@pytest.fixture
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty directory whose name is short: sockets have short paths."""
    return tmp_path_factory.mktemp("b")


def test_directory_without_room_is_refused_before_anything_is_written(directory: Path) -> None:
    with pytest.raises(CapacityError, match="--dir"):
        run(replace(TINY, set_bytes=1 << 50), directory, command="test", tell=lambda _: None)
    assert list(directory.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("--dir", "missing"), "--dir missing: there is no such directory"), (("--out", "file/r.json"), "--out file/r.json: "),
        (("--out", "r.png"), "it is the JSON file"),
    ],
)  # fmt: skip
def test_the_script_with_peers_refuses_what_it_cannot_write_before_it_measures(
    words: tuple[str, ...], reason: str, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    command = [sys.executable, str(ROOT / "bench" / "bench_tiers.py"), "--quick", *words]
    done = subprocess.run(command, cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert done.stderr.startswith("bench_tiers: ConfigError: ")
    assert reason in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.slow
def test_every_target_has_its_row_and_nothing_is_left_behind(directory: Path) -> None:
    report = run(TINY, directory, command="test", tell=lambda _: None)

    ours = {(row.name, row.case.partition(",")[0]) for row in report.rows if row.subject == SUBJECT and row.target is not None}
    assert ours >= {
        (READ, "param"), (READ, "optim"), (WRITE, "write_back"), (WRITE, "commit"),
        ("daemon's CPU while loading", "param"), ("daemon's CPU while loading", "optim"),
        ("acquire and release", "p50"), ("acquire and release", "independent of record size"),
        ("acquire and release", "p99 while the volume is read at full speed"),
        ("private memory of the client", "grows while a lease is read"),
        ("apply", "AdamW"), ("daemon's own memory", "torch loaded"),
        ("host budget in use at most", "param"), ("host budget in use at most", "optim"),
    }  # fmt: skip
    places = {row.case.partition(",")[0] for row in report.rows if row.name == READ and row.target is None}
    assert places >= {"param from two volumes", *([] if libpmem2.missing_reason() else ["param from a PMem volume"])}
    assert decode(encode(report)) == report
    assert list(directory.iterdir()) == []
