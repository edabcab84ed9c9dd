"""The layout of a record: its parts, fields, shapes, dtypes, and where each byte lies.

A *stored* part's image is exactly what lies in its extent and in its slot: `header | field | field | ...`, each field
aligned to 4 KiB. A *derived* part (`param` of a training schema) has no header and is never on a volume: it is made from
the `master` fields. Checksums are one per CHUNK_BYTES; chunks restart at each field, so `master` can be read and
verified without the moments. The header's size is fixed by the schema.
dtypes are the names torch uses ("float32", "bfloat16"): this file imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from paramstore.core.arguments import choice, whole_number
from paramstore.core.optimizers import OPTIMIZERS, Options, State
from paramstore.errors import ConfigError, SchemaMismatch

PAGE_BYTES = 4096
CHUNK_BYTES = 1 << 20
HEADER_FIXED_BYTES = 512
"""Bytes of the header before its checksum table; `storage.format.structures` fills them."""
CHECKSUM_BYTES = 8

ITEM_BYTES = {
    "float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1,
}  # fmt: skip
PARAM_DTYPES = ("float32", "bfloat16", "float16")
"""The dtypes that a training schema's `param` and gradients may have."""
MASTER_DTYPE = "float32"
MASTER_PREFIX = "master"
"""Name prefix of the masters, which come first in a record, so that forward reads them alone."""
BLOCKWISE = "int8_blockwise"
STATE_DTYPES = ("float32", "bfloat16", BLOCKWISE)
"""The ways to store a training schema's optimizer states; `optim/states.py` says what each means."""
STATE_BLOCK_ELEMENTS = 256
"""Elements of a blockwise state that share one scale; blocks restart at each field."""
SCALE_DTYPE = "float32"
UPDATE_RULES = ("touched", "exact")
"""An apply's rules for records without a gradient: it leaves them alone, or they make a step with a gradient of zeros (later, when
the record is needed)."""
FIELDS_MAX = 64
RANK_MAX = 8


