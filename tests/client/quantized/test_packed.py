"""Names of fields say what becomes of them; fields that do not fit are refused."""

from __future__ import annotations

import pytest
import torch

from paramstore.core.schema import Schema
from paramstore.errors import SchemaMismatch
from paramstore_client.quantized import unpack
from paramstore_client.quantized.packed import (
    Fp8Pieces,
    Mxfp4Blocks,
    Whole,
    fp8_name,
    is_packed,
    mxfp4_names,
    packed_tensors,
    scale_name,
    unpack_all,
    unpacked,
)

FP8 = {
    "gate_up:fp8:0": ((64, 32), "float8_e4m3fn"), "gate_up:fp8:0:scale": ((2, 1), "float32"),
    "gate_up:fp8:1": ((64, 32), "float8_e4m3fn"), "gate_up:fp8:1:scale": ((2, 1), "float32"),
    "down:fp8:0": ((32, 64), "float8_e4m3fn"), "down:fp8:0:scale": ((1, 2), "bfloat16"),
}  # fmt: skip
MXFP4 = {
    "gate_up:mxfp4:blocks": ((40, 2, 16), "uint8"), "gate_up:mxfp4:scales": ((40, 2), "uint8"), "bias": ((40,), "bfloat16"),
}  # fmt: skip


def test_a_schema_says_what_becomes_of_its_fields() -> None:
    fp8, mxfp4 = Schema.param(FP8), Schema.param(MXFP4)
    assert packed_tensors(fp8) == (Fp8Pieces("gate_up", (64, 64), 32), Fp8Pieces("down", (32,), 64))
    assert packed_tensors(mxfp4) == (Mxfp4Blocks("gate_up", 2, 40), Whole("bias", (40,)))
    assert unpacked(fp8, "bfloat16") == Schema.param({"gate_up": ((128, 32), "bfloat16"), "down": ((32, 64), "bfloat16")})
    assert unpacked(mxfp4, "float32") == Schema.param({"gate_up": ((64, 40), "float32"), "bias": ((40,), "float32")})
    assert is_packed(fp8)
    assert not is_packed(unpacked(fp8, "bfloat16"))


def test_names_are_those_that_are_read() -> None:
    assert {fp8_name("gate_up", 1), scale_name(fp8_name("gate_up", 1))} < set(FP8)
    assert set(mxfp4_names("gate_up")) < set(MXFP4)


def test_a_record_becomes_the_tensors_of_an_expert() -> None:
    generator = torch.Generator().manual_seed(8)
    schema = Schema.param(FP8)
    fields = {
        name: torch.randint(100, shape, generator=generator).to(torch.uint8).view(torch.float8_e4m3fn)
        if dtype == "float8_e4m3fn" else torch.rand(shape, generator=generator).to(getattr(torch, dtype))
        for name, shape, dtype in schema.specs
    }  # fmt: skip
    out = {tensor.name: torch.empty(tensor.shape, dtype=torch.bfloat16) for tensor in packed_tensors(schema)}
    unpack_all(packed_tensors(schema), fields, out)
    for name, rows in (("gate_up:fp8:0", out["gate_up"][:64]), ("gate_up:fp8:1", out["gate_up"][64:]), ("down:fp8:0", out["down"])):
        alone = torch.empty(rows.shape, dtype=torch.bfloat16)
        unpack.fp8(fields[name], fields[f"{name}:scale"], alone)
        assert torch.equal(rows, alone), name


def test_what_is_not_quantized_is_cast() -> None:
    out = torch.empty(40, dtype=torch.float32)
    Whole("bias", (40,)).unpack({"bias": torch.arange(40, dtype=torch.bfloat16)}, out)
    assert torch.equal(out, torch.arange(40.0))


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({**FP8, "gate_up:fp8:1:scale": ((3, 1), "float32")}, "'gate_up:fp8:1' has .* blocks of equal size"),
        ({**FP8, "gate_up:fp8:1:scale": ((2, 1), "int32")}, "with scales of float32"),
        ({**FP8, "gate_up:fp8:1": ((64, 32), "float8_e5m2")}, "fp8 is float8_e4m3fn"),
        ({**FP8, "gate_up:fp8:1": ((64, 16), "float8_e4m3fn")}, r"\[16, 32\] columns"),
        ({name: spec for name, spec in FP8.items() if name != "gate_up:fp8:0:scale"}, "its scales None"),
        ({name: spec for name, spec in FP8.items() if name != "gate_up:fp8:0"}, "'gate_up' has blocks None"),
        ({**FP8, "gate_up:fp8:3": ((64, 32), "float8_e4m3fn")}, "gate_up:fp8:3 belong to no quantized tensor"),
        ({**MXFP4, "gate_up:mxfp4:scales": ((40, 3), "uint8")}, "mxfp4 is uint8"),
        ({**MXFP4, "gate_up:mxfp4:blocks": ((40, 2, 8), "uint8")}, "mxfp4 is uint8"),
        ({"gate_up:int3:blocks": ((40, 2, 8), "uint8")}, "'gate_up' has blocks None"),
        ({**MXFP4, "bias:int3": ((40,), "uint8")}, "bias:int3 belong to no"),
    ],
)  # fmt: skip
def test_fields_that_do_not_fit_are_refused(fields: dict[str, tuple[tuple[int, ...], str]], match: str) -> None:
    with pytest.raises(SchemaMismatch, match=match):
        packed_tensors(Schema.param(fields))
