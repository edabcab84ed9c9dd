"""What callers hand in becomes plain values, or an error that names the argument, the value and what is expected."""

from __future__ import annotations

import math
from collections.abc import Callable
from enum import IntEnum
from numbers import Integral
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch._subclasses import FakeTensorMode

from paramstore.core import arguments
from paramstore.errors import ConfigError

with FakeTensorMode():
    FAKE = torch.tensor(1)
HOLDERS = (FAKE, torch.zeros((), device="meta", dtype=torch.int64), numpy.True_)
"""What raises where it is asked for its number."""
MKLDNN = torch.ones(2).to_mkldnn()
"""What raises where it is asked for its items."""


class Level(IntEnum):
    HIGH = 7


@Integral.register
class Broken:
    """A whole number of somebody else's type, which cannot say which."""

    def __index__(self) -> int:
        raise RuntimeError


@pytest.mark.parametrize(
    ("check", "value", "plain"),
    [
        (arguments.whole_number, numpy.int16(7), 7), (arguments.whole_number, Level.HIGH, 7),
        (arguments.number, numpy.float32(0.5), 0.5), (arguments.number, 3, 3.0), (arguments.number, -0.0, -0.0),
        (arguments.seconds, 0, 0.0), (arguments.indices, numpy.arange(3), (0, 1, 2)), (arguments.indices, range(2), (0, 1)),
        (arguments.data, bytearray(b"ab"), b"ab"), (arguments.data, memoryview(b"ab"), b"ab"), (arguments.text, "ä", "ä"),
        (arguments.path, Path("a"), "a"), (arguments.path, "\udc80", "\udc80"), (arguments.flag, False, False),
    ],
)  # fmt: skip
def test_what_means_a_value_becomes_the_plain_one(check: Callable[..., Any], value: object, plain: object) -> None:
    found = check("it", value)
    assert (type(found), found) == (type(plain), plain)


@pytest.mark.parametrize(
    ("check", "wrong", "expected"),
    [
        (arguments.whole_number, (None, True, 1.0, "1", -1, 1 << 63, torch.ones(2), numpy.ones(1)), "a whole number from 0"),
        (arguments.whole_number, (numpy.array(1), torch.tensor(1), torch.tensor(True), *HOLDERS, Broken()), "a whole number"),
        (arguments.number, (*HOLDERS, Broken()), "a finite number"),
        (arguments.number, (None, True, "1", 1j, torch.tensor(1.0), math.nan, math.inf, 1 << 2000), "a finite number"),
        (arguments.seconds, (None, "1", -1, -0.1, math.nan, math.inf), "a number of seconds"),
        (arguments.seconds, (1e10,), r"at most 1e\+09 seconds"),
        (arguments.indices, (None, 3, "12", [0.5], [True], torch.tensor(1.0), MKLDNN, *([one] for one in HOLDERS)), "whole number"),
        (arguments.text, (None, b"a", 3), "text"), (arguments.text, ("\ud800",), "UTF-8"),
        (arguments.path, (None, b"a", 3), "a path"), (arguments.path, ("\ud800", "a\0b"), "a path that the system can have"),
        (arguments.flag, (None, 0, 1, "yes", numpy.True_), "True or False"),
        (arguments.data, ("json", None, [1], numpy.ones(2)), "bytes"),
        (arguments.function, (None, "f"), "a function"),
    ],
)  # fmt: skip
def test_anything_else_is_refused_by_its_name(check: Callable[..., Any], wrong: tuple[object, ...], expected: str) -> None:
    for value in wrong:
        with pytest.raises(ConfigError, match=rf"(?s)^it=.*: give .*{expected}"):
            check("it", value)


def test_a_choice_is_one_of_those_known() -> None:
    assert arguments.choice("mode", "read", ("read", "write")) == "read"
    for wrong in ("r", None, numpy.array(["read"])):
        with pytest.raises(ConfigError, match="give 'read' or 'write'"):
            arguments.choice("mode", wrong, ("read", "write"))


def test_a_number_may_have_a_least_value() -> None:
    with pytest.raises(ConfigError, match="lr=-1: give a finite number that is at least 0"):
        arguments.number("lr", -1, least=0)
    with pytest.raises(ConfigError, match="slots=9: give a whole number from 1 to 8"):
        arguments.whole_number("slots", 9, least=1, most=8)


def test_a_long_value_is_shown_in_part() -> None:
    with pytest.raises(ConfigError) as refused:
        arguments.text("extra", [0] * 10_000)
    assert len(str(refused.value)) < 150
