"""A store with a step that is prepared and not committed."""

from __future__ import annotations

from paramstore.engine.namespace import View
from paramstore.engine.store import Store
from paramstore.testing.machine import Machine
from paramstore.testing.small_store import create, train


async def prepared(machine: Machine, *, steps: int = 1) -> tuple[Store, View]:
    """Committed at 0 to `steps`, and the next step prepared; every record has the version of its step."""
    store, view = await committed(machine, steps)
    await train(store, view)
    await store.prepare(view, steps + 1, b"extra of %d" % (steps + 1))
    return store, view


async def restarted(machine: Machine) -> Store:
    await machine.crash()
    return machine.start()


async def committed(machine: Machine, steps: int) -> tuple[Store, View]:
    """Committed at 0 to `steps`; every record has the version of its step."""
    store = machine.start()
    view = await create(store)
    for step in range(1, steps + 1):
        await train(store, view)
        await store.commit(view, step, b"extra of %d" % step)
    return store, view
