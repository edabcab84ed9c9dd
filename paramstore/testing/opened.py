"""Views of a namespace in one call: for tests of who may open what."""

from __future__ import annotations

from typing import Any

from paramstore.core.schema import Schema
from paramstore.engine.namespace import View
from paramstore.engine.store import Store
from paramstore.testing.small_store import SCHEMA

MIB = 1 << 20
ONE = 6 * MIB
"""Host memory for exactly one small namespace."""


async def reader(store: Store, name: str = "moe", at: int | None = None) -> View:
    return await store.admission.open(name, mode="read", at=at, host_bytes=None)


async def writer(store: Store, name: str = "moe", at: int | None = None) -> View:
    return await store.admission.open(name, mode="write", at=at, host_bytes=None)


async def create_again(store: Store, schema: Schema = SCHEMA, *, layers: Any = (0,), experts: int = 4) -> View:
    return await store.admission.create("moe", schema.describe(), layers=layers, experts=experts, host_bytes=None)
