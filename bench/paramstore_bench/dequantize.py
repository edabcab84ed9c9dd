"""Measures unpacking of a quantized expert beside transformers' conversions: bytes of bf16 a second, and bits compared.

Matrices are of an expert of a Qwen3-MoE-like model in bf16 (8.65 MB), scales and exponents of usual sizes. The conversions of
transformers are those that it runs when it loads such a checkpoint on the CPU, of one expert each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from paramstore.bench.context import Bench
from paramstore.bench.pairs import Sample, sample_pairs
from paramstore.bench.report.rows import SUBJECT, Row, Target, judged
from paramstore.core.schema import Schema
from paramstore.errors import StepMismatch
from paramstore_client.quantized.packed import FP8, MXFP4, packed_tensors, unpack_all
from paramstore_native.dequantize import DEQUANTIZE

HIDDEN, INNER, QUICK_SIZE = 1024, 1408, 128
BLOCK, GROUP = 128, 32
THREADS = (1, 2)
TARGET = 3.0
"""Times the speed of transformers."""
GIGA = 1e9
Fields = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class Packed:
    """One quantized expert, and how transformers makes its tensors."""

    schema: Schema
    fields: Fields
    convert: Callable[[Mapping[str, Tensor]], list[Tensor]]


def measure_dequantize(bench: Bench, *, is_quick: bool) -> Iterator[Row]:
    """Makes a row for each kind and number of threads."""
    hidden, inner = (QUICK_SIZE, QUICK_SIZE) if is_quick else (HIDDEN, INNER)
    for kind, packed in ((FP8, fp8_expert(hidden, inner)), (MXFP4, mxfp4_expert(hidden, inner))):
        for threads in THREADS:
            torch.set_num_threads(threads)
            yield measure_one(bench, kind, packed, threads)


def measure_one(bench: Bench, kind: str, packed: Packed, threads: int) -> Row:
    """Measures pairs of one kind. Raises StepMismatch where a bit differs."""
    bench.tell(f"{kind}, {threads} threads")
    tensors = packed_tensors(packed.schema)
    out = {tensor.name: torch.empty(tensor.shape, dtype=torch.bfloat16) for tensor in tensors}
    unpack_all(tensors, packed.fields, out)
    for ours, theirs in zip(out.values(), packed.convert(packed.fields), strict=True):
        if not torch.equal(ours.view(torch.int16), theirs.view(torch.int16)):
            raise StepMismatch(f"{kind}: what is unpacked has not the bits of transformers")
    made_bytes = sum(tensor.nbytes for tensor in out.values())
    packed_bytes = sum(tensor.nbytes for tensor in packed.fields.values())

    def sample(call: Callable[[], object]) -> Callable[[int], Sample]:
        def take(_: int) -> Sample:
            started_s = bench.clock.now_s()
            call()
            return Sample(made_bytes, bench.clock.now_s() - started_s)

        return take

    unpack, convert = sample(lambda: unpack_all(tensors, packed.fields, out)), sample(lambda: packed.convert(packed.fields))
    pairs = sample_pairs(bench.plan.rounds, unpack, convert)
    return judged(
        Row(
            name=f"dequantize {kind}", case=f"one expert, {threads} threads, bytes of bf16", subject=SUBJECT, unit="GB/s",
            record_bytes=packed_bytes, against="transformers", value=pairs.rate / GIGA, limit=pairs.limit_rate / GIGA,
            ratio=pairs.ratio, ratio_min=pairs.ratio_min, ratio_max=pairs.ratio_max, target=Target("ratio", ">=", TARGET),
            parts={"packed_of_bf16": packed_bytes / made_bytes}, note=DEQUANTIZE.known_state(),
        )
    )  # fmt: skip


def fp8_expert(hidden: int, inner: int) -> Packed:
    """An expert of DeepSeek-V3's and Qwen3-MoE's format: gate and up one below the other, a scale for each 128 x 128."""
    generator = torch.Generator().manual_seed(1)
    pieces = {"gate_up:fp8:0": (inner, hidden), "gate_up:fp8:1": (inner, hidden), "down:fp8:0": (hidden, inner)}
    fields: Fields = {}
    for name, (rows, columns) in pieces.items():
        fields[name] = torch.randn(rows, columns, generator=generator).to(torch.float8_e4m3fn)
        fields[f"{name}:scale"] = torch.rand(rows // BLOCK, columns // BLOCK, generator=generator) * 0.01
    convert = Fp8Dequantize(None)._dequantize_one  # type: ignore[no-untyped-call]  # transformers left it so

    def converted(given: Mapping[str, Tensor]) -> list[Tensor]:
        gate, up, down = (convert(given[name], given[f"{name}:scale"], output_dtype=torch.bfloat16) for name in pieces)
        return [torch.cat([gate, up]), down]

    return Packed(_schema_of(fields), fields, converted)


def mxfp4_expert(hidden: int, inner: int) -> Packed:
    """An expert of gpt-oss' format, without its biases."""
    generator = torch.Generator().manual_seed(2)
    shapes = {"gate_up": (2 * inner, hidden), "down": (hidden, inner)}
    fields: Fields = {}
    for name, (rows, columns) in shapes.items():
        groups = columns // GROUP
        blocks = torch.randint(256, (rows, groups, GROUP // 2), dtype=torch.uint8, generator=generator)
        fields[f"{name}:mxfp4:blocks"] = blocks
        fields[f"{name}:mxfp4:scales"] = torch.randint(114, 124, (rows, groups), dtype=torch.uint8, generator=generator)

    def converted(given: Mapping[str, Tensor]) -> list[Tensor]:
        parts = ((given[f"{name}:mxfp4:blocks"][None], given[f"{name}:mxfp4:scales"][None]) for name in shapes)
        return [convert_moe_packed_tensors(blocks, scales)[0] for blocks, scales in parts]

    return Packed(_schema_of(fields), fields, converted)


def _schema_of(fields: Fields) -> Schema:
    return Schema.param({name: (tensor.shape, tensor.dtype) for name, tensor in fields.items()})
