"""bench/record_traces.py: decoding is recorded with its tokens, and the traces kept are of a model and of texts worth tracing."""

from __future__ import annotations

import importlib
import json
import math
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from paramstore.core.trace import Trace, TraceEventKind, unpack_trace
from paramstore.demo.batches import held_out_batches
from paramstore.demo.corpus import Corpus, DomainText
from paramstore.demo.settings import ModelShape
from paramstore.demo.training import ResidentPlace, Trainer, repeatable
from paramstore_bench.decode_model import BITS_MAX, SETTINGS, DecodeModel

BENCH = Path(__file__).parents[2] / "bench"
ACQUIRE, STEP = TraceEventKind.ACQUIRE, TraceEventKind.STEP
DECODE = {"decode-1": 1, "decode-4": 4, "decode-16": 16}
"""Texts that each trace reads side by side."""
DISTINCT_MIN, USED_MIN = 0.6, 0.95


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(BENCH))
    with repeatable(threads=1):
        yield importlib.import_module("record_traces")


@cache
def recorded(name: str) -> Trace:
    return unpack_trace((BENCH / "traces" / f"{name}.trace").read_bytes())


def visits(trace: Trace) -> list[tuple[int, tuple[int, ...]]]:
    return [(event.layer, event.experts) for event in trace.events if event.kind is ACQUIRE]


def distinct_share(trace: Trace) -> float:
    """The share of the visits that are no repetition of an earlier one."""
    return len(set(visits(trace))) / len(visits(trace))


def test_decoding_is_recorded_byte_by_byte_and_prompts_are_not(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script, "PROMPT_BYTES", 5)
    shape = ModelShape(layers=2, experts=4, hidden=16, inner=8, heads=2, context=12, top_k=2)
    text = torch.frombuffer(bytearray(b"def forward(self, x):\n    return x\n" * 9), dtype=torch.uint8)
    corpus = Corpus((DomainText("python", text, text),), sha256="made up")
    settings = replace(SETTINGS, shape=shape)
    trainer = Trainer(settings, corpus, ResidentPlace(shape, seed=0))
    trainer.train_step()
    recorder, bits = script.decode(DecodeModel(settings, trainer.model.state_dict(), 0.0), corpus, batch=3, rounds=2)
    trace = recorder.trace("small", how="")
    assert [event.kind for event in trace.events] == [ACQUIRE, ACQUIRE, STEP] * (2 * 7)
    texts = held_out_batches(corpus, count=1, batch=6, context=12)[0]
    logits, _ = trainer.model(texts.input_BT)
    nats = functional.cross_entropy(logits[:, 5:].flatten(0, 1), texts.target_BT[:, 5:].flatten()).item()
    assert bits == pytest.approx(nats / math.log(2), rel=1e-4), "read at once, the texts are as likely as byte by byte"
    assert all(sum(event.tokens) == 3 * shape.top_k for event in trace.events if event.kind is ACQUIRE)


@pytest.mark.slow
@pytest.mark.parametrize("name", DECODE)
def test_a_decode_trace_visits_every_layer_with_the_tokens_of_its_batch(name: str) -> None:
    trace = recorded(name)
    turn = [*((ACQUIRE, layer) for layer in trace.header.layers), (STEP, 0)]
    assert [(event.kind, event.layer) for event in trace.events] == turn * trace.steps
    counted = [(len(event.experts), event.tokens) for event in trace.events if event.kind is ACQUIRE]
    assert all(len(tokens) == experts for experts, tokens in counted)
    assert {sum(tokens) for _, tokens in counted} == {DECODE[name] * SETTINGS.shape.top_k}
    counts = {count for _, tokens in counted for count in tokens}
    assert min(counts) == 1
    assert max(counts) <= DECODE[name], "a text goes to an expert once"


@pytest.mark.slow
@pytest.mark.parametrize("name", DECODE)
def test_a_decode_trace_does_not_repeat_itself(name: str) -> None:
    trace = recorded(name)
    used = {(layer, expert) for layer, experts in visits(trace) for expert in experts}
    assert distinct_share(trace) >= DISTINCT_MIN
    assert len(used) >= USED_MIN * len(trace.header.space)


def test_a_trace_that_repeats_itself_is_found() -> None:
    assert distinct_share(recorded("generate")) < DISTINCT_MIN


def test_the_decode_traces_are_of_the_model_that_this_code_trains() -> None:
    report = json.loads((BENCH / "traces" / "decode.json").read_text())
    assert report["held_out_bits"] < BITS_MAX
    assert report["settings"] == json.loads(json.dumps(asdict(SETTINGS)))
    assert (report["steps"], report["seed"]) == (SETTINGS.steps, SETTINGS.seed)
    assert report["text_bits"].keys() == DECODE.keys()
