"""One small namespace on a simulated machine, in a few calls, for tests of the engine's parts.

Every initial value is the number of its key, every gradient 1, so that the bytes of a record tell its version.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from itertools import count
from random import Random
from typing import Any

from torch import Tensor

from paramstore.config import Retention
from paramstore.core.key import ExpertKey
from paramstore.core.location import Identity
from paramstore.core.optimizers import AdamW
from paramstore.core.schema import Schema
from paramstore.engine.capacity.entitlements import entitled_bytes, slack_bytes
from paramstore.engine.store import Store
from paramstore.engine.tables.arena import Arena
from paramstore.engine.tables.namespace import LeaseRequest, NamespaceState, View
from paramstore.engine.transfers.routes import ImageWrite
from paramstore.engine.transfers.scheduler import Transfer
from paramstore.errors import ParamStoreError
from paramstore.optim.tensors import field_tensor
from paramstore.storage.format.structures import Superblock, extents_start_bytes
from paramstore_testkit.disks.machine import MIB, Machine, PlainSegment
from paramstore_testkit.oracles.experts import Tensors
from paramstore_testkit.oracles.images import filled_values, gradient_of, initial_of, values_in

SCHEMA = Schema.adamw({"w": (3, 5), "v": (7,)}, param_dtype="float32")
EXPERTS = 4
OPTIONS = AdamW(lr=0.5, weight_decay=0.0)
LIMIT_S = 20.0
ONE = 6 * MIB
"""Host memory for exactly one small namespace."""
lease_ids = count(1)
Values = dict[ExpertKey, dict[str, Tensor]]


def run(coroutine: Coroutine[Any, Any, None]) -> None:
    """Runs a scenario; fails if it hangs, or if a callback raises."""
    raised: list[dict[str, Any]] = []

    async def watched() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: raised.append(context))
        await asyncio.wait_for(coroutine, LIMIT_S)

    asyncio.run(watched())
    assert not raised, raised


def with_spare(records: int, *, held_steps: int = 0, namespaces: int = 1, **options: Any) -> Machine:
    """A machine whose volume has what its namespaces are entitled to, and room for so many records more."""
    entitled = entitled_bytes(SCHEMA, EXPERTS, Retention(held_steps=held_steps)) + slack_bytes([SCHEMA], 1)
    size_bytes = extents_start_bytes(Superblock(bytes(16), bytes(16), 0)) + namespaces * entitled + records * SCHEMA.record_bytes
    return Machine(volume_bytes=size_bytes, volume_size_bytes=size_bytes, held_steps=held_steps, **options)


def keys_of(view: View) -> list[ExpertKey]:
    return list(view.namespace.keys)


async def create(
    store: Store, name: str = "moe", *, schema: Schema = SCHEMA, experts: int = EXPERTS, host_bytes: int | None = None,
    step: int | None = 0, layers: Sequence[int] = (0,), values_of: Callable[[ExpertKey], Tensors] | None = None,
) -> View:  # fmt: skip
    """Makes a namespace in which every key has its initial value, committed as `step` unless None; gives its writer."""
    view = await store.admission.create(name, schema.describe(), layers=layers, experts=experts, host_bytes=host_bytes)
    await initialize(store, view, values_of)
    if step is not None:
        await store.committer.commit(view, step, b"")
    return view


async def initialize(store: Store, view: View, values_of: Callable[[ExpertKey], Tensors] | None = None) -> None:
    """Initializes every key. values_of: makes the initial values of a key; None: its number everywhere."""
    schema = view.namespace.schema
    await store.initializer.begin(view)
    for number, key in enumerate(keys_of(view)):
        values = values_of(key) if values_of is not None else filled_values(schema, number)
        await store.initializer.put(view, key, initial_of(schema, values))
    await store.initializer.end(view)


async def reader(store: Store, name: str = "moe", at: int | None = None) -> View:
    return await store.admission.open(name, mode="read", at=at, host_bytes=None)


async def writer(store: Store, name: str = "moe", at: int | None = None) -> View:
    return await store.admission.open(name, mode="write", at=at, host_bytes=None)


async def create_again(store: Store, schema: Schema = SCHEMA, *, layers: Sequence[int] = (0,), experts: int = EXPERTS) -> View:
    return await store.admission.create("moe", schema.describe(), layers=layers, experts=experts, host_bytes=None)


def push(store: Store, view: View, keys: Sequence[ExpertKey]) -> None:
    schema = view.namespace.schema
    memory = gradient_of(schema, filled_values(schema, 1))
    store.applies.push(view, [(key, memory, 0) for key in keys])


async def train(store: Store, view: View, keys: Sequence[ExpertKey] | None = None) -> dict[str, int]:
    """Makes one apply with gradients of `keys` (None: all)."""
    push(store, view, keys_of(view) if keys is None else keys)
    return await store.applies.apply(view, OPTIONS, 1.0)


async def prepared(machine: Machine, *, steps: int = 1) -> tuple[Store, View]:
    """Commits steps 0 to `steps`, and prepares the next; every record has the version of its step."""
    store, view = await committed(machine, steps)
    await train(store, view)
    await store.committer.prepare(view, steps + 1, b"extra of %d" % (steps + 1))
    return store, view


async def restarted(machine: Machine) -> Store:
    await machine.crash()
    return machine.start()


async def committed(machine: Machine, steps: int) -> tuple[Store, View]:
    """Commits steps 0 to `steps`; every record has the version of its step."""
    store = machine.start()
    view = await create(store)
    for step in range(1, steps + 1):
        await train(store, view)
        await store.committer.commit(view, step, b"extra of %d" % step)
    return store, view


async def lease(store: Store, view: View, keys: Sequence[ExpertKey], *, timeout_s: float = 5.0) -> LeaseRequest:
    """Waits for a lease; the caller must end it."""
    request = store.access.acquire(view, next(lease_ids), keys, "param")
    await store.access.wait_lease(request, timeout_s)
    return request


async def leased(store: Store, view: View, keys: Sequence[ExpertKey], *, timeout_s: float = 5.0) -> Values:
    """Reads the `param` values of `keys` as `view` sees them."""
    request = await lease(store, view, keys, timeout_s=timeout_s)
    arena, fields = view.namespace.memory.param, view.namespace.schema.part("param").fields
    assert arena is not None
    values = {copy.key: values_in(arena.view(copy.slot), fields) for copy in request.copies}
    store.access.release(view, request.lease_id)
    return values


async def first_values(store: Store, view: View, keys: Sequence[ExpertKey] | None = None) -> list[float]:
    """Reads the first `param` of each key, as `view` sees it."""
    arena, part = view.namespace.memory.param, view.namespace.schema.part("param")
    assert arena is not None
    values = []
    for key in keys_of(view) if keys is None else keys:
        request = await lease(store, view, [key])
        values.append(field_tensor(arena.view(request.copies[0].slot), part.fields[0])[0].item())
        store.access.release(view, request.lease_id)
    return values


async def read_record(store: Store, view: View, key: ExpertKey) -> tuple[Identity, dict[str, Tensor]]:
    """Reads a record, verified, as `view` sees it; gives its identity and its fields."""
    schema = view.namespace.schema
    target = PlainSegment(schema.record_bytes).view(0, schema.record_bytes)
    return await store.reading.read(view, key, target), values_in(target, schema.stored.fields)


async def versions(store: Store, view: View) -> list[int]:
    """Reads each key's record for `view`; gives the versions."""
    return [(await read_record(store, view, key))[0].version for key in keys_of(view)]


