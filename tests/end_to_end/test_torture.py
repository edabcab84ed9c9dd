"""The script for strangers kills a few times and finds nothing; beside a daemon with a planted bug it finds the bug."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent.parent
SCRIPT = ROOT / "examples" / "torture.py"
SEED = 5
KILLS, BUG_KILLS = 3, 20
LIMIT_S = 150.0
PLANT = """
import sys
if "serve" in sys.orig_argv:
    from paramstore_testkit.bugs import daemon_bugs
    daemon_bugs.plant("lose_second_record")
"""


def torture(kills: int, *, path: tuple[Path, ...] = ()) -> tuple[int, str]:
    """(exit code, what it printed)."""
    paths = [str(entry) for entry in (*path, ROOT, ROOT / "client", ROOT / "native", ROOT / "testkit")]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PARAMSTORE_")}
    environment["PYTHONPATH"] = os.pathsep.join([*paths, *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--kills", str(kills), "--seed", str(SEED)], env=environment, capture_output=True, text=True,
        timeout=LIMIT_S, check=False,
    )  # fmt: skip
    assert done.stderr == "" or done.returncode, done.stderr
    return done.returncode, done.stdout + done.stderr


def test_it_finds_nothing_after_its_kills() -> None:
    code, printed = torture(KILLS)
    assert code == 0, printed
    lines = printed.splitlines()
    assert lines[0] == f"seed {SEED}"
    assert lines[-1] == "every acknowledged step came back, whole"
    assert sum(int(line.split()[0]) for line in lines if "killed: " in line) == KILLS
    assert any("steps checked" in line for line in lines)


def test_it_finds_a_daemon_that_loses_a_record(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(PLANT)
    code, printed = torture(BUG_KILLS, path=(tmp_path,))
    assert code == 1, printed
    assert f"BROKEN: seed {SEED}, kill " in printed
