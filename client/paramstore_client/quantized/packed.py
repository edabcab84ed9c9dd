"""How a quantized expert lies in a record: the checkpoint's own tensors, as fields whose names say what is made of them.

| fields | what becomes of them |
|---|---|
| `T` | the tensor T, as it is |
| `T:fp8:0`, `T:fp8:0:scale`, `T:fp8:1`, ... | T [R, C], rows piece by piece: float8_e4m3fn [r, C], a scale for each block |
| `T:mxfp4:blocks`, `T:mxfp4:scales` | T [32 g, n]: uint8 [n, g, 16], two values a byte; uint8 [n, g], an exponent for 32 values |

A namespace whose fields have such names holds quantized experts; `unpacked` is the schema of what they become.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from paramstore.core.schema import Schema
from paramstore.errors import SchemaMismatch
from paramstore_client.quantized import unpack

MARK = ":"
FP8, MXFP4 = "fp8", "mxfp4"
SCALE, BLOCKS, SCALES = "scale", "blocks", "scales"
FP8_DTYPE, BYTES = "float8_e4m3fn", "uint8"
SCALE_DTYPES = ("float32", "bfloat16", "float16")
GROUP = 32
"""Values of mxfp4 that share an exponent."""
FORMS = {
    FP8: f"{FP8_DTYPE} [r, C] with scales of {', '.join(SCALE_DTYPES)} for blocks of equal size",
    MXFP4: f"{BYTES} [n, g, {GROUP // 2}] with scales of {BYTES} [n, g]",
}
"""What an expert's matrix is stored as, in words."""
Spec = tuple[tuple[int, ...], str]
"""Shape and dtype of a field."""


class PackedTensor(Protocol):
    """One tensor of an expert, made of fields of its record."""

    @property
    def name(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of what is made."""
        ...

    def unpack(self, fields: Mapping[str, Tensor], out: Tensor) -> None:
        """Makes the tensor in `out`, on the device where the fields are."""
        ...


@dataclass(frozen=True, slots=True)
class Whole:
    """A tensor that is not quantized: it is cast to the dtype of `out`."""

    name: str
    shape: tuple[int, ...]

    def unpack(self, fields: Mapping[str, Tensor], out: Tensor) -> None:
        out.copy_(fields[self.name])


@dataclass(frozen=True, slots=True)
class Fp8Pieces:
    """Rows of fp8, piece by piece. rows: of each."""

    name: str
    rows: tuple[int, ...]
    columns: int

    @property
    def shape(self) -> tuple[int, ...]:
        return sum(self.rows), self.columns

    def unpack(self, fields: Mapping[str, Tensor], out: Tensor) -> None:
        start = 0
        for number, rows in enumerate(self.rows):
            name = fp8_name(self.name, number)
            unpack.fp8(fields[name], fields[scale_name(name)], out[start : start + rows])
            start += rows


@dataclass(frozen=True, slots=True)
class Mxfp4Blocks:
    """Columns of mxfp4: what is made is transposed, as gpt-oss multiplies by it."""

    name: str
    groups: int
    columns: int

    @property
    def shape(self) -> tuple[int, ...]:
        return self.groups * GROUP, self.columns

    def unpack(self, fields: Mapping[str, Tensor], out: Tensor) -> None:
        blocks, scales = mxfp4_names(self.name)
        unpack.mxfp4(fields[blocks], fields[scales], out)


def fp8_name(tensor: str, piece: int) -> str:
    """The field of a piece of fp8."""
    return MARK.join((tensor, FP8, str(piece)))


def scale_name(field: str) -> str:
    """The field of the scales of a piece of fp8."""
    return f"{field}{MARK}{SCALE}"


def mxfp4_names(tensor: str) -> tuple[str, str]:
    """The fields of a tensor of mxfp4: its blocks, its scales."""
    return f"{tensor}{MARK}{MXFP4}{MARK}{BLOCKS}", f"{tensor}{MARK}{MXFP4}{MARK}{SCALES}"


def is_packed(schema: Schema) -> bool:
    """Whether records of this schema hold quantized experts."""
    return any(MARK in name for name, _, _ in schema.specs)


def packed_tensors(schema: Schema) -> tuple[PackedTensor, ...]:
    """What an expert of such a schema is made of, in the order of its fields. Raises SchemaMismatch where its fields do not fit."""
    specs: dict[str, Spec] = {name: (shape, dtype) for name, shape, dtype in schema.specs}
    made, rest = list[PackedTensor](), dict(specs)
    for tensor in dict.fromkeys(name.partition(MARK)[0] for name in specs):
        if tensor in rest:
            made.append(Whole(tensor, rest.pop(tensor)[0]))
        elif fp8_name(tensor, 0) in rest:
            made.append(_fp8(tensor, rest))
        else:
            made.append(_mxfp4(tensor, rest))
    if rest:
        raise SchemaMismatch(f"fields {', '.join(rest)} belong to no quantized tensor that this version knows")
    return tuple(made)


def unpacked(schema: Schema, dtype: str) -> Schema:
    """The schema of experts that are computed with, whose records are of `schema`. dtype: of all their tensors."""
    return Schema.param({tensor.name: (tensor.shape, dtype) for tensor in packed_tensors(schema)})


def unpack_all(tensors: Iterable[PackedTensor], fields: Mapping[str, Tensor], out: Mapping[str, Tensor]) -> None:
    """Makes each of the `tensors` of one record's `fields` in `out`, by name."""
    for tensor in tensors:
        tensor.unpack(fields, out[tensor.name])


def _fp8(tensor: str, rest: dict[str, Spec]) -> Fp8Pieces:
    rows, columns = list[int](), set[int]()
    while (spec := rest.pop(name := fp8_name(tensor, len(rows)), None)) is not None:
        scale = rest.pop(scale_name(name), None)
        if scale is None or len(spec[0]) != 2 or spec[1] != FP8_DTYPE or scale[1] not in SCALE_DTYPES or not _divides(scale, spec):
            raise SchemaMismatch(f"field {name!r} has {spec}, its scales {scale}: {FP8} is {FORMS[FP8]}")
        rows.append(spec[0][0])
        columns.add(spec[0][1])
    if len(columns) != 1:
        raise SchemaMismatch(f"pieces of {tensor!r} have {sorted(columns)} columns: one below the other they have the same number")
    return Fp8Pieces(tensor, tuple(rows), columns.pop())


def _mxfp4(tensor: str, rest: dict[str, Spec]) -> Mxfp4Blocks:
    blocks, scales = (rest.pop(name, None) for name in mxfp4_names(tensor))
    if blocks is None or scales is None or {blocks[1], scales[1]} != {BYTES} or blocks[0] != (*scales[0], GROUP // 2):
        raise SchemaMismatch(f"{tensor!r} has blocks {blocks} and scales {scales}: {MXFP4} is {FORMS[MXFP4]}")
    columns, groups = scales[0]
    return Mxfp4Blocks(tensor, groups, columns)


def _divides(scale: Spec, spec: Spec) -> bool:
    return len(scale[0]) == 2 and all(not size % blocks for size, blocks in zip(spec[0], scale[0], strict=True))
