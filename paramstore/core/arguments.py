"""Checks callers' arguments: each function returns the plain value that is kept or sent, or raises ConfigError.

A message names the argument, the value seen and what is expected. A number is one of Python's or numpy's (`numbers`); flags are
not numbers, nor are tensors and arrays, even those that hold one.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from math import isfinite
from numbers import Integral, Real
from operator import index
from typing import Any, TypeVar

from paramstore.errors import ConfigError

T = TypeVar("T")

WHOLE_MAX = (1 << 63) - 1
"""The largest whole number that a message or a file holds."""
SECONDS_MAX = 1e9
"""The longest wait, 31 years: every timer takes that, and whoever means more means no limit."""
SHOWN_MAX = 80


def wrong(name: str, value: object, expected: str) -> ConfigError:
    """Makes the error for an argument `name` that is `value`."""
    shown = repr(value)
    return ConfigError(f"{name}={shown if len(shown) <= SHOWN_MAX else shown[:SHOWN_MAX] + '...'}: give {expected}")


def instance(name: str, value: object, kind: type[T], expected: str) -> T:
    if not isinstance(value, kind):
        raise wrong(name, value, expected)
    return value


def whole_number(name: str, value: object, *, least: int = 0, most: int = WHOLE_MAX) -> int:
    """Returns a plain int for an integer of any type, from `least` to `most`."""
    number = integer(value)
    if number is None or not least <= number <= most:
        raise wrong(name, value, f"a whole number from {least}{'' if most == WHOLE_MAX else f' to {most}'}")
    return number


def counts(kind: type) -> bool:
    """Whether values of a type are integers: Python's and numpy's are, flags are not."""
    return issubclass(kind, Integral) and not issubclass(kind, bool)


def integer(value: object) -> int | None:
    """Returns a plain int for an integer of any type and size; None for anything else."""
    if type(value) is int:
        return value
    try:
        return index(value) if counts(type(value)) else None  # type: ignore[arg-type]  # such a type has an index
    except Exception:  # noqa: BLE001 - a type of somebody else's: what it raises says that it is no number
        return None


def listed(name: str, values: object, expected: str) -> list[Any]:
    """Returns the items of an iterable; text is refused."""
    try:
        if not isinstance(values, str | bytes):
            return list(values)  # type: ignore[call-overload, no-any-return]  # what is no list is caught
    except (TypeError, RuntimeError):  # tensors without values in memory raise the latter
        pass
    raise wrong(name, values, expected)


def indices(name: str, values: object) -> tuple[int, ...]:
    """Returns a list of whole numbers as plain ints."""
    return tuple(whole_number(name, value) for value in listed(name, values, "a list of whole numbers"))


def number(name: str, value: object, *, least: float | None = None, expected: str = "a finite number") -> float:
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    try:
        plain = float(value) if is_number else float("nan")  # type: ignore[arg-type]  # a Real has a float
    except Exception:  # noqa: BLE001 - OverflowError of a large int, or what a type of somebody else's raises
        plain = float("nan")
    if not isfinite(plain) or (least is not None and plain < least):
        raise wrong(name, value, expected if least is None else f"{expected} that is at least {least:g}")
    return plain


def seconds(name: str, value: object) -> float:
    """Returns a time to wait, from 0 to SECONDS_MAX."""
    plain = number(name, value, least=0, expected="a number of seconds")
    if plain > SECONDS_MAX:
        raise wrong(name, value, f"at most {SECONDS_MAX:g} seconds")
    return plain


def text(name: str, value: object) -> str:
    try:
        instance(name, value, str, "text").encode()
    except UnicodeEncodeError as error:
        raise wrong(name, value, "text that can be written as UTF-8") from error
    return value  # type: ignore[return-value]  # `instance` has checked the type


def path(name: str, value: object) -> str:
    if not isinstance(value, str | os.PathLike):
        raise wrong(name, value, "a path")
    try:
        if b"\0" not in os.fsencode(value):
            return os.fsdecode(value)
    except UnicodeEncodeError:
        pass
    raise wrong(name, value, "a path that the system can have")


def choice(name: str, value: object, known: Sequence[str]) -> str:
    if not isinstance(value, str) or value not in known:
        raise wrong(name, value, " or ".join(map(repr, known)))
    return value


def flag(name: str, value: object) -> bool:
    return instance(name, value, bool, "True or False")


def data(name: str, value: object) -> bytes:
    """Returns anything that holds bytes as plain bytes."""
    if not isinstance(value, bytes | bytearray | memoryview):
        raise wrong(name, value, "bytes, as text.encode() makes them")
    return bytes(value)


def function(name: str, value: object) -> Callable[..., Any]:
    if not callable(value):
        raise wrong(name, value, "a function")
    return value


def mapping(name: str, value: object, expected: str) -> Mapping[Any, Any]:
    return instance(name, value, Mapping, expected)  # type: ignore[type-abstract]
