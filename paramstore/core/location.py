"""Locations of bytes (tiers, extents on volumes), and what identifies the bytes themselves."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple


class Tier(StrEnum):
    """The four places a copy can be in."""

    HBM = "hbm"
    HOST = "host"
    PMEM = "pmem"
    NVME = "nvme"


class Extent(NamedTuple):
    """A byte range of a volume; offset and length are multiples of 4 KiB."""

    volume: int
    offset_bytes: int
    length_bytes: int


class Identity(NamedTuple):
    """The name of a record's bytes: two records of one key with equal identity have equal bytes."""

    epoch: int
    version: int


class Located(NamedTuple):
    """A whole record on a volume: where it lies, which bytes it has, and the checksum of its header."""

    extent: Extent
    identity: Identity
    root: int
