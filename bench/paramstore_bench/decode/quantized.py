"""Measures decoding from quantized experts, beside the same experts in bf16 in as many bytes of memory.

Quantized, a share of the memory is slots of unpacked experts in the process that computes; the daemon has the rest for packed ones.
In bf16 the daemon has all of it, and the process computes on what it leased. What is asked holds where reading an expert's bytes in
bf16 takes twice as long as unpacking it, which the row tells: elsewhere there is no target. Beside this machine's own drive stands
one whose reads the daemons hold back to what a SATA drive gives.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

import paramstore as ps
from paramstore.bench.context import Bench
from paramstore.bench.limits.pages import param_kind
from paramstore.bench.limits.raw import RawFile
from paramstore.bench.pairs import Sample, sample_pairs
from paramstore.bench.report.rows import SUBJECT, Row, Target, judged
from paramstore.bench.service.daemon import Service, serving
from paramstore.errors import StepMismatch
from paramstore_bench.decode.checkpoint import QUICK, SHAPES, GptOssShape, Shape, checkpoint_of
from paramstore_bench.decode.rows import DECODE, Work
from paramstore_bench.decode.runs import prompt_of, run
from paramstore_bench.guesses.slow_volume import reading_at
from paramstore_client.quantized.packed import FP8, MXFP4, packed_tensors, unpack_all
from paramstore_testkit.training.quantized_checkpoints import (
    fp8_quantization,
    mxfp4_quantization,
    quantize_files,
    to_fp8,
    to_mxfp4,
)

WORK = Work(16, new=24)
SHARES = (0.5, 0.25)
"""Of the bytes that all experts have in bf16: the memory that both get."""
UNPACKED_SHARE = 0.25
"""Of that memory: slots of unpacked experts."""
CELLS: tuple[tuple[float | None, int], ...] = ((None, 1), (None, 2), (500e6, 2))
"""Bytes a second that the drive gives, None for what it has, and threads of arithmetic."""
TARGET, READ_TIMES = 1.5, 2.0
"""Times the speed of bf16 that is asked where reading takes so many times as long as unpacking."""
RAW_RECORDS, UNPACKS = 16, 9
FULL = {FP8: SHAPES["bfloat16"], MXFP4: GptOssShape()}
SMALL = {
    FP8: replace(QUICK, hidden=512),  # the smallest whose matrices are whole blocks of 128 x 128
    MXFP4: GptOssShape(layers=QUICK.layers, experts=QUICK.experts, hidden=QUICK.hidden, inner=QUICK.inner, top_k=QUICK.top_k),
}
"""Shapes by format, of the bench and of its quick run."""


@dataclass(frozen=True, slots=True)
class Served:
    """A served model and its daemon."""

    model: Any
    service: Service

    def decode(self, number: int) -> tuple[Sample, Tensor]:
        """Decodes one prompt; gives the logits too."""
        before_bytes = 0

        def begin() -> None:
            nonlocal before_bytes
            before_bytes = self._bytes_read()

        seconds, logits = run(self.model, WORK, prompt_of(WORK, number), begin=begin)
        return Sample(WORK.new, seconds, parts={"read_bytes": float(self._bytes_read() - before_bytes)}), logits

    def _bytes_read(self) -> int:
        return sum(int(volume["bytes_read"]) for volume in self.service.stats()["volumes"].values())


def measure_quantized(bench: Bench, *, shapes: Mapping[str, Shape], rounds: int) -> Iterator[Row]:
    """Makes a row for each format, share of memory, speed of the drive and number of threads. shapes: by format, FP8 or MXFP4."""
    for kind, shape in shapes.items():
        with TemporaryDirectory(dir=bench.directory) as directory:  # of one format at a time: they are large
            yield from measure_format(bench, Path(directory), kind, shape=shape, rounds=rounds)


def measure_format(bench: Bench, directory: Path, kind: str, *, shape: Shape, rounds: int) -> Iterator[Row]:
    """Makes the rows of one format. directory: for checkpoints and stores."""
    quantized, plain = checkpoints_of(bench, directory, kind, shape)
    for share, (bytes_per_s, threads) in product(SHARES, CELLS):
        slots = max(shape.top_k, round(share * shape.keys))
        unpacked = max(shape.top_k, round(UNPACKED_SHARE * slots))
        budget_bytes = shape.budget_bytes(slots)
        with (
            reading_at(bytes_per_s),
            serving(directory / "quantized", host_budget_bytes=budget_bytes - unpacked * shape.image_bytes) as packed_service,
            serving(directory / "plain", host_budget_bytes=budget_bytes) as plain_service,
            bench.raw_file(bench.directory, param_kind(), record_bytes=shape.image_bytes, record_count=RAW_RECORDS) as raw,
        ):
            ours, theirs = load(quantized, packed_service, unpacked), load(plain, plain_service, slots)
            with ps.hf.namespace(ours.model) as namespace, ps.hf.namespace(theirs.model):
                for service in (packed_service, plain_service):
                    service.wait_until_quiet(bench.clock)
                torch.set_num_threads(threads)
                drive = "" if bytes_per_s is None else f", a drive of {bytes_per_s / 1e6:.0f} MB/s"
                case = f"{share:.0%} of bf16's bytes of memory, {threads} threads{drive}"
                bench.tell(f"{kind}, {case}")
                costs = {"read_bf16_s": read_s(raw, bytes_per_s), "unpack_s": unpack_s(namespace)}
                yield measure_pairs(case, ours, theirs, kind=kind, rounds=rounds, costs=costs, record_bytes=shape.image_bytes)


def checkpoints_of(bench: Bench, directory: Path, kind: str, shape: Shape) -> tuple[Path, Path]:
    """The checkpoint in fp8 or mxfp4, and the same as transformers dequantizes it."""
    quantized, plain = checkpoint_of(bench, shape, directory), directory / "dequantized"
    if kind == FP8:
        quantize_files(quantized, to_fp8, fp8_quantization(shape.layers))
    else:
        quantize_files(quantized, to_mxfp4, mxfp4_quantization())
    config = AutoConfig.from_pretrained(quantized)
    config.quantization_config["dequantize"] = True
    model: Any = AutoModelForCausalLM.from_pretrained(quantized, config=config, dtype=torch.bfloat16)
    model.save_pretrained(plain)
    return quantized, plain


def load(checkpoint: Path, service: Service, experts: int) -> Served:
    """The checkpoint's model, served with so many experts standing."""
    model = ps.hf.from_pretrained(
        AutoModelForCausalLM, checkpoint, store=service.store, mode="infer", name="experts", expert_memory=experts,
        dtype=torch.bfloat16, experts_implementation="grouped_mm",
    )  # fmt: skip
    return Served(model, service)


