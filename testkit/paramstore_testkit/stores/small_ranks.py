"""Several ranks of a small store, in a few calls: they open together, call together, and have gradients of their own.

The loop's time is simulated, so that a deadline passes at once where nothing else can happen.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Mapping
from random import Random
from typing import Any

import torch

from paramstore.core.key import ExpertKey
from paramstore.core.optimizers import AdamW
from paramstore.engine.ranks import Arrival
from paramstore.engine.store import Store
from paramstore.engine.tables.collective import Argument, Call
from paramstore.engine.tables.namespace import View, WriterGroup
from paramstore_testkit.disks.machine import Machine
from paramstore_testkit.oracles.images import gradient_of, split_values
from paramstore_testkit.sim.loop import VirtualLoop
from paramstore_testkit.stores.small_store import OPTIONS, create, read_record

NAME = "moe"


def run_ranks(scenario: Callable[[Store], Coroutine[Any, Any, None]], *, is_new: bool = False, **machine: Any) -> None:
    """Runs a scenario in simulated time, on a store with a namespace committed at step 0 (is_new: without one)."""

    async def main() -> None:
        store = Machine(seed=1, **machine).start()
        if not is_new:
            store.close_view(await create(store))
        await scenario(store)

    loop = VirtualLoop(Random(1), shuffles=False)
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(main())


def arrive(
    store: Store, rank: int, size: int, *, group: str = "g", at: int | None = None, name: str = NAME
) -> asyncio.Future[dict[int, View]]:
    """Lets rank `rank` of `size` come to open the namespace."""

    def open_first(formed: WriterGroup) -> Coroutine[Any, Any, View]:
        return store.admission.open(name, mode="write", at=at, host_bytes=None, group=formed)

    call = Call("open_namespace", (Argument("at", at), Argument("world_size", size)))
    return store.ranks.open(Arrival(name, group, rank, size), call, open_first)


async def open_ranks(store: Store, size: int, *, group: str = "g", at: int | None = None, name: str = NAME) -> list[View]:
    """Opens the namespace for all ranks together."""
    arrivals = [arrive(store, rank, size, group=group, at=at, name=name) for rank in range(size)]
    return [(await arrival)[rank] for rank, arrival in enumerate(arrivals)]


def call(store: Store, view: View, name: str, begin: Callable[[View], object], **arguments: object) -> asyncio.Future[Any]:
    """Makes one rank's collective call."""
    return store.ranks.call(view, Call(name, tuple(Argument(*item) for item in arguments.items())), begin)


def apply(store: Store, view: View, options: AdamW = OPTIONS) -> asyncio.Future[Any]:
    return call(store, view, "apply", lambda one: store.applies.apply(one, options, 1.0), lr=options.lr)


def norm(store: Store, view: View) -> asyncio.Future[Any]:
    return call(store, view, "gradient_norm", store.applies.norm)


def commit(store: Store, view: View, step: int) -> asyncio.Future[Any]:
    return call(store, view, "commit", lambda one: store.committer.commit(one, step, b""), step=step)


def rollback(store: Store, view: View, step: int) -> asyncio.Future[Any]:
    return call(store, view, "rollback", lambda one: store.rollback(one, step), step=step)


async def outcomes(futures: Iterable[asyncio.Future[Any]]) -> list[Any]:
    """Awaits all; gives each result, or the error of a call that fails."""
    return await asyncio.gather(*futures, return_exceptions=True)


def push_values(store: Store, view: View, gradients: Mapping[ExpertKey, torch.Tensor]) -> None:
    """Pushes one rank's gradients: key -> all elements of all fields, flat and in order."""
    schema = view.namespace.schema
    store.applies.push(view, [(key, gradient_of(schema, split_values(schema, values)), 0) for key, values in gradients.items()])


async def record(store: Store, view: View, key: ExpertKey) -> torch.Tensor:
    """Reads all stored fields of a key as `view` sees them, flat."""
    _, fields = await read_record(store, view, key)
    return torch.cat([value.flatten().float() for value in fields.values()])