def shrink_arenas(
    namespace: NamespaceState, stolen: dict[Arena, int], random: Random, *, working_least: int, most: int
) -> None:
    """Takes slots away, down to a random number, so that eviction, waiting and streaming happen at this small size.

    stolen: number of slots taken from each arena so far, which grows.
    """
    for arena, least in ((namespace.memory.working, working_least), (namespace.memory.param, 3)):
        arena.planned_slots = random.randint(least, most)
        while arena.slots.free_count and arena.slots.count - stolen.setdefault(arena, 0) > arena.planned_slots:
            arena.slots.take()
            stolen[arena] += 1


async def turns(number: int = 50) -> None:
    """Lets everybody else go on for a while."""
    for _ in range(number):
        await asyncio.sleep(0)


def hold_writes_back(store: Store, *, failing: ExpertKey) -> list[Transfer]:
    """From now on writes of the record `failing` fail, for a reason that fences no volume, and those of others are kept from their
    worker. Returns the list in which these stand."""
    kept: list[Transfer] = []
    submit = store.transfers.runner.submit

    def fail(piece: object) -> None:
        raise ParamStoreError("as planned")

    def hold_back(transfer: Transfer) -> None:
        write = getattr(transfer.run, "__self__", None)
        if not isinstance(write, ImageWrite):
            submit(transfer)
        elif write.header.key == failing:
            transfer.run = fail
            submit(transfer)
        else:
            kept.append(transfer)

    store.transfers.runner.submit = hold_back  # type: ignore[method-assign]
    return kept