def measure_pairs(
    case: str, ours: Served, theirs: Served, *, kind: str, rounds: int, costs: dict[str, float], record_bytes: int
) -> Row:  # fmt: skip
    """Measures pairs. Raises StepMismatch where a bit of the logits differs."""
    logits: dict[int, Tensor] = {}

    def take(served: Served, number: int) -> Sample:
        sample, made = served.decode(number)
        if number in logits and not torch.equal(made, logits.pop(number)):
            raise StepMismatch(f"{case}, round {number}: quantized and dequantized have other logits")
        logits[number] = made
        return sample

    pairs = sample_pairs(rounds, lambda number: take(ours, number), lambda number: take(theirs, number))
    is_asked = costs["read_bf16_s"] >= READ_TIMES * costs["unpack_s"]
    read = {
        "read_bytes": median(pair.ours.parts["read_bytes"] for pair in pairs.pairs) / WORK.new,
        "bf16_read_bytes": median(pair.limit.parts["read_bytes"] for pair in pairs.pairs) / WORK.new,
    }
    return judged(
        Row(
            name=f"{DECODE}, {kind}", case=case, subject=SUBJECT, unit="tokens/s", record_bytes=record_bytes, against="bf16",
            value=pairs.rate, limit=pairs.limit_rate, ratio=pairs.ratio, ratio_min=pairs.ratio_min, ratio_max=pairs.ratio_max,
            target=Target("ratio", ">=", TARGET) if is_asked else None, parts={**costs, **read},
            note="" if is_asked else "reading an expert takes less than twice as long as unpacking it",
        )
    )  # fmt: skip


def read_s(raw: RawFile, bytes_per_s: float | None) -> float:
    """Seconds of a raw read of an expert's bytes in bf16, of several at once, from a drive that gives so much at most."""
    sample = raw.read(range(raw.record_count))
    return max(sample.seconds / raw.record_count, raw.record_bytes / bytes_per_s if bytes_per_s else 0.0)


def unpack_s(namespace: ps.Namespace) -> float:
    """Seconds in which one thread unpacks an expert."""
    tensors, (key, *_) = packed_tensors(namespace.schema), namespace.keys()
    out = {tensor.name: torch.empty(tensor.shape, dtype=torch.bfloat16) for tensor in tensors}
    with namespace.acquire([key]) as lease:
        fields, seconds = lease[key], list[float]()
        for _ in range(UNPACKS):
            started_s = time.perf_counter()
            unpack_all(tensors, fields, out)
            seconds.append(time.perf_counter() - started_s)
    return median(seconds)
