"""Shared by tests of the scrubber: a scrub of all, records that are too large for its buffer, damage at a place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paramstore.core.location import Located
from paramstore.core.schema import Schema
from paramstore.engine.tables.namespace import View
from paramstore_testkit.disks.machine import Machine
from paramstore_testkit.stores.small_store import SCHEMA

RECORD_BYTES = SCHEMA.record_bytes
LARGE = Schema.adamw({"w": (1024, 512)}, param_dtype="float32")
"""Schema of records of 6 MiB: more than the buffer holds."""
KEY, OTHER = (0, 1), (0, 2)
Result = dict[str, Any]


async def verify(machine: Machine, *, namespace: str | None = None, keys: Sequence[Any] | None = None) -> Result:
    scrubber = machine.service.scrubber
    return await scrubber.wait(scrubber.start(namespace, keys, None))


def located_at(view: View, key: tuple[int, int], step: int) -> Located:
    located = view.namespace.steps.ledger.at(key, step)
    assert located is not None
    return located


def damage(machine: Machine, located: Located, offset_bytes: int) -> None:
    """Flips a bit at this offset of the record."""
    machine.disks[located.extent.volume].corrupt(located.extent.offset_bytes + offset_bytes)
