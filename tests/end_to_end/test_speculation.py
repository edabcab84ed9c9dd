"""Guesses in front of a real daemon: what is counted of them is what moved, and switched off nothing moves for them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import paramstore as ps
from paramstore_client.device.host_slots import HostSlots
from paramstore_client.hf.compat import modeling
from paramstore_client.hf.model.binding import ATTRIBUTE
from paramstore_testkit.processes.forked_daemon import ForkedDaemon
from paramstore_testkit.training.moe_families import tiny_config
from paramstore_testkit.training.moe_models import tokens

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]

EXPERTS, TOKENS = 16, 40
SIZES = {"hidden_size": 64, "moe_intermediate_size": 256, "num_experts": EXPERTS}
TRIES = 1000


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ps.Store]:
    with ForkedDaemon(tmp_path / "store", "--host-budget", "12MiB") as daemon, ps.connect(daemon.address) as store:
        yield store


def served(store: ps.Store, **given: Any) -> Any:
    torch.manual_seed(0)
    auto = modeling.transformers().AutoModelForCausalLM
    return ps.hf.from_config(auto, tiny_config("qwen3_moe", **SIZES), store=store, experts_kernel="grouped_mm", **given)


def source_of(model: Any) -> HostSlots:
    source = next(module.__dict__[ATTRIBUTE].source for module in model.modules() if ATTRIBUTE in module.__dict__)
    assert isinstance(source, HostSlots)
    return source


def decode(model: Any) -> None:
    with torch.no_grad():
        for seed in range(TOKENS):
            model(tokens(seed=seed)[:1, :1])


def moved(store: ps.Store) -> dict[str, int]:
    stats = store.stats()
    param = stats["namespaces"]["served"]["param"]
    read = sum(volume["bytes_read"] for volume in stats["volumes"].values())
    return {"read": read, "misses": param["misses"], "prefetched": param["prefetched"], "bytes": param["prefetched_bytes"]}


def read_of_one(store: ps.Store, source: HostSlots) -> int:
    """Bytes that the volume reads for one expert."""
    for key in source.namespace.space:  # type: ignore[attr-defined]  # a namespace's
        before = moved(store)
        source.namespace.acquire([key]).release()
        after = moved(store)
        if after["misses"] - before["misses"] == 1:
            return after["read"] - before["read"]
    raise AssertionError("every expert is in host memory")


def test_counts_are_the_bytes_that_moved(store: ps.Store) -> None:
    model = served(store, mode="infer", name="served", expert_memory=8)
    source = source_of(model)
    record_bytes, before = read_of_one(store, source), moved(store)
    decode(model)
    figures = ps.hf.speculation(model)
    assert figures.asked == figures.in_time + figures.late + figures.wasted == source.counts.ahead
    assert figures.in_time + figures.late > 0
    after = moved(store)
    for _ in range(TRIES):  # a visit that lacks something hears of loads ahead
        if ps.hf.speculation(model).loaded_bytes == after["bytes"] - before["bytes"]:
            break
        source.acquire(source.lacking([(0, expert) for expert in range(EXPERTS)])[:1]).release()
    figures = ps.hf.speculation(model)
    assert figures.loaded_bytes == (after["prefetched"] - before["prefetched"]) * figures.expert_bytes
    assert 0 < figures.loaded_bytes <= figures.useful_bytes + figures.late_bytes + figures.wasted_bytes
    loads = after["misses"] - before["misses"] + after["prefetched"] - before["prefetched"]
    assert after["read"] - before["read"] == loads * record_bytes


def test_switched_off_nothing_is_asked_for_ahead(store: ps.Store) -> None:
    model = served(store, mode="infer", name="served", expert_memory=8, speculation=False)
    decode(model)
    figures = ps.hf.speculation(model)
    assert (figures.asked, figures.loaded_bytes, moved(store)["prefetched"]) == (0, 0, 0)


def test_training_counts_what_its_guesses_brought(store: ps.Store) -> None:
    model = served(store, mode="train", name="served")
    before = moved(store)
    for seed in range(4):
        model(input_ids=tokens(seed=seed)[:1, :2], labels=tokens(seed=seed)[:1, :2]).loss.backward()
        ps.hf.experts(model).abort()
    figures = ps.hf.speculation(model)
    assert figures.asked == figures.in_time + figures.late + figures.wasted > 0
    assert 0 <= figures.loaded_bytes <= moved(store)["bytes"] - before["bytes"]


def test_a_model_without_stored_experts_has_no_figures() -> None:
    with pytest.raises(ps.ConfigError, match="has no stored experts"):
        ps.hf.speculation(torch.nn.Linear(1, 1))
