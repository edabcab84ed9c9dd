"""An initialization that stops half-way: some keys have values, some of them in a draft. For tests of those who find it."""

from __future__ import annotations

from collections.abc import Iterable

from paramstore.core.key import ExpertKey
from paramstore.engine.store import Store
from paramstore.engine.tables.namespace import View
from paramstore_testkit.oracles.images import filled_values, initial_of
from paramstore_testkit.stores.small_store import EXPERTS, SCHEMA

SOURCE = b"where the values come from"


async def opened(store: Store, *, is_resumed: bool = True) -> tuple[View, list[ExpertKey], bytes | None]:
    """Opens the writer of `moe`, new or found, in an initialization; gives it, the keys with values, and the draft's `extra`."""
    view = await store.admission.create("moe", SCHEMA.describe(), layers=[0], experts=EXPERTS, host_bytes=None)
    begun = await store.initializer.begin(view, is_resumed=is_resumed)
    present, extra = begun["present"], begun["extra"]
    assert isinstance(present, bytes)
    assert extra is None or isinstance(extra, bytes)
    bits = int.from_bytes(present, "little")
    return view, [key for number, key in enumerate(view.namespace.keys) if bits >> number & 1], extra


async def put(store: Store, view: View, keys: Iterable[ExpertKey]) -> None:
    """Gives each of `keys` its value: the number of its expert."""
    for key in keys:
        await store.initializer.put(view, key, initial_of(SCHEMA, filled_values(SCHEMA, key[1])))


async def drafted(store: Store, experts: Iterable[int] = (0, 2), *, step_by_step: bool = False) -> View:
    """Makes a namespace whose draft has these experts. step_by_step: saves after each of them."""
    view, _, _ = await opened(store)
    for expert in experts:
        await put(store, view, [(0, expert)])
        if step_by_step:
            await store.committer.save_draft(view, SOURCE)
    if not step_by_step:
        await store.committer.save_draft(view, SOURCE)
    return view
