"""Tells which tensors of a checkpoint are quantized, by the names that they have there, and pairs them with their scales.

| kind | tensors | stands for |
|---|---|---|
| fp8 | `X` of float8_e4m3fn, `X_scale_inv` | `X` |
| mxfp4 | `X_blocks`, `X_scales` | `X` |
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from paramstore.core.schema import Schema
from paramstore.errors import CheckpointError, SchemaMismatch
from paramstore_client.quantized.packed import FORMS, FP8, MXFP4, fp8_name, mxfp4_names, packed_tensors, scale_name
from paramstore_client.safetensors_file import DTYPES, StoredTensor

FP8_SCALE = "_scale_inv"
MXFP4_BLOCKS, MXFP4_SCALES = "_blocks", "_scales"
BYTES = "U8"
FP8_CODE = "F8_E4M3"


@dataclass(frozen=True, slots=True)
class QuantizedTensor:
    """A tensor of a checkpoint in two: its values, and their scales. kind: one of FP8, MXFP4. name: that of the tensor they stand
    for."""

    kind: str
    name: str
    values: StoredTensor
    scales: StoredTensor

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the values."""
        return self.values.shape

    @property
    def stored(self) -> tuple[StoredTensor, StoredTensor]:
        """What is read for it."""
        return self.values, self.scales

    def rows(self, start: int, count: int) -> QuantizedTensor:
        """`count` rows of the first dimension of both, from `start` on."""
        return replace(self, values=self.values.rows(start, count), scales=self.scales.rows(start, count))

    def one(self) -> QuantizedTensor:
        """Both without their first dimension, which has one row."""
        return replace(self, values=_without_first(self.values), scales=_without_first(self.scales))

    def fields(self, tensor: str, piece: int) -> Iterator[tuple[str, StoredTensor]]:
        """The fields of a record in which this is piece `piece` of the module's `tensor`, each with what it holds."""
        if self.kind == FP8:
            name = fp8_name(tensor, piece)
            yield from zip((name, scale_name(name)), self.stored, strict=True)
        else:
            yield from zip(mxfp4_names(tensor), self.stored, strict=True)

    def __str__(self) -> str:
        return f"{self.values} with {self.scales}"


CheckpointTensor = StoredTensor | QuantizedTensor


def paired(tensors: Mapping[str, StoredTensor]) -> dict[str, CheckpointTensor]:
    """The tensors of a checkpoint by the names that they would have if none were quantized. Raises CheckpointError where blocks of
    mxfp4 have no scales, and where scales have no blocks."""
    found: dict[str, CheckpointTensor] = {}
    for name, tensor in tensors.items():
        base, suffix = _split(name)
        if suffix == FP8_SCALE and base in tensors:
            continue
        if suffix == MXFP4_SCALES and (base + MXFP4_BLOCKS in tensors or tensor.dtype == BYTES):
            if base + MXFP4_BLOCKS not in tensors:
                raise CheckpointError(f"{described(tensor)}, has no blocks: {base + MXFP4_BLOCKS!r} is missing{form_of(MXFP4)}")
            continue
        scales = tensors.get(base + MXFP4_SCALES)
        if suffix == MXFP4_BLOCKS and (scales is not None or tensor.dtype == BYTES):
            if scales is None:
                raise CheckpointError(f"{described(tensor)}, has no scales: {base + MXFP4_SCALES!r} is missing{form_of(MXFP4)}")
            found[base] = QuantizedTensor(MXFP4, base, tensor, scales)
        elif (scales := tensors.get(name + FP8_SCALE)) is not None:
            found[name] = QuantizedTensor(FP8, name, tensor, scales)
        else:
            found[name] = tensor
    return found


def spec_of(stored: StoredTensor) -> tuple[tuple[int, ...], str]:
    """Shape and dtype of the field that holds such a tensor."""
    return stored.shape, DTYPES[stored.dtype]


def described(tensor: CheckpointTensor) -> str:
    """Where a tensor lies and what it is, its scales too, for an error."""
    each = (f"{stored} of shape {list(stored.shape)}, {DTYPES[stored.dtype]}" for stored in stored_of(tensor))
    return ", with ".join(each)


def named(tensors: Iterable[CheckpointTensor]) -> str:
    """Where several tensors lie and what they are, for an error."""
    return " and ".join(map(described, tensors))


def form_of(kind: str) -> str:
    """What tensors of a kind are, to end an error with."""
    return f"; an expert's matrix in {kind} is {FORMS[kind]}"


def check_piece(source: CheckpointTensor, whole: CheckpointTensor) -> None:
    """Checks the shapes and dtypes of what one expert has of a tensor. whole: as the checkpoint has it. Raises CheckpointError."""
    if not isinstance(source, QuantizedTensor):
        if source.dtype == FP8_CODE:
            raise CheckpointError(f"{described(whole)}, has no scales: {source.name + FP8_SCALE!r} is missing{form_of(FP8)}")
        return
    try:
        packed_tensors(Schema.param({name: spec_of(stored) for name, stored in source.fields("piece", 0)}))
    except SchemaMismatch as error:
        raise CheckpointError(f"{described(whole)}, does not fit{form_of(source.kind)}") from error


def check_alike(kinds: Iterable[Sequence[Sequence[CheckpointTensor]]]) -> None:
    """Checks that a quantized tensor is of one kind. kinds: by kind, what each expert's is made of. Raises CheckpointError naming
    one of the rarest, and one as most are."""
    rarest, *others = sorted(kinds, key=len)
    if not others:
        return
    pairs = [*zip(rarest[0], others[-1][0], strict=False)]
    odd, usual = next((pair for pair in pairs if _specs(pair[0]) != _specs(pair[1])), pairs[0])
    raise CheckpointError(
        f"{described(odd)}, is not as most are: {described(usual)}; quantized experts are served where all have the same shapes "
        "and dtypes, their scales too"
    )


def _specs(tensor: CheckpointTensor) -> list[tuple[tuple[int, ...], str]]:
    return [spec_of(stored) for stored in stored_of(tensor)]


def stored_of(tensor: CheckpointTensor) -> tuple[StoredTensor, ...]:
    """What is read for a tensor."""
    return tensor.stored if isinstance(tensor, QuantizedTensor) else (tensor,)


def _split(name: str) -> tuple[str, str]:
    for suffix in (FP8_SCALE, MXFP4_BLOCKS, MXFP4_SCALES):
        if name.endswith(suffix):
            return name.removesuffix(suffix), suffix
    return name, ""


def _without_first(stored: StoredTensor) -> StoredTensor:
    return replace(stored, shape=stored.shape[1:])
