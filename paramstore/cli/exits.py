"""The exit code of a command that an error ends."""

from __future__ import annotations

from paramstore.errors import ConfigError, CorruptCatalog, CorruptRecord, ParamStoreError, StoreUnavailable

OK, FAILED, USAGE, UNREACHABLE, CORRUPT = 0, 1, 2, 3, 4
SIGNALLED = 128
"""Base of the exit code of a command that a signal ended: shells show it plus the signal's number."""


def exit_code(error: ParamStoreError | OSError) -> int:
    if isinstance(error, ConfigError):
        return USAGE
    if isinstance(error, StoreUnavailable):
        return UNREACHABLE
    if isinstance(error, CorruptRecord | CorruptCatalog):
        return CORRUPT
    return FAILED
