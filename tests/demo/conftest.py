"""A demo small enough for unit tests: 2 layers x 4 experts, and a corpus that is made up."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch

from paramstore.core.schema import Schema
from paramstore.demo.corpus import Corpus, DomainText
from paramstore.demo.generation import Generation, Sample
from paramstore.demo.model import expert_fields, initial_expert
from paramstore.demo.report import DemoReport
from paramstore.demo.settings import DemoSettings, ModelShape, full, quick
from paramstore.demo.trace import StepTrace
from paramstore.demo.traffic import TIERS, ExpertTiers, Traffic
from paramstore.demo.training import repeatable
from paramstore.errors import StepOutOfOrder
from paramstore.testing.memory_namespace import MemoryNamespace, MemoryTicket


@pytest.fixture
def settings() -> DemoSettings:
    shape = ModelShape(layers=2, experts=4, hidden=16, inner=24, heads=2, context=16)
    return replace(
        quick(), shape=shape, batch=4, steps=12, commit_every=4, kill_step=10, reference_steps=4, generated_bytes=24, ring_slots=1
    )


@pytest.fixture
def corpus() -> Corpus:
    words = (b"def forward(self, x):\n    return x\n", b"#include <vector>\nint main();\n", b"sin(x)**2 + 1\n", b"Some prose.\n")
    names = ("python", "cpp", "maths", "prose")

    def text(word: bytes, length: int) -> torch.Tensor:
        return torch.frombuffer(bytearray((word * length)[:length]), dtype=torch.uint8)

    domains = tuple(DomainText(name, text(word, 900), text(word, 400)) for name, word in zip(names, words, strict=True))
    return Corpus(domains, sha256="made up")


class CommittingNamespace(MemoryNamespace):
    """A namespace in memory that also keeps commits: their `extra`, and the whole state to go back to."""

    committed_step: int | None = None
    view_step: int | None = None

    def commit(self, step: int, extra: bytes = b"") -> MemoryTicket:
        if self.committed_step is not None and step <= self.committed_step:
            raise StepOutOfOrder(f"commit({step}) after {self.committed_step}")
        self.extras = {**getattr(self, "extras", {}), step: extra}
        self.committed_step = step
        self.saved = _copy_state(self)
        return MemoryTicket((), is_done=True)

    def extra(self, step: int) -> bytes:
        return self.extras[step]

    def roll_back(self) -> None:
        self._masters, self._moments, self._versions = self.saved
        self.saved = _copy_state(self)
        self.pending = {}


def _copy_state(namespace: MemoryNamespace) -> tuple:
    return copy.deepcopy((namespace._masters, namespace._moments, namespace._versions))


@pytest.fixture
def namespace(settings: DemoSettings) -> CommittingNamespace:
    """Experts as the demo initialises them; so few may be leased that a layer runs in parts."""
    shape = settings.shape
    schema = Schema.adamw(expert_fields(shape), param_dtype="float32")
    made = CommittingNamespace(schema, layers=shape.layers, experts=shape.experts, lease_slots=4)
    made.initialize(lambda key: initial_expert(shape, key, seed=settings.seed))
    return made


@pytest.fixture(autouse=True)
def _repeatable():
    with repeatable(threads=1):
        yield


@pytest.fixture
def report() -> DemoReport:
    """A made-up report of a full run."""
    moved = Traffic(
        hits=360, misses=24, prefetched=310, wasted=10, optim_hits=6, optim_misses=186, host_bytes=453_000_000,
        nvme_read_bytes=1_000_000_000, nvme_written_bytes=640_000_000,
    )  # fmt: skip

    def traces(first_step: int, last_step: int, traffic: Traffic) -> tuple[StepTrace, ...]:
        return tuple(StepTrace(step, 1.5 + 2.0 / step**0.5, 1.2, traffic) for step in range(first_step, last_step + 1))

    rows, columns = 6, 32
    return DemoReport(
        settings=full(), corpus_bytes=22_000_000, corpus_sha256="0" * 64, first=traces(1, 57, moved),
        resumed=traces(51, 60, moved), reference=traces(1, 10, Traffic()), losses_bitwise_equal=True, weights_bitwise_equal=True,
        resume_exact=True, valid_loss=2.0, host_budget_bytes=85_000_000, host_peak_bytes=84_000_000,
        placement=ExpertTiers(
            tiers=tuple(tuple(TIERS[(row + column) % 4] for column in range(columns)) for row in range(rows)),
            heat=tuple(tuple(1.0 for _ in range(columns)) for _ in range(rows)),
        ),
        routed_tokens=tuple(tuple(100 * column for column in range(columns)) for _ in range(rows)),
        generation=Generation(
            (Sample("python", "import ", "this"), Sample("prose", "Once ", "upon")), resident_bytes=57_000_000,
            leased_bytes=27_000_000, total_bytes=226_000_000,
        ),
        seconds=180.0,
    )  # fmt: skip
