"""bench/carry_device.py: what is carried is known, and is installed without a network beside the torch that is there."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "bench" / "carry_device.py"


@pytest.fixture
def carry(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    return importlib.import_module("carry_device")


def make_wheel(folder: Path, name: str) -> None:
    """Makes a wheel of one module, which knows a number."""
    about = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{name}.py", "NUMBER = 7\n")
        wheel.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        wheel.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{about}/RECORD", "")


def make_folder(path: Path, *pins: str) -> Path:
    path.mkdir()
    make_wheel(path, "carried_number")
    (path / "pins.txt").write_text("\n".join(pins))
    (path / "commit.txt").write_text("abc\n")
    return path


def install(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PIP_INDEX_URL": "http://127.0.0.1:9/", "PIP_CONFIG_FILE": os.devnull}
    command = [sys.executable, str(SCRIPT), "install", str(folder), "--venv", str(folder.parent / "made"), *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)


def test_pins_have_what_paramstore_and_its_models_need_but_torch(carry: ModuleType) -> None:
    names = {pin.partition("==")[0] for pin in carry.pins()}
    assert {"lmdb", "msgspec", "transformers", "tokenizers", "accelerate", "pytest", "safetensors"} <= names
    assert not {"torch", "numpy", "paramstore", "kvikio"} & names
    assert not [name for name in names if name.startswith(("nvidia", "triton"))]


def test_more_than_may_be_carried_is_refused(carry: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = [tmp_path / "some.whl", tmp_path / "some.py"]
    for file in files:
        file.write_bytes(bytes(500))
    assert carry.check_size(files) == 1000
    monkeypatch.setattr(carry, "LIMIT_BYTES", 999)
    with pytest.raises(carry.CarryError, match="have 1000 bytes, 999 may be carried: give fewer versions of --python"):
        carry.check_size(files)


@pytest.mark.slow
def test_environment_has_what_was_carried_the_checkout_and_the_torch_that_is_there(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "carried", "carried-number==1.0")
    done = install(folder, "--twin")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].endswith("bench/bench_device.py --commit abc --twin")
    code = "import carried_number as it, torch, paramstore_bench; print(it.NUMBER, torch.__version__, it.__file__)"
    python = tmp_path / "made" / "bin" / "python"
    found = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert found[:2] == ["7", torch.__version__]
    assert found[2].startswith(str(tmp_path / "made"))


@pytest.mark.slow
def test_what_is_missing_is_said(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "carried", "carried-number==1.0", "uncarried==2.0")
    done = install(folder, "--twin")
    assert (done.returncode, f"{folder} lacks a wheel for Python" in done.stderr) == (1, True), done.stderr
    (folder / "pins.txt").unlink()
    done = install(folder, "--twin")
    assert (done.returncode, "has no pins.txt: make it with" in done.stderr) == (1, True), done.stderr


def test_torch_without_a_device_is_refused_first(carry: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(carry.CarryError, match="finds no CUDA device: it needs a build with CUDA and a driver"):
        carry.install(tmp_path, tmp_path / "made", needs_device=True)
    monkeypatch.setattr(torch, "__version__", "2.9.1+cu126")
    with pytest.raises(carry.CarryError, match=r"2.9.1.* is too old: 2.10 or newer"):
        carry.install(tmp_path, tmp_path / "made", needs_device=False)
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(carry.CarryError, match=r"has no torch .* must be on the machine, in a build with CUDA"):
        carry.install(tmp_path, tmp_path / "made", needs_device=True)
    assert list(tmp_path.iterdir()) == []
