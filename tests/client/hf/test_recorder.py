"""Recordings of models: what a block keeps of serving and of training, and that nothing is lost when it is cut off."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

import paramstore as ps
from paramstore.core.trace import Trace, TraceEventKind, unpack_trace
from paramstore.errors import ConfigError
from paramstore_client import recorder as log
from paramstore_client.hf.compat import modeling
from paramstore_client.hf.model.binding import bind
from paramstore_client.hf.model.layer_experts import ModelExperts
from paramstore_client.hf.model.recording import Recording
from paramstore_client.moe.exchange import FlatExchange
from paramstore_testkit.training.moe_families import families, modeling_class, tiny_config
from paramstore_testkit.training.moe_models import Twin, tokens
from paramstore_testkit.training.thread_ranks import ThreadParallel, of_all, run_ranks

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]

A, U, APPLY, STEP = TraceEventKind.ACQUIRE, TraceEventKind.PUSH, TraceEventKind.APPLY, TraceEventKind.STEP


def model_of(store: ps.Store, mode: str, family: str = "qwen3_moe") -> Any:
    stock, name = modeling_class(families()[family]), f"{family}-{mode}"
    return ps.hf.from_config(stock, tiny_config(family), store=store, mode=mode, name=name)


def kinds(trace: Trace) -> list[TraceEventKind]:
    return [event.kind for event in trace.events]


def test_a_served_models_steps_are_its_forwards_and_nothing_is_kept_outside_of_the_block(store: ps.Store, tmp_path: Path) -> None:
    model = model_of(store, "infer")
    with torch.no_grad():
        model(tokens())
        with ps.hf.recording(model, tmp_path / "a.trace", how="two forwards") as recording:
            model(tokens())
            model(tokens(seed=1)[:1, :1])
        model(tokens())
    trace = unpack_trace((tmp_path / "a.trace").read_bytes())
    layers = list(ps.hf.namespace(model).layers)
    assert trace == recording.recorded()
    assert kinds(trace) == ([A] * len(layers) + [STEP]) * 2
    assert [event.layer for event in trace.events if event.kind is A] == layers * 2
    assert (trace.header.name, trace.header.how) == ("qwen3_moe-infer", "two forwards")
    assert trace.schema == ps.hf.namespace(model).schema
    top = model.config.num_experts_per_tok
    counts = [sum(event.tokens) for event in trace.events if event.kind is A]
    assert counts == [top * tokens().numel()] * len(layers) + [top] * len(layers)


def test_a_cut_off_block_keeps_what_was_recorded(store: ps.Store, tmp_path: Path) -> None:
    model = model_of(store, "infer")

    def run() -> None:
        with torch.no_grad(), ps.hf.recording(model, tmp_path / "a.trace"):
            model(tokens())
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run()
    assert unpack_trace((tmp_path / "a.trace").read_bytes()).steps == 1


@pytest.mark.parametrize("early", [False, True])
def test_training_keeps_backwards_pushes_and_updates(store: ps.Store, early: bool) -> None:
    model = model_of(store, "train")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ps.hf.experts(model).attach(optimizer, updates_in_backward=early)
    with ps.hf.recording(model) as recording:
        for seed in (0, 1):
            model(input_ids=tokens(seed=seed), labels=tokens(seed=seed)).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    trace = recording.recorded()
    layers = list(ps.hf.namespace(model).layers)
    assert kinds(trace) == ([A] * len(layers) + [A, U] * len(layers) + [APPLY, STEP]) * 2
    first = trace.events[: 3 * len(layers)]
    uses = Counter(key for event in first if event.kind is A for key in event.keys)
    pushed = [event for event in first if event.kind is U]
    assert {key: 2 for event in pushed for key in event.keys} == uses
    assert [event.layer for event in pushed] == layers[::-1]


def test_ranks_that_share_experts_keep_how_many_tokens_came_from_each() -> None:
    config, top_k, counts = tiny_config("qwen3_moe"), 2, (5, 0, 8)
    drawn = torch.Generator().manual_seed(0)
    ids = torch.stack([torch.randperm(config.num_experts, generator=drawn)[:top_k] for _ in range(sum(counts))]).split(counts)
    twins = [Twin.of(config, kernel="grouped_mm", lease_slots=3) for _ in counts]
    path = twins[0].layout.modules[0]

    def rank(exchange: FlatExchange) -> Trace:
        mine = twins[exchange.rank]
        spread = ModelExperts(mine.namespace, anchor=lambda layer: mine.anchor, parallel=ThreadParallel(exchange))
        bind(mine.stored, spread, kernel="grouped_mm")
        rows = ids[exchange.rank]
        x = torch.randn(len(rows), config.hidden_size, requires_grad=True)
        with Recording(spread, mine.namespace.schema, applies=lambda: 0, file=None, name="x", how="") as recording:
            mine.stored.get_submodule(path)(x, rows, torch.ones(len(rows), top_k)).sum().backward()
        return unpack_trace(recording.recorded().pack())

    expected = [torch.bincount(rows.flatten(), minlength=config.num_experts).tolist() for rows in ids]
    for trace in of_all(run_ranks(len(counts), rank)):
        forward, backward, push = trace.events
        assert (forward.kind, backward.kind, push.kind) == (A, A, U)
        assert forward.experts
        assert forward.sources == backward.sources == tuple(tuple(row[expert] for expert in forward.experts) for row in expected)
        assert forward.tokens == tuple(map(sum, zip(*forward.sources, strict=True)))
        assert push.tokens == push.sources == ()


def test_a_full_trace_takes_no_more_and_the_run_goes_on(
    store: ps.Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = model_of(store, "infer")
    monkeypatch.setattr(log, "LOG_BYTES_MAX", 3 * log.EVENT_BYTES)
    with torch.no_grad(), ps.hf.recording(model) as recording:
        for _ in range(4):
            model(tokens())
    assert sum(event.kind is A for event in recording.recorded().events) <= 3
    assert "takes no more" in caplog.text
    assert caplog.text.count("takes no more") == 1


def test_what_cannot_be_recorded_is_refused(store: ps.Store, tmp_path: Path) -> None:
    model = model_of(store, "infer")
    with pytest.raises(ConfigError, match="has no stored experts"):
        ps.hf.recording(modeling.build(modeling_class(families()["qwen3_moe"]), tiny_config("qwen3_moe")))
    with pytest.raises(ConfigError, match=r"file .*: cannot be written"):
        ps.hf.recording(model, tmp_path / "no" / "a.trace")
    with ps.hf.recording(model), pytest.raises(ConfigError, match="is on already"), ps.hf.recording(model):
        pass
    with ps.hf.recording(model):
        pass  # the block that was refused has not ended the other's for good
