"""`paramstore run` on a disk that fills up while it imports, and beside a process that trains what it answers with."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import paramstore as ps
from paramstore.holder import daemon_of
from paramstore.run import answers
from paramstore.run.model import RunModel
from paramstore_client.connection import autostart
from paramstore_client.handle.dense_part import DensePart
from paramstore_client.hf.checkpoint.recipes import ExpertSource
from paramstore_testkit.blocks.mounts import disk_at, mount, mounted_loops, unmount
from paramstore_testkit.blocks.thin import KIND, take_all, thin_files
from paramstore_testkit.processes.forked_daemon import ForkedDaemon
from paramstore_testkit.training.saved_models import save_stock
from paramstore_testkit.training.small_tokenizer import save_tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]
Run = Callable[..., int]
Capture = pytest.CaptureFixture[str]
TOKENS = 6
BUDGET = "64MiB"
GREEDY = ("--tokens", str(TOKENS), "--temperature", "0", "--host-budget", BUDGET)
KEYS_BEFORE = 4
"""Experts that are imported when the disk fills up."""
TRAINER = """
import sys
import torch
import paramstore as ps
from transformers import AutoModelForCausalLM

address, path, dense = sys.argv[1:]
torch.set_num_threads(1)
with ps.connect(address) as store:
    model = ps.hf.from_pretrained(AutoModelForCausalLM, path, store=store, mode="train", name="moe", dtype=torch.bfloat16)
    experts = ps.hf.experts(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    experts.attach(optimizer)
    print("ready", flush=True)
    for step in map(int, sys.stdin):
        ids = torch.randint(3, 127, (2, 33), generator=torch.Generator().manual_seed(step))
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        experts.commit(step, dense=dense).wait()
        print(f"step {step}", flush=True)
"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = save_stock("qwen3_moe", tmp_path_factory.mktemp("hub") / "tiny", vocab_size=128, max_position_embeddings=256)
    save_tokenizer(path)
    return path


def said_by(model: Any, path: Path, *said: str) -> str:
    """What a model answers to the last of what was said, users and answers in turn."""
    tokenizer = AutoTokenizer.from_pretrained(path)
    messages = [{"role": ("user", "assistant")[number % 2], "content": text} for number, text in enumerate(said)]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)["input_ids"]
    made = model.generate(ids, max_new_tokens=TOKENS, do_sample=False, pad_token_id=127)
    return str(tokenizer.decode(made[0, ids.shape[1] :], skip_special_tokens=True))


@pytest.fixture(scope="module")
def answer(checkpoint: Path) -> str:
    """What the model in memory answers to "hello", and a line's end."""
    return said_by(AutoModelForCausalLM.from_pretrained(checkpoint, dtype="auto"), checkpoint, "hello") + "\n"


@contextmanager
def before(patch: pytest.MonkeyPatch, owner: object, name: str, act: Callable[[], object], *, call: int = 1) -> Iterator[None]:
    """A block in which `act` is done just before the call of that number."""
    acted, counted = getattr(owner, name), list[None]()

    def counting(*words: Any, **named: Any) -> Any:
        counted.append(None)
        if len(counted) == call:
            act()
        return acted(*words, **named)

    with patch.context() as here:
        here.setattr(owner, name, counting)
        yield
    assert len(counted) >= call, "it was not called so often"


