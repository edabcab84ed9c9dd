"""How much the records of a namespace are to be used, as callers say it: a recorded trace, its file, or numbers."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from paramstore.core.arguments import mapping, path
from paramstore.core.heat import heat_of, pack_heat
from paramstore.core.key import ExpertKey, KeySpace
from paramstore.core.trace import Trace, unpack_trace
from paramstore.errors import ConfigError
from paramstore_client.handle.base import plain_keys

Heat = Trace | str | os.PathLike[str] | Mapping[ExpertKey, float]
"""A routing trace, the path of its file, or {key: how much it is used}, where keys that are not named are not used."""


def packed_heat(heat: Heat | None, keys: KeySpace, *, namespace: str) -> bytes:
    """Returns the heat as it is sent; empty where nobody knows. Raises ConfigError for a file that is no trace, a trace of a model
    with other experts and numbers that are none; UnknownKey."""
    if heat is None:
        return b""
    if isinstance(heat, str | os.PathLike):
        heat = read_trace(heat)
    if isinstance(heat, Trace):
        heat = heat_of(heat, keys, namespace=namespace)
    numbers = mapping("heat", heat, "a Trace, the path of its file, or {key: number}")
    return pack_heat(dict(zip(plain_keys(list(numbers)), numbers.values(), strict=True)), keys, namespace=namespace)


def read_trace(file: str | os.PathLike[str]) -> Trace:
    """Reads a file that a `TraceRecorder` has saved. Raises ConfigError that names it."""
    place = Path(path("heat", file))
    try:
        return unpack_trace(place.read_bytes())
    except (OSError, ConfigError) as error:
        raise ConfigError(f"heat {str(place)!r}: {error}") from error
