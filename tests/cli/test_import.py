"""`paramstore import` and `export`: one result on stdout, the exit code tells, an interrupt can be gone on from."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import paramstore_client as ps
from paramstore.core.trace import Trace, TraceEvent, TraceEventKind, TraceHeader
from paramstore_client.hf import import_checkpoint
from paramstore_testkit.processes.daemon_process import DaemonProcess
from paramstore_testkit.processes.forked_daemon import ForkedDaemon
from paramstore_testkit.training.quantized_checkpoints import CHECKPOINTS
from paramstore_testkit.training.saved_models import save_stock, tensors_of

pytestmark = pytest.mark.slow
LIMIT_S = 60


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    with ForkedDaemon(tmp_path_factory.mktemp("cli") / "store", "--host-budget", "64MiB", "--gradient-budget", "8MiB") as daemon:
        yield daemon


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "paramstore", *words], capture_output=True, text=True, timeout=LIMIT_S, check=False
    )


def test_a_checkpoint_goes_in_and_comes_out_again(
    daemon: DaemonProcess, tmp_path: Path, paramstore: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    path = save_stock("mixtral", tmp_path / "hub")
    (path / "tokenizer.json").write_text("{}")
    common = ("--socket", daemon.address)
    done = run("import", str(path), "--namespace", "moe", "--updates", "touched", "--json", *common)
    assert (done.returncode, done.stderr) == (0, "")
    result = json.loads(done.stdout)
    assert (result["namespace"], result["step"], result["records"], result["resumed"]) == ("moe", 0, 16, 0)
    capsys.readouterr()
    assert paramstore("export", "moe", "--model", str(path), "--out", str(path), *common) == 2
    assert "ConfigError: " in capsys.readouterr().err
    assert paramstore("import", str(path), "--namespace", "moe", "--updates", "touched", *common) == 1
    assert "NamespaceExists: namespace 'moe' is committed at step 0: import into another --namespace" in capsys.readouterr().err
    assert paramstore("export", "moe", "--model", str(path), "--out", str(tmp_path / "out"), "--at", "0", "--json", *common) == 0
    out = capsys.readouterr()
    assert out.err == ""
    assert json.loads(out.out)["records"] == 16
    assert tensors_of(tmp_path / "out") == tensors_of(path)
    for name in ("config.json", "generation_config.json", "tokenizer.json"):
        assert (tmp_path / "out" / name).read_bytes() == (path / name).read_bytes()


@pytest.mark.parametrize("kind", CHECKPOINTS)
def test_a_quantized_checkpoint_goes_in_as_it_is_and_its_bytes_come_out(
    kind: str, daemon: DaemonProcess, tmp_path: Path, paramstore: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    path, out, common = CHECKPOINTS[kind](tmp_path / "hub"), tmp_path / "out", ("--socket", daemon.address)
    capsys.readouterr()
    assert paramstore("import", str(path), "--namespace", kind, *common) == 1
    assert f"the checkpoint is quantized ({kind}): such experts are served" in capsys.readouterr().err
    assert paramstore("import", str(path), "--namespace", kind, "--optimizer", "none", "--dtype", "bfloat16", *common) == 2
    assert "are quantized, and kept as they are" in capsys.readouterr().err
    assert paramstore("import", str(path), "--namespace", kind, "--optimizer", "none", *common) == 0
    assert paramstore("export", kind, "--model", str(path), "--out", str(out), "--shard-size", "128KiB", *common) == 0
    assert len(list(out.glob("*.safetensors"))) > 1
    assert bytes_of(out) == bytes_of(path)
    assert (out / "config.json").read_bytes() == (path / "config.json").read_bytes()


def bytes_of(directory: Path) -> dict[str, tuple[torch.dtype, torch.Size, bytes]]:
    tensors = {name: tensor for file in directory.glob("*.safetensors") for name, tensor in load_file(file).items()}
    return {name: (one.dtype, one.shape, one.view(torch.uint8).numpy().tobytes()) for name, one in tensors.items()}


def test_exit_codes_tell_what_went_wrong(
    daemon: DaemonProcess, tmp_path: Path, paramstore: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    path = save_stock("mixtral", tmp_path / "hub")
    capsys.readouterr()
    assert paramstore("import", str(path), "--namespace", "x", "--socket", f"unix://{tmp_path}/none") == 3
    assert capsys.readouterr().out == ""
    assert paramstore("import", str(tmp_path / "none"), "--namespace", "x", "--socket", daemon.address) == 1
    assert "CheckpointError" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    assert paramstore("import", str(tmp_path / "empty"), "--namespace", "x", "--socket", daemon.address) == 1
    assert f"CheckpointError: {tmp_path / 'empty'} is no checkpoint of transformers" in capsys.readouterr().err
    assert paramstore("import", str(path / "config.json"), "--namespace", "x", "--socket", daemon.address) == 1
    assert "config.json' is a file: give the directory " in capsys.readouterr().err
    assert paramstore("import", str(path)) == 2
    words = ("--model", str(path), "--out", str(tmp_path / "out"), "--socket", daemon.address)
    assert paramstore("export", "unknown", *words) == 1
    assert "UnknownNamespace" in capsys.readouterr().err


def test_half_a_checkpoint_makes_no_namespace(
    daemon: DaemonProcess, tmp_path: Path, paramstore: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    path = save_stock("mixtral", tmp_path / "hub")
    file = max(path.glob("*.safetensors"))
    os.truncate(file, file.stat().st_size - 1)
    assert paramstore("import", str(path), "--namespace", "half", "--socket", daemon.address) == 1
    assert f"CheckpointError: {file}: cut off" in capsys.readouterr().err
    with ps.connect(daemon.address) as store:
        assert "half" not in {known["name"] for known in store.namespaces()}


def test_a_trace_says_what_is_hot_and_one_of_another_model_or_a_damaged_one_makes_no_namespace(
    daemon: DaemonProcess, tmp_path: Path, paramstore: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    path, file = save_stock("mixtral", tmp_path / "hub"), tmp_path / "a.trace"
    words = ("import", str(path), "--namespace", "heated", "--updates", "touched", "--heat", str(file), "--socket", daemon.address)
    capsys.readouterr()
    schema, used = ps.param_schema({"w": ((2,), "float32")}).describe(), TraceEvent(TraceEventKind.ACQUIRE, 0, (1, 3))
    other = Trace(TraceHeader("other", schema, [0, 1, 2], 8, "by hand"), (used,))
    for content, said in (
        (None, "No such file"), (b"paramstore-trace 1\n", "this is no trace"), (other.pack(), "the trace 'other' is of 8 experts"),
    ):  # fmt: skip
        if content is not None:
            file.write_bytes(content)
        assert paramstore(*words) == 2
        assert said in capsys.readouterr().err
    with ps.connect(daemon.address) as store:
        assert "heated" not in {known["name"] for known in store.namespaces()}
    file.write_bytes(replace(other, header=replace(other.header, layers=[0, 1])).pack())
    assert paramstore(*words) == 0
    with ps.connect(daemon.address) as store:
        assert {known["name"]: known["committed_step"] for known in store.namespaces()}["heated"] == 0


def test_an_interrupt_says_how_to_go_on_and_the_same_command_does(daemon: DaemonProcess, tmp_path: Path) -> None:
    path = save_stock("mixtral", tmp_path / "hub", num_local_experts=256)
    words = ["import", str(path), "--namespace", "interrupted", "--updates", "touched", "--socket", daemon.address]
    command = [sys.executable, "-m", "paramstore", *words]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    with ps.connect(daemon.address) as store:
        while process.poll() is None:
            known = store.stats()["namespaces"].get("interrupted")
            if known is not None and known["records_written"]:
                break
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=LIMIT_S)
    assert process.returncode == -signal.SIGINT, said
    assert "interrupted; 'interrupted' keeps what is there, and the same command goes on from it" in said
    done = run(*words, "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["resumed"] > 0
    assert result["resumed"] + result["records"] == 512


def test_a_daemon_that_goes_away_is_told_with_the_way_on(
    daemon: DaemonProcess, tmp_path: Path, paramstore: Callable[..., int], capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    def gone(*_: object, **__: object) -> None:
        raise ps.StoreUnavailable("the daemon went away")

    words = ("import", str(save_stock("mixtral", tmp_path / "hub")), "--namespace", "gone", "--socket", daemon.address)
    with monkeypatch.context() as patch:
        patch.setattr(import_checkpoint, "import_checkpoint", gone)
        assert paramstore(*words) == 3
    said = capsys.readouterr().err
    assert "'gone' keeps what was saved, and once a daemon serves it again the same command goes on from it\n" in said
    assert said.endswith("StoreUnavailable: the daemon went away\n")
    assert paramstore(*words) == 0


@pytest.mark.parametrize(
    ("option", "known"),
    [("--optimizer", "adamw"), ("--updates", "exact"), ("--dtype", "bfloat16"), ("--state-dtype", "int8_blockwise")],
)
def test_a_value_that_an_option_does_not_have_is_a_usage_error_with_those_it_has(
    option: str, known: str, paramstore: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert paramstore("import", "nodir", "--namespace", "m", option, "wrong") == 2
    said = capsys.readouterr().err
    assert f"ConfigError: {option}='wrong'" in said
    assert known in said


@pytest.mark.parametrize("words", [("import", "nodir", "--namespace", "m"), ("export", "m", "--model", "nodir", "--out", "out")])
def test_a_checkpoint_that_is_not_there_is_told_before_torch_is_imported(
    words: tuple[str, ...], modules_of: Callable[..., set[str]]
) -> None:
    modules = modules_of(*words, code=1)
    assert "paramstore_client.checkpoint_directory" in modules
    assert not modules & {"torch", "transformers"}