@pytest.mark.parametrize("moment", ["answering", "counting"])
def test_a_daemon_that_is_killed_is_told_on_a_line_of_its_own_and_the_same_command_answers(
    moment: str, checkpoint: Path, answer: str, tmp_path_factory: pytest.TempPathFactory, paramstore: Run, capsys: Capture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = tmp_path_factory.mktemp("k") / "s"
    words = ("run", str(checkpoint), "hello", "--dir", str(store), "--expert-memory", "1", *GREEDY)

    def kill() -> None:
        daemon = daemon_of(store)
        assert daemon is not None
        os.kill(daemon, signal.SIGKILL)

    owner, name, call = {"answering": (answers._Listener, "put", 3), "counting": (RunModel, "bytes_read", 2)}[moment]
    with before(monkeypatch, owner, name, kill, call=call):
        assert paramstore(*words) == 3
    said = capsys.readouterr()
    assert said.out.endswith("\n")
    assert said.err.endswith(f"StoreUnavailable: the daemon of {store} went away: give the same command again\n")
    assert paramstore(*words) == 0
    assert capsys.readouterr().out == answer


# --- a disk that fills up


@pytest.mark.parametrize("small_disk", [48], indirect=True)
def test_a_disk_that_others_fill_during_the_import_stops_no_run_as_its_room_was_taken_before(
    small_disk: Path, checkpoint: Path, answer: str, paramstore: Run, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("run", str(checkpoint), "hello", "--dir", str(small_disk / "s"), *GREEDY)
    with before(monkeypatch, ExpertSource, "read", lambda: take_all(small_disk / "others"), call=KEYS_BEFORE):
        assert paramstore(*words) == 0
    assert capsys.readouterr().out == answer
    assert os.statvfs(small_disk).f_bavail == 0
    assert paramstore(*words) == 0, "a daemon of a store that is there needs no room"
    assert capsys.readouterr().out == answer


PLACES: dict[str, tuple[object, str, int, str]] = {
    "daemon": (autostart._Start, "_launch", 3, r"StoreUnavailable: .*daemon.log has nothing new: its disk is full, with 0 bytes "
                                               r"free; free some there, and try again"),
    "namespace": (ps.Store, "create_namespace", 1, r"CapacityError: .*its file system has 0 bytes free: free some there, and try"),
}  # fmt: skip
"""Before which call of a run the disk fills up, its exit code, and what is said."""


@pytest.mark.parametrize("small_disk", [48], indirect=True)
@pytest.mark.soak
@pytest.mark.parametrize("place", PLACES)
def test_a_disk_that_others_fill_before_a_run_has_its_room_is_told_of_and_the_same_command_goes_on_after(
    place: str, small_disk: Path, checkpoint: Path, answer: str, paramstore: Run, capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    owner, name, code, reason = PLACES[place]
    words = ("run", str(checkpoint), "hello", "--dir", str(small_disk / "s"), *GREEDY)
    with before(monkeypatch, owner, name, lambda: take_all(small_disk / "others")):
        assert paramstore(*words) == code
    assert_told(capfd, reason)
    assert paramstore(*words) == code, "it is full still"
    assert_told(capfd, reason)
    assert daemon_of(small_disk / "s") is None
    (small_disk / "others").unlink()
    assert paramstore(*words) == 0
    assert capfd.readouterr().out == answer


def assert_told(captured: pytest.CaptureFixture[str], reason: str) -> None:
    """Asserts that nothing was answered, and the last line says why."""
    said = captured.readouterr()
    assert said.out == ""
    assert "Traceback" not in said.err
    assert re.search(reason, said.err.splitlines()[-1]), said.err


@pytest.mark.soak
def test_a_disk_that_gave_room_and_has_none_when_the_import_writes_is_told_of_and_the_same_command_goes_on_after(
    tmp_path: Path, checkpoint: Path, answer: str, paramstore: Run, capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """As thin provisioning does."""
    monkeypatch.setenv("PARAMSTORE_PREFILL", "0")  # else zeros have got the room already
    with ExitStack() as stack:
        try:
            files, hog = stack.enter_context(thin_files(tmp_path, 1))
            loops = stack.enter_context(mounted_loops(tmp_path, files[1:], kind=KIND))
        except OSError as error:
            pytest.skip(f"cannot make a disk over a small one here: {error}")
        disk = disk_at(tmp_path, 0)
        words = ("run", str(checkpoint), "hello", "--dir", str(disk / "s"), *GREEDY)
        with before(monkeypatch, ExpertSource, "read", lambda: take_all(hog), call=KEYS_BEFORE):
            assert paramstore(*words) == 1
        assert_told(capfd, r"CapacityError: .*No space left on device\): restart the daemon .* or making room where it is full")
        assert daemon_of(disk / "s") is None
        unmount(disk)
        hog.unlink()
        mount(loops[0].path, disk, KIND)
        assert paramstore(*words) == 0
        assert capfd.readouterr().out == answer


# --- beside a trainer


@pytest.mark.soak
def test_a_chat_that_follows_a_trainer_answers_with_the_newest_step_that_it_has_committed(
    checkpoint: Path, tmp_path: Path, paramstore: Run, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ExitStack() as stack:
        daemon = stack.enter_context(ForkedDaemon(tmp_path / "s", "--host-budget", BUDGET))
        store = stack.enter_context(ps.connect(daemon.address))
        command = [sys.executable, "-c", TRAINER, daemon.address, str(checkpoint), str(tmp_path / "dense")]
        trainer = stack.enter_context(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
        stack.callback(trainer.kill)
        answered(trainer, "", "ready")
        memory = AutoModelForCausalLM.from_pretrained(checkpoint, dtype="auto")
        said, expected, heard, told = list[str](), list[str](), list[str](), list[str]()
        turns = iter([("hello", []), ("and now?", [1]), ("and more", [2, 3]), ("still there?", [])])

        def read(sign: str) -> str:
            """The next line for the chat, after further steps of the trainer."""
            out, err = capsys.readouterr()
            heard.append(out)
            told.extend(line for line in err.splitlines() if "at step" in line)
            line, steps = next(turns, ("", []))
            if not line:
                raise EOFError
            said.append(line)
            stale = said_by(memory, checkpoint, *said)
            for step in steps:
                answered(trainer, f"{step}\n", f"step {step}")
                load_step(memory, store, step)
            said.append(said_by(memory, checkpoint, *said))
            assert not steps or said[-1] != stale, "the step before has this answer too: this shows nothing"
            expected.append(f"{said[-1]}\n")
            return line

        monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
        monkeypatch.setattr("builtins.input", read)
        words = ("run", str(checkpoint), "--dir", str(tmp_path / "s"), "--namespace", "moe", "--follow", *GREEDY[:4])
        assert paramstore(*words) == 0
        assert heard[1:] == expected
        assert told == ["paramstore: at step 1", "paramstore: at step 3"]
        assert daemon_of(tmp_path / "s") == daemon.pid


def answered(trainer: subprocess.Popen[str], line: str, answer: str) -> None:
    """Gives a trainer a line; returns when it has answered so."""
    assert trainer.stdin is not None
    assert trainer.stdout is not None
    trainer.stdin.write(line)
    trainer.stdin.flush()
    assert trainer.stdout.readline() == f"{answer}\n"


@torch.no_grad()
def load_step(model: Any, store: ps.Store, step: int) -> None:
    """Gives an unmodified model the experts and the dense weights of a step that a trainer has committed."""
    layout = ps.hf.find_layout(model)
    with store.open_namespace("moe", at=step) as reader:
        dense = DensePart.from_extra(reader.extra(step))
        assert dense is not None
        model.load_state_dict(load_file(dense.path), strict=False)
        for layer, expert in reader.space:
            record = reader.read((layer, expert))
            for tensor in layout.tensors:
                model.get_parameter(f"{layout.modules[layer]}.{tensor.name}")[expert].copy_(record[tensor.name])
