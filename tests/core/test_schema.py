"""Layouts: where each byte of a record lies, and that equal schemas lay out alike."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paramstore.core.optimizers import OPTIMIZERS, SGD, Adagrad, AdamW
from paramstore.core.schema import (
    CHUNK_BYTES,
    FIELDS_MAX,
    HEADER_FIXED_BYTES,
    ITEM_BYTES,
    PAGE_BYTES,
    RANK_MAX,
    STATE_DTYPES,
    UPDATE_RULES,
    Part,
    Schema,
    dtype_name,
    round_up,
)
from paramstore.errors import SchemaMismatch

SHAPES = st.lists(st.integers(1, 300), min_size=1, max_size=3).map(tuple)
FIELDS = st.dictionaries(st.text("abcdefg_", min_size=1, max_size=8), SHAPES, min_size=1, max_size=5)


def schemas() -> st.SearchStrategy[Schema]:
    dtypes = st.sampled_from(sorted(ITEM_BYTES))
    names = st.text("abc", min_size=1, max_size=8)
    stored = st.dictionaries(names, st.tuples(SHAPES, dtypes), min_size=1, max_size=5).map(Schema.param)
    param_dtypes = st.sampled_from(["float32", "bfloat16", "float16"])
    trained = st.builds(
        Schema.trained, st.sampled_from(sorted(OPTIMIZERS)), FIELDS, param_dtype=param_dtypes,
        gradient_dtype=st.none() | param_dtypes, updates=st.sampled_from(UPDATE_RULES), state_dtype=st.sampled_from(STATE_DTYPES),
    )  # fmt: skip
    return stored | trained


@pytest.mark.parametrize(("value", "rounded"), [(0, 0), (1, 4096), (4096, 4096), (4097, 8192)])
def test_rounding_up(value: int, rounded: int) -> None:
    assert round_up(value, 4096) == rounded


def test_a_torch_dtype_is_known_by_its_name() -> None:
    class FakeDtype:
        def __str__(self) -> str:
            return "torch.bfloat16"

    assert dtype_name(FakeDtype()) == dtype_name("bfloat16") == "bfloat16"
    with pytest.raises(SchemaMismatch, match="complex64"):
        dtype_name("torch.complex64")


# --- adamw


def test_an_adamw_record_stores_the_masters_first_then_both_moments() -> None:
    schema = Schema.adamw({"gate_up": (4, 6), "down": (6, 2)})
    assert [field.name for field in schema.stored.fields] == [
        "master/gate_up", "master/down", "exp_avg/gate_up", "exp_avg/down", "exp_avg_sq/gate_up", "exp_avg_sq/down",
    ]  # fmt: skip
    assert {field.dtype for field in schema.stored.fields} == {"float32"}
    assert [part.name for part in schema.parts] == ["optim", "param"]
    assert [part.is_stored for part in schema.parts] == [True, False]


def test_an_adamw_record_takes_twelve_bytes_a_parameter_and_its_pages() -> None:
    schema = Schema.adamw({"w": (1024, 1024)})
    assert schema.parameter_elements == 1 << 20
    assert schema.record_bytes == schema.stored.header_bytes + 12 * (1 << 20)
    assert schema.part("param").image_bytes == 2 << 20


def test_gradients_have_the_param_dtype_unless_said_otherwise() -> None:
    fields = {"w": (8,)}
    assert Schema.adamw(fields, param_dtype="float16").gradient_dtype == "float16"
    assert Schema.adamw(fields, gradient_dtype="float32").gradient_dtype == "float32"
    assert Schema.adamw(fields, gradient_dtype="float32").gradient_fields()[0].length_bytes == 32


@pytest.mark.parametrize("argument", ["param_dtype", "gradient_dtype"])
def test_a_dtype_that_adamw_cannot_train_is_refused(argument: str) -> None:
    with pytest.raises(SchemaMismatch, match=f"{argument}=int8"):
        Schema.adamw({"w": (8,)}, **{argument: "int8"})


def test_initial_values_of_adamw_are_float32_and_of_param_as_stored() -> None:
    assert [field.dtype for field in Schema.adamw({"w": (8,)}).initial_fields()] == ["float32"]
    assert [field.dtype for field in Schema.param({"w": ((8,), "uint8")}).initial_fields()] == ["uint8"]


# --- other optimizers, other states


@pytest.mark.parametrize(
    ("make", "state_dtype", "names", "bytes_per_parameter"),
    [
        (Schema.adamw, "float32", ["master", "exp_avg", "exp_avg_sq"], 12),
        (Schema.adamw, "bfloat16", ["master", "exp_avg", "exp_avg_sq"], 8),
        (Schema.adamw, "int8_blockwise", ["master", "exp_avg", "exp_avg_sq", "exp_avg_scale", "exp_avg_sq_scale"], 6.03125),
        (Schema.sgd, "float32", ["master", "momentum_buffer"], 8),
        (Schema.sgd, "bfloat16", ["master", "momentum_buffer"], 6),
        (Schema.sgd, "int8_blockwise", ["master", "momentum_buffer", "momentum_buffer_scale"], 5.015625),
        (Schema.adagrad, "float32", ["master", "sum"], 8),
        (Schema.adagrad, "bfloat16", ["master", "sum"], 6),
        (Schema.adagrad, "int8_blockwise", ["master", "sum", "sum_scale"], 5.015625),
    ],
)
def test_what_a_record_stores_and_takes(
    make: Callable[..., Schema], state_dtype: str, names: list[str], bytes_per_parameter: float
) -> None:
    schema = make({"w": (1024, 1024), "v": (1024,)}, state_dtype=state_dtype)
    assert [field.name for field in schema.stored.fields] == [f"{name}/{field}" for name in names for field in ("w", "v")]
    assert schema.bytes_per_parameter == bytes_per_parameter
    assert schema.record_bytes >= bytes_per_parameter * schema.parameter_elements
    assert {field.dtype for field in schema.stored.fields if field.name.startswith("master/")} == {"float32"}


def test_each_state_is_found_with_its_scales() -> None:
    schema = Schema.adamw({"w": (100, 3), "v": (513,)}, state_dtype="int8_blockwise")
    first, second = schema.state_fields()
    found = [(each.values.name, each.scales.name, each.state.is_signed) for each in (*first, *second) if each.scales]
    assert found == [
        ("exp_avg/w", "exp_avg_scale/w", True), ("exp_avg_sq/w", "exp_avg_sq_scale/w", False),
        ("exp_avg/v", "exp_avg_scale/v", True), ("exp_avg_sq/v", "exp_avg_sq_scale/v", False),
    ]  # fmt: skip
    assert [each.scales.shape for each in (first[0], second[0]) if each.scales] == [(2,), (3,)]
    assert {each.scales for each in Schema.sgd({"w": (4,)}, state_dtype="bfloat16").state_fields()[0]} == {None}


def test_a_torch_dtype_names_the_states() -> None:
    assert Schema.adamw({"w": (4,)}, state_dtype=torch.bfloat16).state_dtype == "bfloat16"


@pytest.mark.parametrize("state_dtype", ["float16", "int8", torch.float64, None])
def test_states_that_nobody_can_keep_are_refused(state_dtype: object) -> None:
    with pytest.raises(SchemaMismatch, match=r"state_dtype=.*: a training schema takes float32, bfloat16, int8_blockwise"):
        Schema.sgd({"w": (4,)}, state_dtype=state_dtype)


def test_options_of_another_optimizer_are_refused_with_both_named() -> None:
    Schema.sgd({"w": (4,)}).check_options(SGD())
    with pytest.raises(SchemaMismatch, match=r"AdamW cannot update a namespace of schema kind 'sgd', .* are momentum_buffer: "):
        Schema.sgd({"w": (4,)}).check_options(AdamW())
    with pytest.raises(SchemaMismatch, match=r"Adagrad cannot update a namespace of schema kind 'param', .* are none: "):
        Schema.param({"w": ((4,), "uint8")}).check_options(Adagrad())


# --- param


def test_a_param_schema_stores_its_one_part_in_the_given_dtypes() -> None:
    schema = Schema.param({"codes": ((16,), "uint8"), "scale": ((4,), "float16")})
    assert [(field.name, field.dtype, field.length_bytes) for field in schema.stored.fields] == [
        ("codes", "uint8", 16), ("scale", "float16", 8),
    ]  # fmt: skip
    assert schema.stored is schema.part("param")
    assert not schema.is_trainable
    assert (schema.gradient_dtype, schema.parameter_elements) == ("", 20)


# --- layout


@given(schemas())
def test_fields_lie_on_pages_one_after_the_other_and_fill_the_image(schema: Schema) -> None:
    for part in schema.parts:
        end = part.header_bytes
        for field in part.fields:
            assert field.offset_bytes == round_up(end, PAGE_BYTES)
            end = field.offset_bytes + field.length_bytes
        assert part.image_bytes == round_up(end, PAGE_BYTES)


@given(schemas())
def test_chunks_cover_every_byte_of_every_field_once_and_the_table_fits_the_header(schema: Schema) -> None:
    part = schema.stored
    chunks = part.chunks()
    for field in part.fields:
        own = [c for c in chunks if field.offset_bytes <= c.offset_bytes < field.offset_bytes + field.length_bytes]
        assert sum(chunk.length_bytes for chunk in own) == field.length_bytes
        assert [c.offset_bytes for c in own] == list(
            range(field.offset_bytes, field.offset_bytes + field.length_bytes, CHUNK_BYTES)
        )
    assert HEADER_FIXED_BYTES + 8 * len(chunks) <= part.header_bytes
    assert part.header_bytes % PAGE_BYTES == 0


def test_chunks_restart_at_each_field() -> None:
    part = Schema.param({"a": ((CHUNK_BYTES + 1,), "uint8"), "b": ((3,), "uint8")}).stored
    assert [chunk.length_bytes for chunk in part.chunks()] == [CHUNK_BYTES, 1, 3]


def test_a_record_of_many_gigabytes_has_a_longer_header() -> None:
    part = Schema.param({"w": ((8 << 30,), "uint8")}).stored
    assert part.header_bytes == round_up(HEADER_FIXED_BYTES + 8 * 8192, PAGE_BYTES)
    assert part.image_bytes == part.header_bytes + (8 << 30)


@given(schemas())
def test_upload_ranges_hold_their_fields_without_overlap(schema: Schema) -> None:
    ranges = [(schema.initial_fields(), schema.initial_bytes)]
    if schema.is_trainable:
        ranges.append((schema.gradient_fields(), schema.gradient_bytes))
    for fields, length_bytes in ranges:
        ends = [0, *(field.offset_bytes + field.length_bytes for field in fields)]
        assert all(field.offset_bytes >= end for field, end in zip(fields, ends, strict=False))
        assert ends[-1] <= length_bytes


# --- descriptions


@given(schemas())
def test_a_schema_comes_back_from_its_description(schema: Schema) -> None:
    assert Schema.from_description(schema.describe()) == schema


def test_what_has_its_default_is_not_in_a_description() -> None:
    """Catalogs of an earlier version hold such descriptions, and `create_namespace` compares what they describe."""
    fields = [["w", [4], "bfloat16"]]
    assert Schema.adamw({"w": (4,)}).describe() == {"kind": "adamw", "fields": fields, "gradient_dtype": "bfloat16"}
    assert Schema.adamw({"w": (4,)}, updates="exact").describe()["updates"] == "exact"
    assert Schema.adamw({"w": (4,)}, updates="exact") != Schema.adamw({"w": (4,)})


def test_an_unknown_rule_of_updates_is_refused() -> None:
    with pytest.raises(SchemaMismatch, match="updates='lazy'"):
        Schema.adamw({"w": (4,)}, updates="lazy")


@pytest.mark.parametrize(
    "description",
    [
        {},
        {"kind": "param"},
        {"kind": "adam", "fields": [], "gradient_dtype": ""},
        {"kind": ["sgd"], "fields": [], "gradient_dtype": ""},
        {"kind": "sgd", "fields": [], "gradient_dtype": ""},
        {"kind": "sgd", "fields": [["w", [4], "float32"]], "gradient_dtype": "float32", "state_dtype": "int8"},
        {"kind": "sgd", "fields": [["w", [4], "float32"]], "gradient_dtype": "float32", "state_dtype": None},
        {"kind": "param", "fields": 7},
        {"kind": "param", "fields": []},
        {"kind": "param", "fields": ["abc"]},
        {"kind": "param", "fields": [["w", [1.5], "uint8"]]},
        {"kind": "param", "fields": [["w", ["x"], "uint8"]]},
        {"kind": "param", "fields": [["w", [4], ["uint8"]]]},
        {"kind": "adamw", "fields": [["w", [4], "float32"]]},
        {"kind": "adamw", "fields": [["w", [4], []]], "gradient_dtype": None},
        {"kind": "adamw", "fields": [["w", [4], "float32"]], "gradient_dtype": "float32", "updates": 7},
        {"kind": "adamw", "fields": [["v", [4], "float32"], ["w", [4], "float16"]], "gradient_dtype": None},
    ],
)
def test_what_is_no_description_is_refused(description: dict[str, object]) -> None:
    with pytest.raises(SchemaMismatch):
        Schema.from_description(description)


# --- refusals


@pytest.mark.parametrize("name", ["", "a/b", "x" * 65, "a\nb"])
def test_a_bad_field_name_is_refused(name: str) -> None:
    with pytest.raises(SchemaMismatch, match="field name"):
        Schema.adamw({name: (4,)})


@pytest.mark.parametrize("shape", [(), (0,), (4, -1), (1,) * (RANK_MAX + 1), (2.5, 2), ("4",)])
def test_a_bad_shape_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(SchemaMismatch, match="field 'w' has shape"):
        Schema.adamw({"w": shape})


@pytest.mark.parametrize("count", [0, FIELDS_MAX + 1])
def test_no_fields_and_too_many_are_refused(count: int) -> None:
    with pytest.raises(SchemaMismatch, match=f"{count} fields"):
        Schema.adamw({f"w{number}": (4,) for number in range(count)})


def test_an_unknown_part_or_field_is_named_with_those_there_are() -> None:
    schema = Schema.adamw({"w": (4,)})
    with pytest.raises(SchemaMismatch, match="no part 'grad'; it has optim, param"):
        schema.part("grad")
    part: Part = schema.part("param")
    assert part.field("w").shape == (4,)
    with pytest.raises(SchemaMismatch, match="no field 'v'; it has w"):
        part.field("v")
