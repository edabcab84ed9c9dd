"""Training against the real daemon in too little memory: bit for bit what PyTorch does with everything resident.

Beside the trainer another client reads, which sees whole steps only, and generates from what was committed.
"""

# T tokens, K experts per token, D model

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import paramstore as ps
from paramstore_testkit.processes.daemon_process import QUIET, DaemonProcess
from paramstore_testkit.processes.forked_daemon import ForkedDaemon

pytestmark = pytest.mark.slow

LAYERS, EXPERTS, HIDDEN, INNER = 2, 8, 128, 256
TOKENS, TOP_K, STEPS = 6, 2, 5
"""So few tokens that some experts get none in a step, and are not updated."""
FIELDS = {"gate_up": (2 * INNER, HIDDEN), "down": (HIDDEN, INNER)}
KEYS = [(layer, expert) for layer in range(LAYERS) for expert in range(EXPERTS)]
OPTIONS = ps.AdamW(lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
HOST_BUDGET = "20MiB"
"""All experts' state takes 18 MiB and their fp32 weights 6 more."""
WAIT_S = 30.0
PROMPT = -1
"""The step whose tokens are generated from."""

Weights = dict[tuple[int, int], dict[str, Tensor]]


class Model(nn.Module):
    """Two layers of experts, routed by chance, the same at equal steps."""

    def __init__(self, layers: list[nn.Module], dtype: torch.dtype) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.dtype = dtype

    def forward(self, step: int) -> Tensor:
        generator = torch.Generator().manual_seed(step)
        x_TD = torch.randn(TOKENS, HIDDEN, generator=generator).to(self.dtype)  # noqa: N806
        for layer in self.layers:
            ids_TK = torch.rand(TOKENS, EXPERTS, generator=generator).topk(TOP_K).indices  # noqa: N806
            gate_TK = torch.rand(TOKENS, TOP_K, generator=generator)  # noqa: N806
            x_TD = x_TD + layer(x_TD, ids_TK, gate_TK)  # noqa: N806
        return x_TD

    def loss(self, step: int) -> Tensor:
        return self(step).float().square().mean()


def initial_value(key: tuple[int, int]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(key[0] * EXPERTS + key[1])
    return {name: torch.randn(shape, generator=generator) * 0.1 for name, shape in FIELDS.items()}


@dataclass(frozen=True)
class Expected:
    """What PyTorch makes of it. losses: of the steps from 1; masters: fp32 weights after each step, the initial ones first;
    output: of the trained model."""

    dtype: torch.dtype
    losses: list[str]
    masters: list[Weights]
    output: Tensor

    def weights(self, step: int) -> Weights:
        """In the dtype that forward computes with."""
        return {key: {name: value.to(self.dtype) for name, value in fields.items()} for key, fields in self.masters[step].items()}


def train_resident(dtype: torch.dtype) -> Expected:
    """fp32 masters under torch's own fused AdamW; forward computes with their copies in `dtype`."""
    masters = {key: {name: nn.Parameter(value) for name, value in initial_value(key).items()} for key in KEYS}
    layers = [
        ps.nn.ResidentExperts([{n: v.to(dtype) for n, v in masters[layer, expert].items()} for expert in range(EXPERTS)])
        for layer in range(LAYERS)
    ]
    copies = {(layer, expert): layers[layer].weights[expert] for layer, expert in KEYS}
    optimizer = torch.optim.AdamW(
        [value for fields in masters.values() for value in fields.values()],
        lr=OPTIONS.lr, betas=OPTIONS.betas, eps=OPTIONS.eps, weight_decay=OPTIONS.weight_decay, fused=True,
    )  # fmt: skip
    model = Model(layers, dtype)
    losses, kept = [], [{key: initial_value(key) for key in KEYS}]
    for step in range(1, STEPS + 1):
        loss = model.loss(step)
        loss.backward()
        for key, fields in masters.items():
            for name, master in fields.items():
                copy = copies[key][name]
                master.grad, copy.grad = None if copy.grad is None else copy.grad.float(), None
        optimizer.step()
        with torch.no_grad():
            for key, fields in masters.items():
                for name, master in fields.items():
                    copies[key][name].copy_(master)
        losses.append(loss.item().hex())
        kept.append({key: {n: v.detach().clone() for n, v in fields.items()} for key, fields in masters.items()})
    with torch.no_grad():
        return Expected(dtype, losses, kept, model(PROMPT))


def differences(ns: ps.Namespace, expected: Weights) -> list[tuple[int, int]]:
    """The keys of which `ns` shows other weights."""
    wrong = []
    for key in KEYS:
        with ns.acquire([key]) as lease:
            if not all(torch.equal(lease[key][name], value) for name, value in expected[key].items()):
                wrong.append(key)
    return wrong


@dataclass
class Reading:
    """Another client, in a thread: goes from step to step as they are committed and compares every expert."""

    address: str
    expected: Expected
    swept: threading.Semaphore
    """Released after each look at all experts."""
    is_over: threading.Event

    def run(self) -> list[int]:
        """The steps it stood on, once it stood on the last or was told that there will be none."""
        stood_on = []
        try:
            with ps.connect(self.address) as store, store.open_namespace("moe") as reader:
                while not stood_on or (stood_on[-1] < STEPS and not self.is_over.is_set()):
                    step = reader.refresh()
                    assert step is not None
                    wrong = differences(reader, self.expected.weights(step))
                    assert wrong == [], f"step {step} is not whole"
                    stood_on.append(step)
                    self.swept.release()
        finally:
            self.swept.release(STEPS)  # the trainer waits for no more looks
        return stood_on


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[DaemonProcess]:
    held = {"PARAMSTORE_HELD_STEPS": "2"}  # the reader computes with a step while two more are committed
    with ForkedDaemon(tmp_path / "store", "--host-budget", HOST_BUDGET, environment={**QUIET, **held}) as daemon:
        yield daemon


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def expected(request: pytest.FixtureRequest) -> Expected:
    return train_resident(request.param)


def begin(store: ps.Store, dtype: torch.dtype) -> ps.Namespace:
    """The experts' initial values, committed as step 0."""
    ns = store.create_namespace("moe", ps.adamw_schema(FIELDS, param_dtype=dtype), layers=LAYERS, experts=EXPERTS)
    ns.initialize(initial_value)
    ns.commit(0).wait()
    return ns


def test_training_generation_and_what_a_reader_sees_equal_pytorch_bit_for_bit(daemon: DaemonProcess, expected: Expected) -> None:
    with ps.connect(daemon.address) as store, ThreadPoolExecutor(1) as threads:
        ns = begin(store, expected.dtype)
        group = ps.nn.ExpertSchedule()
        model = Model([ps.nn.StoredExperts(ns, layer, group=group) for layer in range(LAYERS)], expected.dtype)
        reading = Reading(daemon.address, expected, threading.Semaphore(0), threading.Event())
        future = threads.submit(reading.run)
        try:
            losses = []
            for step in range(1, STEPS + 1):
                assert reading.swept.acquire(timeout=WAIT_S), "the reader reads while the trainer works"
                if future.done():
                    future.result()
                loss = model.loss(step)
                loss.backward()
                ns.apply(OPTIONS)
                ns.commit(step)
                losses.append(loss.item().hex())
            ns.commit(STEPS).wait()
        finally:
            reading.is_over.set()
        assert losses == expected.losses
        assert differences(ns, expected.weights(STEPS)) == []
        for key in KEYS:
            record = ns.read(key)
            for name, master in expected.masters[STEPS][key].items():
                assert torch.equal(record[f"master/{name}"], master), f"{key} {name}"
        stood_on = future.result(timeout=WAIT_S)
        assert stood_on == sorted(stood_on)
        assert len(set(stood_on)) > 1
        assert store.stats()["namespaces"]["moe"]["optim"]["slots"] < len(KEYS), "not all states fit"
        assert_generates(store, expected)


def assert_generates(store: ps.Store, expected: Expected) -> None:
    """A reader's ring of one layer, around three times, computes what the trained model does."""
    with store.open_namespace("moe") as reader, ps.RingMemory(reader, slots=1) as ring, torch.no_grad():
        assert reader.view_step == STEPS
        model = Model([ps.nn.StoredExperts(ring, layer) for layer in range(LAYERS)], expected.dtype)
        for _ in range(3):
            assert torch.equal(model(PROMPT), expected.output)
        assert ring.stats.resident_fraction <= 1 / LAYERS


def test_a_record_can_be_read_while_every_gradient_is_pending(daemon: DaemonProcess) -> None:
    with ps.connect(daemon.address) as store:
        begin(store, torch.float32).close()
    with ps.connect(daemon.address) as store, store.open_namespace("moe", mode="write") as ns:
        for key in KEYS:
            ns.push({key: {name: torch.ones(shape) for name, shape in FIELDS.items()}})
        assert store.stats()["namespaces"]["moe"]["pending_gradients"] == len(KEYS)
        for key in KEYS:
            assert torch.equal(ns.read(key)["master/down"], initial_value(key)["down"])
        assert ns.apply(OPTIONS).wait()["records"] == len(KEYS)