def round_up(value: int, multiple: int) -> int:
    """The least multiple of `multiple` that is not below `value`."""
    return -(-value // multiple) * multiple


def dtype_name(dtype: object) -> str:
    """The name of a torch dtype, or of one given as a string. Raises SchemaMismatch for one we cannot store."""
    name = str(dtype).removeprefix("torch.")
    if name not in ITEM_BYTES:
        raise SchemaMismatch(f"dtype {dtype!r} cannot be stored; use one of {', '.join(ITEM_BYTES)}")
    return name


@dataclass(frozen=True, slots=True)
class Field:
    """One tensor of a part. `offset_bytes` counts from the start of the part's image (header included)."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    offset_bytes: int

    @property
    def elements(self) -> int:
        return prod(self.shape)

    @property
    def length_bytes(self) -> int:
        return self.elements * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class Chunk:
    """One checksummed byte range of a stored part's image."""

    offset_bytes: int
    length_bytes: int


@dataclass(frozen=True, slots=True)
class Part:
    """A named piece of a record with its own residency.

    header_bytes: 0 for a derived part. image_bytes: header and fields, rounded up to whole pages; a slot's size.
    """

    name: str
    fields: tuple[Field, ...]
    header_bytes: int
    image_bytes: int

    def __hash__(self) -> int:
        """Hashes what mostly tells parts apart: all fields take 5 us, and a part is looked up for each record that moves."""
        return hash((self.name, self.image_bytes))

    @property
    def is_stored(self) -> bool:
        return self.header_bytes > 0

    def field(self, name: str) -> Field:
        for field in self.fields:
            if field.name == name:
                return field
        raise SchemaMismatch(f"part {self.name!r} has no field {name!r}; it has {', '.join(f.name for f in self.fields)}")

    def chunks(self) -> tuple[Chunk, ...]:
        """The part's checksummed ranges in order of offset."""
        return tuple(
            Chunk(field.offset_bytes + start, min(CHUNK_BYTES, field.length_bytes - start))
            for field in self.fields for start in range(0, field.length_bytes, CHUNK_BYTES)
        )


FieldSpecs = tuple[tuple[str, tuple[int, ...], str], ...]


@dataclass(frozen=True, slots=True)
class StateFields:
    """The fields that store one optimizer state of one parameter field. scales: None where `values` are the state itself."""

    state: State
    values: Field
    scales: Field | None


@dataclass(frozen=True, slots=True)
class Schema:
    """Parts and layout of a namespace's records. Make one with `adamw`, `sgd`, `adagrad` or `param`; equal schemas have equal
    layouts.

    kind: an optimizer's (parts `optim`, stored, and `param`, derived) or "param" (one stored part `param`).
    specs: the parameter fields as the user gave them, (name, shape, dtype).
    gradient_dtype: dtype of pushed gradients; "" for kind "param".
    updates: one of UPDATE_RULES; "touched" for kind "param", which has none.
    state_dtype: one of STATE_DTYPES; "float32" for kind "param", which has no states.
    """

    kind: str
    specs: FieldSpecs
    gradient_dtype: str
    parts: tuple[Part, ...]
    updates: str = "touched"
    state_dtype: str = "float32"

    @classmethod
    def trained(
        cls, kind: str, fields: Mapping[str, Sequence[int]], *, param_dtype: object = "bfloat16", gradient_dtype: object = None,
        updates: str = "touched", state_dtype: object = "float32",
    ) -> Schema:  # fmt: skip
        """Makes a schema of parameters that the optimizer `kind` trains: fp32 `master` and the optimizer's states.

        fields: name -> shape. param_dtype: float32, bfloat16 or float16. gradient_dtype: default `param_dtype`.
        updates: what an apply does to records without a gradient, one of UPDATE_RULES. state_dtype: one of STATE_DTYPES.
        Raises SchemaMismatch.
        """
        if not isinstance(updates, str) or updates not in UPDATE_RULES:
            raise SchemaMismatch(f"updates={updates!r}: a training schema takes {', '.join(UPDATE_RULES)}")
        stored_as = str(state_dtype).removeprefix("torch.")
        if stored_as not in STATE_DTYPES:
            raise SchemaMismatch(f"state_dtype={stored_as}: a training schema takes {', '.join(STATE_DTYPES)}")
        param = _check_param_dtype(param_dtype, "param_dtype")
        gradient = _check_param_dtype(param if gradient_dtype is None else gradient_dtype, "gradient_dtype")
        choice("kind", kind, tuple(OPTIMIZERS))
        specs = _check_specs({name: (shape, param) for name, shape in _items(fields)})
        parts = (_stored_part("optim", _optim_specs(kind, specs, stored_as)), _derived_part("param", specs))
        return cls(kind=kind, specs=specs, gradient_dtype=gradient, parts=parts, updates=updates, state_dtype=stored_as)

    @classmethod
    def adamw(
        cls, fields: Mapping[str, Sequence[int]], *, param_dtype: object = "bfloat16", gradient_dtype: object = None,
        updates: str = "touched", state_dtype: object = "float32",
    ) -> Schema:  # fmt: skip
        """Makes a schema for `AdamW`: fp32 master weights, `exp_avg` and `exp_avg_sq` on the volume (12 bytes a parameter, the 12·S
        of SE-MoE, section 3.1; 8 with bf16 states, 6 with 8-bit ones), `param_dtype` weights made from them. Arguments: see
        `trained`. Raises SchemaMismatch."""
        return cls.trained(
            "adamw", fields, param_dtype=param_dtype, gradient_dtype=gradient_dtype, updates=updates, state_dtype=state_dtype
        )

    @classmethod
    def sgd(
        cls, fields: Mapping[str, Sequence[int]], *, param_dtype: object = "bfloat16", gradient_dtype: object = None,
        updates: str = "touched", state_dtype: object = "float32",
    ) -> Schema:  # fmt: skip
        """Makes a schema for `SGD`: fp32 master weights and `momentum_buffer` (8 bytes a parameter, 6 with bf16 states, 5 with
        8-bit ones). Arguments: see `trained`. Raises SchemaMismatch."""
        return cls.trained(
            "sgd", fields, param_dtype=param_dtype, gradient_dtype=gradient_dtype, updates=updates, state_dtype=state_dtype
        )

    @classmethod
    def adagrad(
        cls, fields: Mapping[str, Sequence[int]], *, param_dtype: object = "bfloat16", gradient_dtype: object = None,
        updates: str = "touched", state_dtype: object = "float32",
    ) -> Schema:  # fmt: skip
        """Makes a schema for `Adagrad`: fp32 master weights and `sum` (8 bytes a parameter, 6 with bf16 states, 5 with 8-bit ones).
        Arguments: see `trained`. Raises SchemaMismatch."""
        return cls.trained(
            "adagrad", fields, param_dtype=param_dtype, gradient_dtype=gradient_dtype, updates=updates, state_dtype=state_dtype
        )

    @classmethod
    def param(cls, fields: Mapping[str, tuple[Sequence[int], object]]) -> Schema:
        """Makes an inference schema: a checkpoint's bytes in one part. fields: name -> (shape, dtype). Raises SchemaMismatch."""
        specs = _check_specs(fields)
        return cls(kind="param", specs=specs, gradient_dtype="", parts=(_stored_part("param", specs),))

    @classmethod
    def from_description(cls, description: Mapping[str, object]) -> Schema:
        """Returns the schema that `describe` described. Raises SchemaMismatch if it is not a description."""
        try:
            kind = description["kind"]
            raw = description["fields"]
            fields = {str(name): (tuple(shape), dtype) for name, shape, dtype in raw}  # type: ignore[attr-defined]
            if kind == "param":
                return cls.param(fields)
            if kind in OPTIMIZERS:
                dtypes = {dtype for _, dtype in fields.values()}
                if len(dtypes) != 1:
                    raise SchemaMismatch(f"a training schema has one param dtype, got {sorted(map(str, dtypes))}")
                shapes = {name: shape for name, (shape, _) in fields.items()}
                return cls.trained(
                    str(kind), shapes, param_dtype=dtypes.pop(), gradient_dtype=description["gradient_dtype"],
                    updates=str(description.get("updates", "touched")),
                    state_dtype=description.get("state_dtype", "float32"),
                )  # fmt: skip
        except (IndexError, KeyError, TypeError, ValueError) as error:
            raise SchemaMismatch(f"not a schema description: {error!r}") from error
        raise SchemaMismatch(f"schema kind {kind!r} is unknown; this version knows {', '.join(('param', *OPTIMIZERS))}")

    def describe(self) -> dict[str, object]:
        """Returns plain values, to be sent and kept in the catalog. Defaults are left out, so that catalogs and notes of an earlier
        version describe equal schemas in equal bytes."""
        fields = [[name, list(shape), dtype] for name, shape, dtype in self.specs]
        described: dict[str, object] = {"kind": self.kind, "fields": fields, "gradient_dtype": self.gradient_dtype}
        if self.updates != "touched":
            described["updates"] = self.updates
        if self.state_dtype != "float32":
            described["state_dtype"] = self.state_dtype
        return described

    def part(self, name: str) -> Part:
        """Returns the part of that name. Raises SchemaMismatch, naming the parts that there are."""
        for part in self.parts:
            if isinstance(name, str) and part.name == name:
                return part
        raise SchemaMismatch(f"schema has no part {name!r}; it has {', '.join(p.name for p in self.parts)}")

    @property
    def stored(self) -> Part:
        """The one part that lies on the volume. Its `image_bytes` is the record's size there."""
        return self.parts[0]

    @property
    def record_bytes(self) -> int:
        return self.stored.image_bytes

    @property
    def is_trainable(self) -> bool:
        return self.kind != "param"

    def check_options(self, options: Options) -> None:
        """Raises SchemaMismatch if `options` are not those of the optimizer whose states the records hold."""
        if not isinstance(options, Options):
            names = ", ".join(f"ps.{cls.__name__}(...)" for cls in OPTIMIZERS.values())
            raise SchemaMismatch(f"options={options!r:.80}: give one of {names}; their arguments have torch's names")
        if options.kind != self.kind:
            states = "none" if self.kind == "param" else ", ".join(state.name for state in OPTIMIZERS[self.kind].states)
            raise SchemaMismatch(
                f"{type(options).__name__} cannot update a namespace of schema kind {self.kind!r}, whose optimizer states are "
                f"{states}: give the options of {self.kind!r}, or create the namespace with a schema of kind {options.kind!r}"
            )

    def state_fields(self) -> tuple[tuple[StateFields, ...], ...]:
        """For each parameter field, in order, the fields that store its optimizer states; its master is the stored field of the
        same number. Training schemas only."""
        count, states = len(self.specs), OPTIMIZERS[self.kind].states
        fields = self.stored.fields
        first_scale = count * (1 + len(states))
        return tuple(
            tuple(
                StateFields(
                    state, fields[count * (place + 1) + number],
                    fields[first_scale + count * place + number] if self.state_dtype == BLOCKWISE else None,
                )
                for place, state in enumerate(states)
            )
            for number in range(count)
        )  # fmt: skip

    @property
    def bytes_per_parameter(self) -> float:
        """Bytes of the record's fields for each parameter, without header and padding."""
        return sum(field.length_bytes for field in self.stored.fields) / self.parameter_elements

    @property
    def parameter_elements(self) -> int:
        """Number of parameters in one record."""
        return sum(prod(shape) for _, shape, _ in self.specs)

    def initial_fields(self) -> tuple[Field, ...]:
        """The fields of an initial value in an upload range: fp32 for training (they become `master`), else as stored."""
        return self._initial_layout()[0]

    @property
    def initial_bytes(self) -> int:
        """Bytes that one key's initial value takes in an upload area."""
        return self._initial_layout()[1]

    def _initial_layout(self) -> tuple[tuple[Field, ...], int]:
        return _layout(
            [(name, shape, MASTER_DTYPE if self.is_trainable else dtype) for name, shape, dtype in self.specs], start_bytes=0
        )

    def gradient_fields(self) -> tuple[Field, ...]:
        """The fields of one key's gradient as they lie in its range of an upload area; page-aligned as in a part."""
        return _layout([(name, shape, self.gradient_dtype) for name, shape, _ in self.specs], start_bytes=0)[0]

    @property
    def gradient_bytes(self) -> int:
        """Bytes that one key's gradients take in an upload area."""
        return _layout([(name, shape, self.gradient_dtype) for name, shape, _ in self.specs], start_bytes=0)[1]


def _check_param_dtype(dtype: object, argument: str) -> str:
    name = dtype_name(dtype)
    if name not in PARAM_DTYPES:
        raise SchemaMismatch(f"{argument}={name}: a training schema takes {', '.join(PARAM_DTYPES)}")
    return name


def _items(fields: Mapping[str, Any]) -> Any:
    if not isinstance(fields, Mapping):
        raise SchemaMismatch(f"fields={fields!r:.80}: give a mapping of names")
    return fields.items()


def _check_specs(fields: Mapping[str, tuple[Sequence[int], object]]) -> FieldSpecs:
    if not 1 <= len(_items(fields)) <= FIELDS_MAX:
        raise SchemaMismatch(f"{len(fields)} fields: give 1 to {FIELDS_MAX}")
    specs = []
    for name, spec in fields.items():
        if not isinstance(spec, Sequence) or isinstance(spec, str | bytes) or len(spec) != 2:
            raise SchemaMismatch(f"field {name!r} has {spec!r:.80}: give (shape, dtype)")
        shape, dtype = spec
        try:
            dimensions = tuple(whole_number("size", size) for size in shape)
        except (ConfigError, TypeError) as error:
            raise SchemaMismatch(f"field {name!r} has shape {shape!r:.80}: give whole numbers") from error
        if not isinstance(name, str) or not name or len(name) > 64 or "/" in name or not name.isprintable():
            raise SchemaMismatch(f"field name {name!r}: use 1 to 64 printable characters without '/'")
        if not 1 <= len(dimensions) <= RANK_MAX or min(dimensions) < 1:
            raise SchemaMismatch(f"field {name!r} has shape {dimensions}: give 1 to {RANK_MAX} sizes, each at least 1")
        specs.append((name, dimensions, dtype_name(dtype)))
    return tuple(specs)


def _optim_specs(kind: str, specs: FieldSpecs, state_dtype: str) -> list[tuple[str, tuple[int, ...], str]]:
    """The stored fields of a training schema: all masters, then each state's values, then each state's scales."""
    dtype = "int8" if state_dtype == BLOCKWISE else state_dtype
    states = [state.name for state in OPTIMIZERS[kind].states]
    stored = [(f"{MASTER_PREFIX}/{name}", shape, MASTER_DTYPE) for name, shape, _ in specs]
    stored += [(f"{state}/{name}", shape, dtype) for state in states for name, shape, _ in specs]
    if state_dtype == BLOCKWISE:
        stored += [
            (f"{state}_scale/{name}", (-(-prod(shape) // STATE_BLOCK_ELEMENTS),), SCALE_DTYPE)
            for state in states for name, shape, _ in specs
        ]
    return stored


def _layout(specs: Sequence[tuple[str, tuple[int, ...], str]], *, start_bytes: int) -> tuple[tuple[Field, ...], int]:
    """Lays out fields one after the other, each on a page boundary; returns them and the end, rounded up to a page."""
    fields, offset_bytes = [], start_bytes
    for name, shape, dtype in specs:
        field = Field(name, shape, dtype, offset_bytes)
        fields.append(field)
        offset_bytes = round_up(offset_bytes + field.length_bytes, PAGE_BYTES)
    return tuple(fields), offset_bytes


def _stored_part(name: str, specs: Sequence[tuple[str, tuple[int, ...], str]]) -> Part:
    lengths = [prod(shape) * ITEM_BYTES[dtype] for _, shape, dtype in specs]
    chunk_count = sum(-(-length // CHUNK_BYTES) for length in lengths)
    header_bytes = round_up(HEADER_FIXED_BYTES + chunk_count * CHECKSUM_BYTES, PAGE_BYTES)
    fields, image_bytes = _layout(specs, start_bytes=header_bytes)
    return Part(name, fields, header_bytes, image_bytes)


def _derived_part(name: str, specs: Sequence[tuple[str, tuple[int, ...], str]]) -> Part:
    fields, image_bytes = _layout(specs, start_bytes=0)
    return Part(name, fields, 0, image_bytes)
