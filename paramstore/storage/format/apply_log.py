"""Packs an apply log into the bytes that a step's catalog row and commit note hold; `docs/format.md` draws it.

msgpack: [first apply, count, {column: [count, value, count, value, ...]}], each column as runs of equal values. The columns are
`epoch`, `kind` (the update rule) and the rule's options under their own names. An empty log has no bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import groupby
from typing import Any

import msgspec

from paramstore.core.apply_log import ApplyLog, LoggedApply
from paramstore.core.optimizers import describe, options_from_description
from paramstore.errors import CorruptCatalog, ParamStoreError

EPOCH = "epoch"

_Packed = tuple[int, int, dict[str, list[Any]]]
_decoder = msgspec.msgpack.Decoder(_Packed)


def pack_log(log: ApplyLog) -> bytes:
    """Packs `log`; `unpack_log` makes an equal log of the bytes, every number bit for bit."""
    if not log.entries:
        return b""
    rows = [_row(entry) for entry in log.entries]
    columns = {name: _runs([row[name] for row in rows]) for name in rows[0]}
    return msgspec.msgpack.encode((log.first, len(rows), columns))


def _row(entry: LoggedApply) -> dict[str, object]:
    return {EPOCH: entry.epoch, **describe(entry.options)}


def _runs(values: Sequence[object]) -> list[object]:
    """Encodes values as runs of equal ones: equal in bytes, not by `==`, since -0.0 is not 0.0 and 1 is not 1.0."""
    runs: list[object] = []
    for _, same in groupby(values, key=msgspec.msgpack.encode):
        first, *others = same
        runs += [1 + len(others), first]
    return runs


@lru_cache(maxsize=256)
def unpack_log(data: bytes) -> ApplyLog:
    """Unpacks what `pack_log` packed. Raises CorruptCatalog if `data` is no log."""
    if not data:
        return ApplyLog()
    try:
        first, count, columns = _decoder.decode(data)
        rows = _rows(count, columns)
        entries = tuple(LoggedApply(row.pop(EPOCH), options_from_description(row)) for row in rows)
    except (msgspec.DecodeError, KeyError, TypeError, ValueError, ParamStoreError) as error:
        raise CorruptCatalog(f"an apply log of {len(data)} bytes cannot be read: {error!r}") from error
    return ApplyLog(first, entries)


def _rows(count: int, columns: dict[str, list[Any]]) -> list[dict[str, Any]]:
    """Expands the columns into rows. (Any: values are of any type here; the options check theirs.)"""
    rows: list[dict[str, Any]] = [{} for _ in range(count)]
    for name, runs in columns.items():
        values = [value for length, value in zip(runs[::2], runs[1::2], strict=True) for _ in range(length)]
        for row, value in zip(rows, values, strict=True):
            row[name] = value
    return rows
