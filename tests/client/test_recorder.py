"""A recorder passes everything on and keeps it in order."""

# T tokens, D model
# ruff: noqa: N806 - shape suffixes, as the legend says

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from paramstore.core.optimizers import AdamW
from paramstore.core.trace import TraceEventKind, unpack_trace
from paramstore.errors import CapacityError, ConfigError, UnknownKey
from paramstore.testing.memory_namespace import MemoryNamespace
from paramstore_client import recorder as recorder_module
from paramstore_client.nn import StoredExperts
from paramstore_client.recorder import TraceRecorder

A, P, U = TraceEventKind.ACQUIRE, TraceEventKind.PREFETCH, TraceEventKind.PUSH


def test_a_step_is_kept_call_by_call(tmp_path: Path) -> None:
    namespace = MemoryNamespace.of_swiglu(layers=2, experts=4)
    recorder = TraceRecorder(namespace)
    layers = [StoredExperts(recorder, layer) for layer in range(2)]
    x_TD = torch.randn(3, 8)
    for layer in layers:
        x_TD = layer(x_TD, torch.tensor([[0], [2], [2]]), torch.ones(3, 1))
    x_TD.sum().backward()
    recorder.prefetch([(1, 3)])
    recorder.apply(AdamW(lr=0.1))
    recorder.end_step()
    recorder.save(tmp_path / "a.trace", "one step", how="this test")
    trace = unpack_trace((tmp_path / "a.trace").read_bytes())
    expected = [(A, 0), (A, 1), (A, 1), (U, 1), (A, 0), (U, 0), (P, 1), (TraceEventKind.APPLY, 0), (TraceEventKind.STEP, 0)]
    assert [(event.kind, event.layer) for event in trace.events] == expected
    assert {event.experts for event in trace.events[:6]} == {(0, 2)}
    assert (trace.header.name, trace.header.layers, trace.header.experts) == ("one step", [0, 1], 4)
    assert namespace.identity((0, 2)).version == 1, "it was passed on"


def test_the_acquires_of_a_step_keep_the_tokens_of_their_experts() -> None:
    recorder = TraceRecorder(MemoryNamespace.of_swiglu(layers=2, experts=4))
    for counts in ({0: [3, 0, 5, 1], 1: [0, 2, 0, 7]}, None, {1: torch.tensor([1, 2, 3, 4]).tolist()}):
        for layer in counts or (0, 1):
            recorder.acquire([(layer, 3)]).release()
            recorder.acquire([(layer, 2), (layer, 0)]).release()
            recorder.prefetch([(layer, 1)])
        recorder.end_step(counts)
    events = recorder.trace("x", how="").events
    tokens = [event.tokens for event in events if event.kind is A]
    assert tokens == [(1,), (3, 5), (7,), (0, 0), (), (), (), (), (4,), (1, 3)]
    assert not any(event.tokens for event in events if event.kind is not A)


def test_tokens_may_be_counted_by_the_rank_they_came_from() -> None:
    recorder = TraceRecorder(MemoryNamespace.of_swiglu(layers=1, experts=4))
    recorder.acquire([(0, 3), (0, 1)]).release()
    full_at = recorder._bytes + recorder_module.EXPERT_BYTES * 2 * 2 + recorder_module.EVENT_BYTES
    recorder.end_step({0: [[1, 2, 3, 4], [5, 6, 7, 8]]})
    event, _ = recorder.trace("x", how="").events
    assert (event.tokens, event.sources) == ((8, 12), ((2, 4), (6, 8)))
    assert full_at <= recorder._bytes <= full_at + 1, "counts take memory"


@pytest.mark.parametrize(
    "tokens",
    [
        {}, {0: [1, 2, 3]}, {0: [1, 2, 3, -1]}, {0: [1, 2, 3, 1 << 32]}, {0: [1, 2, 3, 0.5]}, {0: 4}, {1: [1, 2, 3, 4]}, 7,
        {0: [[1, 2, 3, 4], [1, 2, 3]]}, {0: [[1, 2, 3, 4], 4]}, {0: [[1, 2, 3, "4"]]},
    ],
)
def test_other_counts_are_refused_and_nothing_is_kept(tokens: Any) -> None:
    recorder = TraceRecorder(MemoryNamespace.of_swiglu(layers=2, experts=4))
    recorder.acquire([(0, 3)]).release()
    before = recorder.trace("x", how="").events
    with pytest.raises(ConfigError, match=r"tokens\[0\]="):
        recorder.end_step(tokens)
    assert recorder.trace("x", how="").events == before


def test_what_raises_is_not_kept() -> None:
    recorder = TraceRecorder(MemoryNamespace.of_swiglu(layers=1, experts=2, lease_slots=1))
    with pytest.raises(UnknownKey):
        recorder.acquire([(0, 9)])
    with pytest.raises(CapacityError):
        recorder.acquire([(0, 0), (0, 1)])
    assert recorder.trace("x", how="").events == ()


def test_a_recorder_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder_module, "LOG_BYTES_MAX", 2 * recorder_module.EVENT_BYTES)
    recorder = TraceRecorder(MemoryNamespace.of_swiglu())
    recorder.end_step()
    recorder.end_step()
    with pytest.raises(CapacityError, match="2 events"):
        recorder.end_step()
