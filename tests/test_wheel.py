"""The wheel holds what users install: the three packages, without the test kit, tests or benches. Alone it runs the quickstart."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest

from paramstore_testkit.source import imported_from, modules

ROOT = Path(__file__).resolve().parents[1]
INSTALL_TIMEOUT_S = 600
RUN_TIMEOUT_S = 120


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=RUN_TIMEOUT_S)
    (file,) = folder.glob("*.whl")
    return file


@pytest.mark.slow
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
def test_the_wheel_holds_the_product_alone(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    packages = {name.split("/")[0] for name in names if ".dist-info/" not in name}
    assert packages == {"paramstore", "paramstore_client", "paramstore_native"}
    assert {"paramstore_native/adamw.c", "paramstore_native/dequantize.c", "paramstore_client/py.typed"} <= set(names)
    kept = {name.removeprefix("paramstore/testing/") for name in names if name.startswith("paramstore/testing/")}
    assert kept == {
        "__init__.py", "catalogs.py", "clock.py", "memory_loans.py", "memory_namespace.py", "policies.py", "volume_contract.py",
        "volumes.py", "worker_contract.py", "workers.py",
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.soak
def test_the_wheel_alone_runs_the_quickstart_twice(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """In an empty environment, with neither the checkout nor what only developers have: uvloop, transformers, matplotlib."""
    installed, folder = tmp_path_factory.mktemp("installed"), tmp_path_factory.mktemp("quickstart")
    install(wheel, installed)
    shutil.copy(ROOT / "examples" / "quickstart.py", folder)
    python, paramstore = str(installed / "bin" / "python"), str(installed / "bin" / "paramstore")
    try:
        for step in (1, 2):
            assert output(folder, python, "quickstart.py").endswith(f"\nthe reader moves on to step {step}\n")
        assert "moe" in output(folder, paramstore, "status", "quickstart-data")
        assert output(folder, paramstore, "stop", "quickstart-data").startswith("stopped daemon ")
    finally:  # where one of them failed
        subprocess.run([paramstore, "stop", "quickstart-data"], cwd=folder, capture_output=True, timeout=RUN_TIMEOUT_S, check=False)


def install(wheel: Path, folder: Path) -> None:
    """Makes an environment of the wheel and what it depends on, with the torch that runs this test."""
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True, timeout=RUN_TIMEOUT_S)
    pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet"]
    index = os.environ.get("TORCH_INDEX")  # as the Makefile takes it
    torch = [*pip, f"torch=={version('torch')}", *(["--index-url", index] if index else [])]
    ran = subprocess.run(torch, capture_output=True, text=True, check=False, timeout=INSTALL_TIMEOUT_S)
    if ran.returncode != 0:
        pytest.skip(f"torch cannot be installed here: {ran.stderr.strip().splitlines()[-1:]}")
    subprocess.run([*pip, str(wheel)], check=True, capture_output=True, timeout=INSTALL_TIMEOUT_S)


def output(folder: Path, *command: str) -> str:
    """What a command prints in `folder`; it ends well and says nothing on stderr."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PARAMSTORE_"))}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=RUN_TIMEOUT_S, check=False)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    return done.stdout
