"""The wheel holds what users install: the three packages, without the test kit, tests or benches."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from paramstore_testkit.source import imported_from, modules

ROOT = Path(__file__).resolve().parents[1]


def test_of_the_benches_only_what_the_command_runs_is_installed() -> None:
    files = dict(modules())
    reached, todo = set(), ["paramstore.cli.bench"]
    while todo:
        module = todo.pop()
        if module not in reached:
            reached.add(module)
            origins = imported_from(module).values()
            todo += [name for origin in origins if (name := origin if origin in files else origin.rpartition(".")[0]) in files]
    shipped = {name for name, path in files.items() if name.startswith("paramstore.bench.") and path.name != "__init__.py"}
    assert shipped - reached == set()


@pytest.mark.slow
def test_the_wheel_holds_the_product_alone(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=120)
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    packages = {name.split("/")[0] for name in names if ".dist-info/" not in name}
    assert packages == {"paramstore", "paramstore_client", "paramstore_native"}
    assert {"paramstore_native/adamw.c", "paramstore_client/py.typed"} <= set(names)
    kept = {name.removeprefix("paramstore/testing/") for name in names if name.startswith("paramstore/testing/")}
    assert kept == {
        "__init__.py", "catalogs.py", "clock.py", "memory_namespace.py", "policies.py", "volume_contract.py", "volumes.py",
        "worker_contract.py", "workers.py",
    }  # fmt: skip
