"""`paramstore run`: the model's own tokens on stdout, everything else on stderr, and nothing left behind, however it ends."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import signal
import socket
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import paramstore_client as ps
from paramstore.cli import run as command
from paramstore.cli import signals
from paramstore.errors import ConfigError
from paramstore.holder import daemon_of
from paramstore.run import answers, model, plan, server
from paramstore.run.daemon import RunDaemon
from paramstore.run.home import home_of
from paramstore_client.connection import autostart
from paramstore_client.hf.checkpoint.recipes import ExpertSource
from paramstore_client.namespace import Namespace
from paramstore_client.running import find_daemon
from paramstore_testkit.processes.forked_daemon import ForkedDaemon
from paramstore_testkit.training.quantized_checkpoints import CHECKPOINTS
from paramstore_testkit.training.saved_models import save_stock
from paramstore_testkit.training.small_tokenizer import save_tokenizer

pytestmark = pytest.mark.slow
Run = Callable[..., int]
GREEDY = ("--tokens", "6", "--temperature", "0", "--host-budget", "64MiB")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = save_stock("qwen3_moe", tmp_path_factory.mktemp("hub") / "tiny", vocab_size=128, max_position_embeddings=256)
    save_tokenizer(path)
    return path


@pytest.fixture
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The user's cache directory; no daemon runs in it at the end."""
    path = tmp_path_factory.mktemp("c")
    monkeypatch.setenv("XDG_CACHE_HOME", str(path))
    yield path
    for store in (path / "paramstore").glob("*"):
        if (daemon := find_daemon(store / "run" / "paramstore.sock")) is not None:
            with daemon:
                daemon.send(signal.SIGTERM)
                assert daemon.has_ended(30)


def store_of(checkpoint: Path) -> Path:
    return home_of(str(checkpoint), directory=None, namespace=None, dtype=None).directory


def assert_no_daemon(store: Path) -> None:
    """Asserts that none is there, or that it is about to end: who interrupted the run does not wait for it."""
    if (daemon := find_daemon(store / "run" / "paramstore.sock")) is not None:
        with daemon:
            assert daemon.has_ended(30)
    if (process := autostart.started_in(store)) is not None:
        process.wait(30)


def answer_of(checkpoint: Path, prompt: str, *, is_raw: bool = False) -> str:
    """What the model in memory answers, as transformers writes it."""
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    if tokenizer.chat_template and not is_raw:
        prompt = f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n"
    found = tokenizer(prompt, return_tensors="pt")["input_ids"]
    memory = AutoModelForCausalLM.from_pretrained(checkpoint, dtype="auto")
    made = memory.generate(found, max_new_tokens=6, do_sample=False, pad_token_id=127)
    return str(tokenizer.decode(made[0, found.shape[1] :], skip_special_tokens=True))


