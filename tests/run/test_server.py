"""The server around a stored model: its tokens are those of the model in memory, also of two requests that come at once."""

from __future__ import annotations

import importlib
import json
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

import paramstore_client as ps
from paramstore.errors import ConfigError
from paramstore.run import server
from paramstore.run.model import RunModel
from paramstore_client import hf
from paramstore_testkit.processes.forked_daemon import ForkedDaemon
from paramstore_testkit.training.quantized_checkpoints import fp8_checkpoint
from paramstore_testkit.training.small_tokenizer import save_tokenizer

LIMIT_S = 60.0
TOKENS = 6
Ask = Callable[..., Any]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = fp8_checkpoint(tmp_path_factory.mktemp("hub") / "fp8")
    save_tokenizer(path)
    return path


@pytest.fixture(scope="module")
def opened(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunModel]:
    directory = tmp_path_factory.mktemp("s") / "store"
    with ForkedDaemon(directory, "--host-budget", "64MiB") as daemon, ps.connect(daemon.address) as store:
        model = hf.from_pretrained(AutoModelForCausalLM, checkpoint, store=store, mode="infer", expert_memory=4)
        yield RunModel(model, AutoTokenizer.from_pretrained(checkpoint), store, hf.namespace(model))


@pytest.fixture
def ask(opened: RunModel, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ask]:
    """Serves the model at a port that is free; gives what asks it."""
    uvicorn = importlib.import_module("uvicorn")
    running: list[Any] = []

    class Noted(uvicorn.Server):  # type: ignore[misc, name-defined]  # of a module that is found as it runs
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            running.append(self)

    monkeypatch.setattr(uvicorn, "Server", Noted)
    listener = server.bind("127.0.0.1", 0)
    address = f"http://127.0.0.1:{listener.getsockname()[1]}"
    serve, is_ready = server.ModelServer("m").serve, threading.Event()
    thread = threading.Thread(target=serve, args=(opened, listener), kwargs={"ready": is_ready.set, "tell": print}, daemon=True)
    thread.start()
    assert is_ready.wait(LIMIT_S)

    def asked(path: str, **body: Any) -> Any:
        data = json.dumps({"model": "m", "max_tokens": TOKENS, "temperature": 0, **body}).encode()
        request = urllib.request.Request(address + path, data, {"content-type": "application/json"})
        with urllib.request.urlopen(request, timeout=LIMIT_S) as answer:
            return answer.read().decode()

    yield asked
    running[0].should_exit = True
    thread.join(LIMIT_S)
    assert not thread.is_alive()


def content_of(answer: str) -> str:
    return str(json.loads(answer)["choices"][0]["message"]["content"])


def chat(prompt: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": prompt}]


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_answers_are_those_of_the_model_in_memory_streamed_or_not_and_two_at_once(
    ask: Ask, opened: RunModel, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = ["hello", "what else"]
    memory, tokenizer = AutoModelForCausalLM.from_pretrained(checkpoint, dtype="auto"), opened.tokenizer
    wanted = []
    for prompt in prompts:
        given = tokenizer.apply_chat_template(chat(prompt), add_generation_prompt=True, return_tensors="pt", return_dict=True)
        made = memory.generate(**given, max_new_tokens=TOKENS, do_sample=False, pad_token_id=127)
        wanted.append(tokenizer.decode(made[0, given["input_ids"].shape[1] :], skip_special_tokens=True))
    generate, threads, at_work = opened.model.generate, set[str](), list[int]()

    def watched(*words: Any, **named: Any) -> Any:
        threads.add(threading.current_thread().name)
        at_work.append(1)
        assert len(at_work) == 1, "two answers are computed at once"
        try:
            return generate(*words, **named)
        finally:
            at_work.pop()

    monkeypatch.setattr(opened.model, "generate", watched)
    with ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(ask, "/v1/chat/completions", messages=chat(prompt)) for prompt in prompts * 2]
        assert [content_of(answer.result(LIMIT_S)) for answer in asked] == wanted * 2
    assert len(threads) == 1
    streamed = ask("/v1/chat/completions", messages=chat(prompts[0]), stream=True)
    pieces = [json.loads(line.removeprefix("data: "))["choices"][0]["delta"] for line in streamed.splitlines() if line]
    assert "".join(piece.get("content", "") for piece in pieces) == wanted[0]
    assert len(pieces) > 3
    with pytest.raises(urllib.error.HTTPError, match="400") as refused:
        ask("/v1/chat/completions", model="another", messages=chat("hello"))
    refused.value.close()


def test_packages_that_are_missing_are_named_with_the_command_that_brings_them(monkeypatch: pytest.MonkeyPatch) -> None:
    server.check_packages()
    monkeypatch.setattr(server, "find_spec", lambda name: None if name in ("uvicorn", "openai") else object())
    with pytest.raises(ConfigError, match=r"needs uvicorn, openai: pip install 'paramstore\[serve\]'"):
        server.check_packages()


def test_a_port_that_is_taken_is_told() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"--host 127.0.0.1 --port {port}: .*in use.*: give another"):
            server.bind("127.0.0.1", port)
    with pytest.raises(ConfigError, match="--host no host"):
        server.bind("no host", 0)


