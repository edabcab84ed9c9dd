"""Sizes as people write and read them: `64GiB` is a number of bytes."""

from __future__ import annotations

import re

from paramstore.errors import ConfigError

SIZE_PATTERN = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)")
SIZE_UNITS = {
    "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40,
    "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40,
}  # fmt: skip
"""Units of sizes. A single letter is binary, as in docker and systemd; drives are sold in decimal units. Case does not matter."""
UNIT_BYTES = {"": 1, **{unit.lower(): unit_bytes for unit, unit_bytes in SIZE_UNITS.items()}}
BARE_BYTES_MIN = 4096
"""For a smaller number without a unit, in text, the unit was most likely forgotten."""


def parse_size(text: object) -> int:
    """Returns the bytes of a size such as `64GiB`, `64g`, `1.5MB` or a plain number. Raises ConfigError."""
    if isinstance(text, int):
        return text
    match = SIZE_PATTERN.fullmatch(text.strip()) if isinstance(text, str) else None
    if match is None or match[2].lower() not in UNIT_BYTES:
        raise ConfigError(f"size {text!r}: write a number and one of {', '.join(SIZE_UNITS)}, as in 64GiB")
    whole, _, part = match[1].partition(".")
    size_bytes: int = int(whole + part) * UNIT_BYTES[match[2].lower()] // 10 ** len(part)
    if not match[2] and 0 < size_bytes < BARE_BYTES_MIN:
        raise ConfigError(f"size {text!r} has no unit: did you mean {match[1]}GiB? Bytes are written {match[1]}B")
    return size_bytes


def format_size(size_bytes: int) -> str:
    """Writes `size_bytes` for people, in the largest binary unit that keeps the number at or above 1."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if size_bytes >= SIZE_UNITS[unit]:
            return f"{size_bytes / SIZE_UNITS[unit]:.4g} {unit}"
    return f"{size_bytes} B"
