"""Records the routing traces in bench/traces: `python bench/record_traces.py CACHE [--only NAME ...]`.

A small Qwen3-MoE-shaped byte model (the demo's: softmax router, top-4 of 64 experts, renormalised) trains on the demo's
corpus, real text, with its experts behind a `TraceRecorder`; then it continues held-out prompts byte by byte.
The traces of decoding are of a model of that shape that has trained for 2,000 steps (`paramstore_bench/decode_model.py`, some 20
minutes on one core; its state stays in CACHE). It reads held-out text byte by byte, each next byte being the text's own: what it
would write itself might repeat itself, and real text does not. How good the model was is in bench/traces/decode.json.
Equal seeds and package versions give equal traces, up to what threads do to sums.
"""

# B texts, T bytes of a text
# ruff: noqa: N806 - shape suffixes, as the legend says

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

import paramstore as ps
from paramstore.core.key import ExpertKey
from paramstore.demo.batches import BatchSampler, held_out_batches
from paramstore.demo.corpus import Corpus, open_corpus
from paramstore.demo.generation import continue_bytes, prompts
from paramstore.demo.model import ByteTransformer, KeyValueCache, dense_parameters, expert_fields, initial_expert
from paramstore.demo.settings import DemoSettings, ModelShape, full
from paramstore.demo.training import _losses, adamw_options, expert_schema
from paramstore.testing.memory_namespace import MemoryNamespace
from paramstore_bench.decode_model import SETTINGS, DecodeModel, open_decode_model
from paramstore_client.recorder import TraceRecorder
from paramstore_client.source import ExpertSource

TRACES = Path(__file__).parent / "traces"
SHAPE = SETTINGS.shape


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
DECODE = "decode"
DECODE_ROUNDS = {1: 16, 4: 6, 16: 3}
"""How many batches of texts are read one after the other, by the texts in a batch."""
PROMPT_BYTES = 32
"""Bytes of each text that are read at once, before the trace begins: decoding ends where the context of training did."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cache", type=Path, help="a directory for the corpora and the trained model")
    parser.add_argument("--only", nargs="+", choices=[*(run.name for run in RUNS), DECODE])
    arguments = parser.parse_args()
    TRACES.mkdir(exist_ok=True)
    for run in RUNS:
        if arguments.only is None or run.name in arguments.only:
            record(run, open_corpus(arguments.cache / "corpus", size_bytes=4_000_000))
    if arguments.only is None or DECODE in arguments.only:
        corpus = open_corpus(arguments.cache / "corpus-decode", size_bytes=SETTINGS.corpus_bytes)
        record_decoding(open_decode_model(arguments.cache / "decode-model.pt", corpus), corpus)
    return 0


def record(run: Run, corpus: Corpus) -> None:
    settings = dataclasses.replace(full(), shape=dataclasses.replace(SHAPE, context=run.context), batch=run.batch, steps=run.steps)
    settings = dataclasses.replace(settings, learning_rate=run.learning_rate, expert_learning_rate=run.learning_rate / 4)
    shape = settings.shape
    namespace = namespace_of(shape, lambda key: initial_expert(shape, key, seed=settings.seed))
    recorder = TraceRecorder(namespace)
    model = train(run, settings, corpus, recorder, namespace)
    how = f"bench/record_traces.py, torch {torch.__version__}: {run}, {shape}"
    recorder.save(TRACES / f"{run.name}.trace", run.name, how=how)
    if run.name == "train":
        recorder = TraceRecorder(namespace)
        generate(reader_of(recorder, shape, dense_parameters(model)), settings, corpus, recorder, namespace)
        recorder.save(TRACES / "generate.trace", "generate", how=f"{how}; then {GENERATED} bytes of each of 4 prompts")


def namespace_of(shape: ModelShape, values: Callable[[ExpertKey], Mapping[str, Tensor]]) -> MemoryNamespace:
    """Makes a namespace in memory with a model's experts, `values` by key; it leases four layers at once."""
    namespace = MemoryNamespace(
        expert_schema(shape), layers=shape.layers, experts=shape.experts, lease_slots=4 * shape.experts
    )  # fmt: skip
    namespace.initialize(values)
    return namespace


def reader_of(source: ExpertSource, shape: ModelShape, weights: Mapping[str, Tensor]) -> ByteTransformer:
    """Makes a model with its experts in `source` and the dense part of `weights`, by name."""
    model = ByteTransformer(shape, lambda layer: ps.nn.StoredExperts(source, layer), seed=0)
    model.load_state_dict({name: weights[name] for name in dense_parameters(model)})
    return model


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
    model: ByteTransformer, settings: DemoSettings, corpus: Corpus, source: TraceRecorder, namespace: MemoryNamespace
) -> None:
    for _ in continue_bytes(model, prompts(corpus), GENERATED, seed=settings.seed):
        source.end_step()
        namespace.events.clear()


def record_decoding(trained: DecodeModel, corpus: Corpus) -> None:
    """Writes a trace for each batch size of `DECODE_ROUNDS`, and decode.json, which says of what model they are."""
    settings = trained.settings
    shape = settings.shape
    bits = {}
    for batch, rounds in DECODE_ROUNDS.items():
        name = f"{DECODE}-{batch}"
        recorder, bits[name] = decode(trained, corpus, batch=batch, rounds=rounds)
        how = (
            f"bench/record_traces.py, torch {torch.__version__}: {rounds} times {batch} held-out texts of {shape.context} bytes, "
            f"all but the first {PROMPT_BYTES} byte by byte, each next byte the text's own; {shape}; decode.json says how it learnt"
        )
        recorder.save(TRACES / f"{name}.trace", name, how=how)
    report = {
        "held_out_bits": trained.held_out_bits, "steps": settings.steps, "seed": settings.seed, "text_bits": bits,
        "corpus_sha256": corpus.sha256, "torch": torch.__version__, "settings": dataclasses.asdict(settings),
    }  # fmt: skip
    (TRACES / f"{DECODE}.json").write_text(json.dumps(report, indent=1) + "\n")


@torch.no_grad()
def decode(trained: DecodeModel, corpus: Corpus, *, batch: int, rounds: int) -> tuple[TraceRecorder, float]:
    """Reads `rounds` times `batch` texts, whose rows are of all domains in turn; also gives the bits a byte of what it read."""
    shape, weights = trained.settings.shape, trained.weights
    namespace = namespace_of(
        shape, lambda key: {field: weights[f"blocks.{key[0]}.experts.weights.{key[1]}.{field}"] for field in expert_fields(shape)}
    )  # fmt: skip
    recorder = TraceRecorder(namespace)
    # The experts of prompts come from the namespace itself, so that the recorder sees decoding alone.
    reading, decoding = reader_of(namespace, shape, weights), reader_of(recorder, shape, weights)
    texts = held_out_batches(corpus, count=1, batch=batch * rounds, context=shape.context)[0]
    losses = []
    for start in range(0, batch * rounds, batch):
        input_BT = texts.input_BT[start : start + batch]
        target_BT = texts.target_BT[start : start + batch]
        cache = KeyValueCache(shape.layers)
        reading(input_BT[:, :PROMPT_BYTES], cache)
        for at in range(PROMPT_BYTES, shape.context):
            logits, _ = decoding(input_BT[:, at : at + 1], cache)
            losses.append(functional.cross_entropy(logits[:, -1], target_BT[:, at]))
            recorder.end_step(dict(enumerate(decoding.routed_tokens().tolist())))
            namespace.events.clear()
    return recorder, torch.stack(losses).mean().item() / math.log(2)


if __name__ == "__main__":
    sys.exit(main())
