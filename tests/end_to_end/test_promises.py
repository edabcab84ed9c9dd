"""Readers that come and go beside a trainer, in front of the real daemon: the trainer has what it was promised."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
import torch

import paramstore as ps
from paramstore_client.source import ExpertSource

pytestmark = pytest.mark.slow

EXPERTS, HIDDEN = 16, 8
LAYER = [(0, expert) for expert in range(EXPERTS)]
FIELDS = {"gate_up": (2 * HIDDEN, HIDDEN), "down": (HIDDEN, HIDDEN)}
MONITOR = """
import sys, paramstore_client as ps
with ps.connect(sys.argv[1]) as store, store.open_namespace(sys.argv[2]) as reader:
    with reader.acquire([(0, 0)]):
        print(reader.lease_slots)
"""


@pytest.fixture
def writer(autostarting: ps.ServeOptions, request: pytest.FixtureRequest) -> Iterator[ps.Namespace]:
    """Its own namespace for each test: two layers of 16 experts, slots for two versions of each; committed as step 1."""
    schema, name = ps.adamw_schema(FIELDS, param_dtype="float32"), re.sub(r"\W", "-", request.node.name)[-40:]
    with (
        ps.connect(autostart=autostarting, timeout_s=60.0) as store,
        store.create_namespace(name, schema, layers=2, experts=EXPERTS) as namespace,
    ):
        generator = torch.Generator().manual_seed(0)
        namespace.initialize(lambda key: {name: torch.randn(shape, generator=generator) for name, shape in FIELDS.items()})
        namespace.commit(1).wait()
        yield namespace


def test_a_reader_of_another_process_never_ends_a_trainer(autostarting: ps.ServeOptions, writer: ps.Namespace) -> None:
    """64 slots: 4 are the reserve, 16 the readers', 44 the writer's, who leases a whole layer."""
    assert writer.lease_slots == 44
    with ps.connect(autostart=autostarting) as other:
        for _ in range(2):
            with writer.acquire(LAYER):
                command = [sys.executable, "-c", MONITOR, other.address, writer.name]
                answer = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
                assert answer.stdout == "8\n"
                readers = [other.open_namespace(writer.name) for _ in range(6)]
                assert [reader.lease_slots for reader in readers] == [8, 4, 2, 1, 1, 0]
                assert [reader.steps() for reader in readers] == [[1]] * 6
                with pytest.raises(ps.CapacityError, match=r"promised 0 slots .* the writer pid \d+ \(.*\) was promised 44, "):
                    readers[-1].acquire(LAYER[:1])
                with pytest.raises(ps.CapacityError, match="min_lease_slots=1, but 0 of its 64 slots are left for a reader"):
                    other.open_namespace(writer.name, min_lease_slots=1)
                with writer.acquire([(1, expert) for expert in range(EXPERTS)]):
                    for reader in readers:
                        reader.close()
        with other.open_namespace(writer.name, min_lease_slots=16) as reader, reader.acquire(LAYER):
            pass
    assert writer.lease_slots == 44


def test_after_a_reconnect_the_slots_of_the_session_before_are_there_at_once(
    autostarting: ps.ServeOptions, writer: ps.Namespace
) -> None:
    with ps.connect(autostart=autostarting) as other:
        for _ in range(10):
            reader = other.open_namespace(writer.name, min_lease_slots=16)
            tickets = [reader.prefetch([key]) for key in LAYER]  # the answers come in the moment of the reconnect
            other.reconnect()
            del tickets
        assert other.open_namespace(writer.name).lease_slots == 8


def namespace_of(_: ExitStack, writer: ps.Namespace) -> ExpertSource:
    return writer


def tier_of(stack: ExitStack, writer: ps.Namespace) -> ExpertSource:
    return stack.enter_context(ps.DeviceTier(writer, EXPERTS, device="cpu"))


def ring_of(stack: ExitStack, writer: ps.Namespace) -> ExpertSource:
    return stack.enter_context(ps.RingMemory(writer, 2))


@pytest.mark.parametrize("source_of", [namespace_of, tier_of, ring_of])
def test_stored_experts_train_on_while_readers_come_and_go(
    autostarting: ps.ServeOptions, writer: ps.Namespace, source_of: Callable[[ExitStack, ps.Namespace], ExpertSource]
) -> None:
    ids = torch.arange(EXPERTS).view(-1, 2)
    with ps.connect(autostart=autostarting) as other, ExitStack() as stack:
        layer = ps.nn.StoredExperts(source_of(stack, writer), 0)
        readers = []
        for _ in range(3):
            readers += [other.open_namespace(writer.name) for _ in range(2)]
            loss = layer(torch.ones(len(ids), HIDDEN), ids, torch.ones(ids.shape)).square().sum()
            readers += [other.open_namespace(writer.name) for _ in range(2)]
            loss.backward()
            assert writer.apply(ps.AdamW(lr=1e-3)).wait()["records"] == EXPERTS
            readers.pop(0).close()
        assert writer.lease_slots == 44
