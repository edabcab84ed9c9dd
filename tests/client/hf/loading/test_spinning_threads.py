"""Who computes with every core and loads experts is told once how its threads can wait; nobody else is told anything."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, MixtralConfig

import paramstore as ps
from paramstore_client.hf.loading import spinning_threads
from paramstore_client.hf.loading.spinning_threads import advise
from paramstore_testkit.processes.forked_daemon import ForkedDaemon

SetUp = Callable[..., None]


@pytest.fixture
def set_up(monkeypatch: pytest.MonkeyPatch) -> SetUp:
    """Has this process compute with `threads` on `cores`, under an OMP_WAIT_POLICY."""

    def change(*, threads: int, cores: int, policy: str = "") -> None:
        monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
        monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(cores)))
        monkeypatch.setenv("OMP_WAIT_POLICY", policy)
        spinning_threads._tell.cache_clear()

    return change


@pytest.mark.parametrize("threads", [2, 3])
def test_who_computes_with_every_core_is_told_once(threads: int, set_up: SetUp, caplog: pytest.LogCaptureFixture) -> None:
    set_up(threads=threads, cores=2)
    for _ in range(2):
        advise(slots=7, keys=8)
    (record,) = caplog.records
    assert f"{threads} threads on 2 cores" in record.getMessage()
    assert "OMP_WAIT_POLICY=PASSIVE" in record.getMessage()


@pytest.mark.parametrize(
    ("threads", "cores", "policy", "slots"),
    [(1, 1, "", 7), (1, 2, "", 7), (2, 3, "", 7), (2, 2, "passive", 7), (2, 2, "PASSIVE", 7), (2, 2, "", 8)],
)
def test_nobody_else_is(threads: int, cores: int, policy: str, slots: int, set_up: SetUp, caplog: pytest.LogCaptureFixture) -> None:
    set_up(threads=threads, cores=cores, policy=policy)
    advise(slots=slots, keys=8)
    assert not caplog.records


@pytest.mark.slow
@pytest.mark.parametrize(("host_budget", "is_told"), [("64MiB", False), ("4MiB", True)])
def test_a_model_is_only_where_the_daemon_cannot_hold_all_experts(
    host_budget: str, is_told: bool, set_up: SetUp, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = MixtralConfig(
        vocab_size=64, hidden_size=256, intermediate_size=256, num_hidden_layers=2, num_local_experts=8, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    with ForkedDaemon(tmp_path / "store", "--host-budget", host_budget) as daemon, ps.connect(daemon.address) as store:
        set_up(threads=2, cores=2)
        model = ps.hf.from_config(AutoModelForCausalLM, config, store=store, mode="infer", name="moe", expert_memory=1)
        ps.hf.namespace(model).close()
    assert any("OMP_WAIT_POLICY" in record.getMessage() for record in caplog.records) is is_told