@pytest.mark.usefixtures("one_thread")
def test_the_answer_is_that_of_the_model_in_memory_and_a_full_disk_is_told_first(
    checkpoint: Path, cache: Path, paramstore: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(plan, "free_bytes", lambda place: 1000)
        assert paramstore("run", str(checkpoint), "hello", *GREEDY) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert "bytes are missing. Free them, and the same command goes on" in said.err
    assert list(cache.iterdir()) == []
    assert paramstore("run", str(checkpoint), "hello", *GREEDY) == 0
    said = capsys.readouterr()
    assert said.out == answer_of(checkpoint, "hello") + "\n"
    planned, closing = said.err.splitlines()
    assert "all stay in memory" in planned
    assert f"are imported into {store_of(checkpoint)}" in planned
    assert closing.startswith("paramstore: 6 tokens, ")
    assert "s waited for experts" in closing
    assert daemon_of(store_of(checkpoint)) is None
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n"))
    monkeypatch.setattr(ExpertSource, "read", None)  # nothing is imported again
    assert paramstore("run", str(checkpoint), *GREEDY, "--raw", "--expert-memory", "3") == 0
    again = capsys.readouterr()
    assert again.out == answer_of(checkpoint, "hello", is_raw=True) + "\n"
    assert "3 of them at hand between tokens" in again.err
    assert "are imported" not in again.err


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("kind", ["fp8", pytest.param("mxfp4", marks=pytest.mark.soak)])
def test_quantized_experts_are_served_as_they_are_without_a_template_too(
    kind: str, tmp_path: Path, cache: Path, paramstore: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    path = CHECKPOINTS[kind](tmp_path / kind)
    save_tokenizer(path, chat_template=None)
    capsys.readouterr()
    assert paramstore("run", str(path), "hello", *GREEDY, "--expert-memory", "4") == 0
    said = capsys.readouterr()
    assert said.out == answer_of(path, "hello") + "\n"
    assert "4 of them unpacked in " in said.err
    assert said.err.count("the model has no chat template: prompts are given to it as they are") == 1


def test_a_checkpoint_that_was_replaced_is_refused_with_the_way_out(
    checkpoint: Path, tmp_path: Path, cache: Path, paramstore: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    path = Path(shutil.copytree(checkpoint, tmp_path / "replaced"))
    assert paramstore("run", str(path), "hello", *GREEDY) == 0
    save_stock("qwen3_moe", path, seed=1, vocab_size=128, max_position_embeddings=256)
    capsys.readouterr()
    assert paramstore("run", str(path), "hello", *GREEDY) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert "CheckpointError: namespace 'replaced-" in said.err
    assert f"imported anew with another --dir, or after `rm -r {store_of(path)}`" in said.err
    assert_no_daemon(store_of(path))
    for file in path.glob("*.safetensors"):
        file.write_bytes(b"cut off")
    assert paramstore("run", str(path), "hello", *GREEDY) == 1
    said = capsys.readouterr()
    assert "CheckpointError" in said.err
    assert "on purpose" not in said.err  # a damaged file is no other checkpoint


def test_what_cannot_be_run_is_told_with_its_exit_code_and_nothing_is_made(
    checkpoint: Path, tmp_path: Path, cache: Path, paramstore: Run, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    capsys.readouterr()

    def refused(code: int, reason: str, *words: str) -> None:
        assert paramstore("run", *words) == code, words
        said = capsys.readouterr()
        assert reason in said.err, (words, said.err)
        assert said.out == ""

    here = str(checkpoint)
    monkeypatch.setattr("sys.stdin", io.StringIO(" \n"))
    refused(2, "ConfigError: there is no prompt", here)
    refused(2, "ConfigError: --dtype='int8'", here, "hi", "--dtype", "int8")
    refused(2, "ConfigError: --expert-memory: ", here, "hi", "--expert-memory", "much")
    refused(2, "ConfigError: --host-budget: ", here, "hi", "--host-budget", "1x")
    refused(2, "--tokens", here, "hi", "--tokens", "0")
    refused(2, "a shorter --dir", here, "hi", "--dir", str(tmp_path / ("d" * 100)))
    refused(2, "there is no directory", here, "hi", "--dir", str(tmp_path / "none" / "store"))
    refused(1, "CapacityError", here, "hi", "--host-budget", "1MiB")
    refused(1, "CheckpointError: 'no/such-model' is no directory, and the hub's cache has no model of that name", "no/such-model")
    bare = Path(shutil.copytree(checkpoint, tmp_path / "bare"))
    (bare / "tokenizer.json").unlink()
    refused(1, f"CheckpointError: {bare} has no tokenizer that can be loaded", str(bare), "hi")
    dense = tmp_path / "dense"
    (dense / "config.json").parent.mkdir()
    (dense / "config.json").write_text('{"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "num_hidden_layers": 1}')
    refused(1, "has no experts: it is dense with this configuration; load it with transformers alone", str(dense), "hi")
    assert list(cache.iterdir()) == []


def test_the_daemon_of_another_store_at_that_socket_is_refused_and_lives_on(
    checkpoint: Path, cache: Path, tmp_path_factory: pytest.TempPathFactory, paramstore: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    wanted = tmp_path_factory.mktemp("w")
    socket = wanted / "run" / "paramstore.sock"
    with ForkedDaemon(tmp_path_factory.mktemp("o") / "store", "--host-budget", "32MiB", "--socket", str(socket)):
        assert paramstore("run", str(checkpoint), "hello", "--dir", str(wanted), *GREEDY) == 3
        assert f"does not serve the store in {wanted}: end it with `paramstore stop unix://{socket}`" in capsys.readouterr().err
        with ps.connect(f"unix://{socket}") as store:
            assert store.namespaces() == []


@pytest.mark.soak  # the shorter trial of the same is in tests/run/test_daemon.py
def test_a_daemon_that_was_there_stays_and_one_that_was_started_stays_if_it_is_asked_for(
    checkpoint: Path, cache: Path, paramstore: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    assert paramstore("run", str(checkpoint), "hello", "--keep", *GREEDY) == 0
    home = store_of(checkpoint)
    started = daemon_of(home)
    assert f"daemon {started} stays, as --keep asks: `paramstore stop {home}` ends it" in capsys.readouterr().err
    assert paramstore("stop", str(home)) == 0
    with ForkedDaemon(home, "--host-budget", "32MiB") as daemon:
        assert paramstore("run", str(checkpoint), "hello", *GREEDY[:4]) == 0
        assert daemon_of(home) == daemon.pid
        said = capsys.readouterr().err
    assert " stays, as" not in said
    assert "the daemon that runs has host_budget" not in said  # nobody asked for another


def interrupt(number: int = signal.SIGINT) -> None:
    os.kill(os.getpid(), number)


INTERRUPTED = "paramstore: interrupted; what was imported stays, and the same command goes on from it\n"
MOMENTS: dict[str, tuple[object, str, int, int]] = {
    "planning": (model, "plan_of", 1, signal.SIGINT),
    "starting the daemon": (autostart._Start, "pause", 1, signal.SIGINT),
    "loading": (ps.Store, "open_namespace", 1, signal.SIGTERM),
    "generating": (answers._Listener, "put", 2, signal.SIGINT),
    "closing the namespace": (Namespace, "close", 2, signal.SIGTERM),
    "closing": (ps.Store, "close", 1, signal.SIGINT),
    "awaiting the end of the daemon": (RunDaemon, "_has_ended", 1, signal.SIGTERM),
}
"""Where a signal comes, at which call of what: the first namespace that is closed is that of the import."""
IMPORTING = ("planning", "starting the daemon", "loading")
RARE = ("planning", "generating", "closing", "awaiting the end of the daemon")


@pytest.mark.parametrize("moment", [pytest.param(name, marks=[pytest.mark.soak] if name in RARE else []) for name in MOMENTS])
def test_an_interrupt_at_any_moment_leaves_nothing_broken_and_nobody_behind(
    moment: str, checkpoint: Path, cache: Path, paramstore: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, name, call, number = MOMENTS[moment]
    act, daemons = getattr(owner, name), list[int | None]()

    def interrupted(*words: Any, **named: Any) -> Any:
        daemons.append(daemon_of(store_of(checkpoint)))
        if len(daemons) == call:
            interrupt(number)
        return act(*words, **named)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, interrupted)
        assert paramstore("run", str(checkpoint), "hello", *GREEDY) == 128 + number
    said = capsys.readouterr().err
    assert said.endswith(INTERRUPTED if moment in IMPORTING else "paramstore: interrupted\n")
    assert "Traceback" not in said
    assert (daemons[call - 1] is None) == (moment in ("planning", "starting the daemon"))
    assert_no_daemon(store_of(checkpoint))


@pytest.mark.usefixtures("one_thread")
def test_an_import_that_was_interrupted_is_gone_on_from_and_the_answer_is_the_same(
    checkpoint: Path, cache: Path, paramstore: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    read, keys = ExpertSource.read, list[Any]()

    def read_some(self: ExpertSource, key: Any, files: Any) -> Any:
        keys.append(key)
        if len(keys) == 4:
            interrupt()
        return read(self, key, files)

    monkeypatch.setattr(ExpertSource, "read", read_some)
    assert paramstore("run", str(checkpoint), "hello", *GREEDY) == 130
    assert capsys.readouterr().err.endswith(INTERRUPTED)
    assert_no_daemon(store_of(checkpoint))
    signals._ending = signals._Ending()  # a new process
    assert paramstore("run", str(checkpoint), "hello", *GREEDY) == 0
    assert capsys.readouterr().out == answer_of(checkpoint, "hello") + "\n"
    assert len(keys) < 4 + len(set(keys)), "it began anew"


def test_a_chat_goes_on_after_an_interrupt_of_an_answer_and_ends_at_the_end_of_input(
    checkpoint: Path, cache: Path, paramstore: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = iter(["hello", "", "and more"])
    put, calls = answers._Listener.put, list[int]()

    def read(sign: str) -> str:
        try:
            return next(lines)
        except StopIteration:
            raise EOFError from None

    def put_some(self: Any, tokens: torch.Tensor) -> None:
        calls.append(tokens.numel())
        if len(calls) == 4:  # the third token of the first answer
            interrupt()
        put(self, tokens)

    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", read)
    monkeypatch.setattr(answers._Listener, "put", put_some)
    assert paramstore("run", str(checkpoint), "--tokens", "8", "--temperature", "0", "--host-budget", "64MiB") == 0
    prompts = [number for number in calls if number > 1]
    ended = calls.index(prompts[1])
    assert ended in (4, 5), "the first answer went on after its interrupt"
    assert prompts[1] > prompts[0] + len("and more"), "the second prompt lacks what was said before"
    assert len(calls) == ended + 9
    assert f"paramstore: {ended + 7} tokens, " in capsys.readouterr().err


def read(file: int | str) -> io.TextIOWrapper:
    return io.TextIOWrapper(io.BufferedReader(io.FileIO(file)), encoding="utf-8")


def piped(monkeypatch: pytest.MonkeyPatch, content: bytes | None) -> None:
    """Makes standard input a pipe with `content`, closed behind it; with None, one that stays open and empty."""
    reader, writer = os.pipe()
    if content is not None:
        os.write(writer, content)
        os.close(writer)
    monkeypatch.setattr("sys.stdin", read(reader))


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_standard_input_is_joined_to_a_prompt_and_what_is_none_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "PIPE_WAIT_S", 0.01)
    piped(monkeypatch, b"the text\n")
    assert command._asked("Summarize:") == "Summarize:\nthe text"
    piped(monkeypatch, b"")
    assert command._asked("hello") == "hello"
    piped(monkeypatch, None)
    assert command._asked("hello") == "hello"
    assert "nothing came on standard input within 0.01 s: the prompt is PROMPT alone" in capsys.readouterr().err
    for prompt in (None, "hello"):
        piped(monkeypatch, b"\xff\xfe")
        with pytest.raises(ConfigError, match=r"the prompt is no text in UTF-8: .*0xff"):
            command._asked(prompt)
    with pytest.raises(ConfigError, match=r"no text in UTF-8: .*surrogates"):
        command._asked("\udcff")
    monkeypatch.setattr("sys.stdin", None)  # closed, as by `<&-`
    assert command._asked("hello") == "hello"
    with pytest.raises(ConfigError, match="there is no prompt"):
        command._asked(None)
    monkeypatch.setattr("sys.stdin", read("/dev/null"))
    assert command._asked("hello") == "hello"


def test_an_option_tells_its_words() -> None:
    assert command._memory("12") == 12
    assert command._memory("12GiB") == "12GiB"


def test_a_model_is_served_until_an_interrupt_and_what_is_in_the_way_is_told_before(
    checkpoint: Path, cache: Path, paramstore: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[str] = []
    serve = server.ModelServer.serve

    def serve_and_ask(
        self: server.ModelServer, opened: Any, listener: socket.socket, *, ready: Callable[[], object], **named: Any
    ) -> None:
        def ask() -> None:
            try:
                body = json.dumps({"prompt": "hello", "max_tokens": 6, "temperature": 0}).encode()
                address = f"http://127.0.0.1:{listener.getsockname()[1]}/v1/completions"
                request = urllib.request.Request(address, body, {"content-type": "application/json"})
                with urllib.request.urlopen(request, timeout=60) as answer:
                    heard.append(json.loads(answer.read())["choices"][0]["text"])
            finally:
                interrupt()

        thread = threading.Thread(target=ask)
        serve(self, opened, listener, ready=lambda: (ready(), thread.start()), **named)
        thread.join(60)

    with monkeypatch.context() as patch:
        patch.setattr(server, "find_spec", lambda name: None)
        assert paramstore("serve-model", str(checkpoint)) == 2
    assert "fastapi, uvicorn, openai, pydantic: pip install 'paramstore[serve]'" in capsys.readouterr().err
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "transformers.cli.serving.server", None)
        assert paramstore("serve-model", str(checkpoint), "--port", "0", "--host-budget", "64MiB") == 2
    assert "has no server that this version of paramstore knows" in capsys.readouterr().err
    assert not store_of(checkpoint).exists(), "it was told after the import"
    monkeypatch.setattr(server.ModelServer, "serve", serve_and_ask)
    assert paramstore("serve-model", str(checkpoint), "--port", "0", "--host-budget", "64MiB") == 130
    said = capsys.readouterr()
    assert re.fullmatch(r"ready http://127\.0\.0\.1:\d+/v1\n", said.out)
    assert len(heard) == 1
    assert "Traceback" not in said.err
    assert_no_daemon(store_of(checkpoint))
