"""An exact namespace through the real daemon and client: torch's dense optimizer, bit for bit, over a kill and for readers."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import paramstore as ps
from paramstore.core.key import ExpertKey
from paramstore.fsck.check import check as check_store
from paramstore.fsck.check import rebuild
from paramstore_testkit.oracles.experts import Expert, State, Tensors, check_expert, trained
from paramstore_testkit.processes.daemon_process import DaemonProcess

LAYERS, EXPERTS, SHAPE = 2, 4, (32, 64)
pytestmark = pytest.mark.slow

KEYS: list[ExpertKey] = [(layer, expert) for layer in range(LAYERS) for expert in range(EXPERTS)]
HIT = [[KEYS[0], KEYS[3]], [KEYS[3]], [], [KEYS[5], KEYS[0]], [KEYS[7]], []]
"""Which experts have a gradient at each step: two never have one."""


def options_at(step: int) -> ps.AdamW:
    return ps.AdamW(lr=0.01 * (step + 1), weight_decay=0.1)


def gradients_at(step: int) -> dict[ExpertKey, Tensors]:
    generator = torch.Generator().manual_seed(step)
    return {key: {"w": torch.randn(SHAPE, generator=generator).to(torch.bfloat16)} for key in HIT[step]}


def states() -> list[State]:
    """What torch makes of it: the initial state, and that after each step."""
    generator = torch.Generator().manual_seed(1)
    found: list[State] = [{key: Expert.initial({"w": torch.randn(SHAPE, generator=generator)}) for key in KEYS}]
    for step in range(len(HIT)):
        found.append(trained(found[-1], gradients_at(step), options_at(step), is_exact=True))
    return found


def check(namespace: ps.Namespace, expected: State) -> None:
    """What is leased and read is the expected state."""
    for key in KEYS:
        with namespace.acquire([key]) as lease:
            assert torch.equal(lease[key]["w"], expected[key].masters["w"].to(torch.bfloat16)), key
        record = namespace.read(key)
        check_expert(record, expected[key], key=key, step="this")
        assert torch.equal(record["w"], expected[key].masters["w"].to(torch.bfloat16)), key


def train(namespace: ps.Namespace, step: int) -> None:
    gradients = gradients_at(step)
    if gradients:
        namespace.push(gradients)
    assert namespace.apply(options_at(step)).wait()["records"] == len(gradients)


def test_a_killed_daemon_goes_on_with_torchs_dense_states(serve: Callable[..., DaemonProcess], tmp_path: Path) -> None:
    torch_states, daemon = states(), serve(tmp_path / "store").start()
    with ps.connect(daemon.address) as store:
        schema = ps.adamw_schema({"w": SHAPE}, updates="exact")
        writer = store.create_namespace("moe", schema, layers=LAYERS, experts=EXPERTS)
        writer.initialize(lambda key: torch_states[0][key].masters)
        writer.commit(0).wait()
        for step in range(4):
            train(writer, step)
            check(writer, torch_states[step + 1])
            writer.commit(step + 1).wait()
        train(writer, 4)  # and is lost
        check(writer, torch_states[5])
        assert store.stats()["namespaces"]["moe"]["missed_steps_made"] > 0
        daemon.kill()
    daemon.start()
    with ps.connect(daemon.address) as store:
        for step in (3, 4):
            with store.open_namespace("moe", at=step) as reader:
                check(reader, torch_states[step])
        with store.open_namespace("moe", mode="write") as writer:
            for step in (4, 5):
                train(writer, step)
                check(writer, torch_states[step + 1])
            writer.rollback(3)
            check(writer, torch_states[3])


def test_fsck_rebuilds_an_exact_store(serve: Callable[..., DaemonProcess], tmp_path: Path) -> None:
    torch_states, daemon = states(), serve(tmp_path / "store").start()
    with ps.connect(daemon.address) as store:
        schema = ps.adamw_schema({"w": SHAPE}, updates="exact")
        writer = store.create_namespace("moe", schema, layers=LAYERS, experts=EXPERTS)
        writer.initialize(lambda key: torch_states[0][key].masters)
        for step in range(5):
            train(writer, step)
            writer.commit(step).wait()
    daemon.stop()
    assert check_store(tmp_path / "store", [str(tmp_path / "store" / "volume")]).findings == []
    shutil.rmtree(tmp_path / "store" / "catalog")
    assert rebuild(tmp_path / "store", [str(tmp_path / "store" / "volume")]).is_rebuilt
    daemon.start()
    with ps.connect(daemon.address) as store:
        for step in (3, 4):
            with store.open_namespace("moe", at=step) as reader:
                check(reader, torch_states[step + 1])
        with store.open_namespace("moe", mode="write") as writer:
            train(writer, 5)
            check(writer, torch_states[6])
