"""Records the routing traces in bench/traces: `python bench/record_traces.py [--only NAME ...] CORPUS_CACHE`.

A small Qwen3-MoE-shaped byte model (the demo's: softmax router, top-4 of 64 experts, renormalised) trains on the demo's
corpus, real text, with its experts behind a `TraceRecorder`; then it continues held-out prompts byte by byte.
Equal seeds and package versions give equal traces, up to what threads do to sums.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path

import torch

import paramstore as ps
from paramstore.demo.batches import BatchSampler
from paramstore.demo.corpus import Corpus, open_corpus
from paramstore.demo.generation import continue_bytes, prompts
from paramstore.demo.model import ByteTransformer, dense_parameters, initial_expert
from paramstore.demo.settings import DemoSettings, ModelShape, full
from paramstore.demo.training import _losses, adamw_options, expert_schema
from paramstore.testing.memory_namespace import MemoryNamespace
from paramstore_client.recorder import TraceRecorder

TRACES = Path(__file__).parent / "traces"
SHAPE = ModelShape(layers=12, experts=64, hidden=64, inner=48, heads=4, context=128, top_k=4)


@dataclasses.dataclass(frozen=True)
class Run:
    """Amounts of one recorded training: sequences and bytes of a micro-batch, micro-batches a step, peak learning rate."""

    name: str
    batch: int
    context: int
    micro_batches: int
    steps: int
    learning_rate: float


RUNS = (
    Run("train", batch=8, context=128, micro_batches=1, steps=60, learning_rate=4e-3),
    Run("train-small", batch=2, context=48, micro_batches=1, steps=100, learning_rate=1e-3),
    Run("train-accumulate", batch=1, context=64, micro_batches=4, steps=30, learning_rate=1e-3),
)
GENERATED = 160


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cache", type=Path, help="a directory for the corpus")
    parser.add_argument("--only", nargs="+", choices=[run.name for run in RUNS])
    arguments = parser.parse_args()
    TRACES.mkdir(exist_ok=True)
    corpus = open_corpus(arguments.cache, size_bytes=4_000_000)
    for run in RUNS:
        if arguments.only is None or run.name in arguments.only:
            record(run, corpus)
    return 0


def record(run: Run, corpus: Corpus) -> None:
    settings = dataclasses.replace(full(), shape=dataclasses.replace(SHAPE, context=run.context), batch=run.batch, steps=run.steps)
    settings = dataclasses.replace(settings, learning_rate=run.learning_rate, expert_learning_rate=run.learning_rate / 4)
    shape = settings.shape
    namespace = MemoryNamespace(
        expert_schema(shape), layers=shape.layers, experts=shape.experts, lease_slots=4 * shape.experts
    )  # fmt: skip
    namespace.initialize(lambda key: initial_expert(shape, key, seed=settings.seed))
    recorder = TraceRecorder(namespace)
    model = train(run, settings, corpus, recorder, namespace)
    how = f"bench/record_traces.py, torch {torch.__version__}: {run}, {shape}"
    recorder.save(TRACES / f"{run.name}.trace", run.name, how=how)
    if run.name == "train":
        recorder = TraceRecorder(namespace)
        generate(model, settings, corpus, recorder, namespace)
        recorder.save(TRACES / "generate.trace", "generate", how=f"{how}; then {GENERATED} bytes of each of 4 prompts")


def train(run: Run, settings: DemoSettings, corpus: Corpus, source: TraceRecorder, namespace: MemoryNamespace) -> ByteTransformer:
    schedule = ps.nn.ExpertSchedule()
    model = ByteTransformer(
        settings.shape, lambda layer: ps.nn.StoredExperts(source, layer, group=schedule), seed=settings.seed
    )  # fmt: skip
    optimizer = torch.optim.AdamW(dense_parameters(model).values(), lr=settings.learning_rate, fused=True)
    sampler = BatchSampler(corpus, batch=settings.batch, context=settings.shape.context, seed=settings.seed + 1)
    for step in range(1, run.steps + 1):
        for _ in range(run.micro_batches):
            loss, balance = _losses(model, sampler.draw())
            (loss + settings.balance_weight * balance).backward()  # type: ignore[no-untyped-call]  # the library's
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        source.apply(adamw_options(settings, step, lr=settings.expert_learning_rate))
        source.end_step()
        namespace.events.clear()
        print(f"{run.name} {step}/{run.steps}: {loss.item():.3f} nats a byte", file=sys.stderr)
    return model


@torch.no_grad()
def generate(
    trained: ByteTransformer, settings: DemoSettings, corpus: Corpus, source: TraceRecorder, namespace: MemoryNamespace
) -> None:
    model = ByteTransformer(settings.shape, lambda layer: ps.nn.StoredExperts(source, layer), seed=settings.seed)
    model.load_state_dict(dense_parameters(trained), strict=False)
    for _ in continue_bytes(model, prompts(corpus), GENERATED, seed=settings.seed):
        source.end_step()
        namespace.events.clear()


if __name__ == "__main__":
    sys.exit(main())
