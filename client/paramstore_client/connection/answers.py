"""The types of the results of a session's requests; every function converts an answer to its value or raises ProtocolError."""

from __future__ import annotations

from functools import partial
from typing import Any, TypeVar

import msgspec

from paramstore.errors import ProtocolError
from paramstore.wire.messages import Done

T = TypeVar("T")

Result = dict[str, Any]
"""A result that goes to the caller as the daemon sent it; `wire.messages` names its items."""


class Welcome(msgspec.Struct, frozen=True):
    """The result of Hello, as far as a client needs it."""

    minor: int = 0
    store_uuid: str = ""
    pid: int = 0
    wait_timeout_s: float | None = None


class Opened(msgspec.Struct, frozen=True):
    """The result of OpenNamespace and CreateNamespace."""

    handle: int
    name: str
    schema: dict[str, Any]
    layers: list[int]
    experts: int
    epoch: int
    lease_slots: int
    wait_timeout_s: float
    committed_step: int | None = None
    gradient_share_bytes: int | None = None
    view_step: int | None = None


class NewStep(msgspec.Struct, frozen=True):
    """The result of AwaitStep."""

    step: int
    sequence: int


class Moved(msgspec.Struct, frozen=True):
    """The result of a Refresh that counts."""

    step: int
    keys: int
    bytes: int


def result_of(answer: object, kind: type[T]) -> T:
    """The result in `answer`, checked to be a `kind`."""
    if not isinstance(answer, Done):
        raise ProtocolError(f"a {type(answer).__name__} came where a Done was due")
    try:
        return msgspec.convert(answer.result, kind)
    except msgspec.ValidationError as error:
        raise ProtocolError(f"a result is not what the protocol says: {error}") from error


mapping = partial(result_of, kind=Result)
mappings = partial(result_of, kind=list[Result])
number = partial(result_of, kind=int)
real = partial(result_of, kind=float)
numbers = partial(result_of, kind=list[int])
keys = partial(result_of, kind=list[tuple[int, int]])
data = partial(result_of, kind=bytes)


def nothing(answer: object) -> None:
    """Checks that `answer` is a Done; its result is not used."""
    result_of(answer, object)
