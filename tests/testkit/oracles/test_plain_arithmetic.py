"""Arithmetic without torch: the layouts are those of the real optimizer, the numbers those of its docstring."""

from __future__ import annotations

import subprocess
import sys

import numpy
import pytest

from paramstore.core.optimizers import AdamW
from paramstore.core.schema import Field, Schema
from paramstore.optim import cast
from paramstore.optim.gradients import square_sum
from paramstore.optim.initial import fill_initial
from paramstore_testkit.oracles import plain_arithmetic

SCHEMA = Schema.adamw({"w": (3, 5), "b": (7,)}, param_dtype="float32")
OPTIONS = AdamW(lr=0.5)


def buffer(length_bytes: int) -> memoryview:
    return memoryview(bytearray(length_bytes))


def filled(length_bytes: int, fields: tuple[Field, ...]) -> memoryview:
    """Every field holds 0, 1, 2, ... in its place."""
    image = buffer(length_bytes)
    for field in fields:
        values(image, field)[:] = numpy.arange(field.elements)
    return image


def values(image: memoryview, field: Field) -> plain_arithmetic.Array:
    return numpy.frombuffer(image, dtype=numpy.float32, count=field.elements, offset=field.offset_bytes)


def test_initial_values_lie_where_the_real_optimizer_puts_them() -> None:
    initial = filled(SCHEMA.initial_bytes, SCHEMA.initial_fields())
    plain, real = buffer(SCHEMA.record_bytes), buffer(SCHEMA.record_bytes)
    plain_arithmetic.fill_initial(SCHEMA, initial, plain)
    fill_initial(SCHEMA, initial, real)
    assert plain == real


def test_an_update_does_what_it_says_and_makes_param() -> None:
    image, param = buffer(SCHEMA.record_bytes), buffer(SCHEMA.part("param").image_bytes)
    gradient = filled(SCHEMA.gradient_bytes, SCHEMA.gradient_fields())
    for step in (1, 2):
        plain_arithmetic.update(SCHEMA, image, [gradient], options=OPTIONS, optimizer_step=step, grad_scale=2.0, param=param)
    for number, field in enumerate(SCHEMA.gradient_fields()):
        expected = numpy.arange(field.elements)
        master, exp_avg, exp_avg_sq = (values(image, SCHEMA.stored.fields[number + 2 * part]) for part in range(3))
        assert (master == -2 * expected).all()
        assert (exp_avg == 4 * expected).all()
        assert (exp_avg_sq == 2).all()
        assert (values(param, SCHEMA.part("param").fields[number]) == master).all()


def test_spans_that_cover_everything_give_what_one_call_gives() -> None:
    gradient = filled(SCHEMA.gradient_bytes, SCHEMA.gradient_fields())
    whole, parts = buffer(SCHEMA.record_bytes), buffer(SCHEMA.record_bytes)
    for image, spans in ((whole, [None]), (parts, [[(0, 0, 8)], [(0, 8, 15), (1, 0, 7)]])):
        for some in spans:
            plain_arithmetic.update(
                SCHEMA, image, [gradient], options=OPTIONS, optimizer_step=1, grad_scale=1.0, param=None, spans=some
            )
    assert whole == parts


def test_a_materialised_part_and_a_norm_are_those_of_the_real_optimizer() -> None:
    image = filled(SCHEMA.record_bytes, SCHEMA.stored.fields)
    plain, real = buffer(SCHEMA.part("param").image_bytes), buffer(SCHEMA.part("param").image_bytes)
    plain_arithmetic.materialise(SCHEMA, image, plain)
    cast.materialise(SCHEMA, image, real)
    assert plain == real
    gradient = filled(SCHEMA.gradient_bytes, SCHEMA.gradient_fields())
    for ranks in ([gradient], [gradient] * 3):
        assert plain_arithmetic.square_sum(SCHEMA, ranks) == square_sum(SCHEMA, ranks)


def test_other_dtypes_are_refused() -> None:
    schema = Schema.adamw({"w": (4,)}, param_dtype="bfloat16")
    image, gradient = buffer(schema.record_bytes), buffer(schema.gradient_bytes)
    with pytest.raises(AssertionError, match="bfloat16"):
        plain_arithmetic.update(schema, image, [gradient], options=OPTIONS, optimizer_step=1, grad_scale=1.0, param=None)


def test_once_installed_a_daemon_has_all_it_needs_without_torch() -> None:
    code = """
import sys
from paramstore_testkit.bugs import daemon_bugs
from paramstore_testkit.oracles import plain_arithmetic
from paramstore_testkit.processes import kill_points
plain_arithmetic.install()
from paramstore.engine import admission
from paramstore.engine.records import update
from paramstore.engine.transfers import transfers
from paramstore.daemon import assembly
ours = [update.update, update.square_sum, update.fill_initial, transfers.materialise, admission.load, assembly.load]
assert {function.__module__ for function in ours} == {"paramstore_testkit.oracles.plain_arithmetic"}
assert "torch" not in sys.modules
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
