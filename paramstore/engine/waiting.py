"""Waits inside the daemon that last as long as something lands.

A commit of a large model takes as long as its bytes take, and whatever waits behind it too: a fixed bound would break a
namespace that is well. These waits fail when no move of the namespace has landed for `stall_s`: a device hangs, or a bug.
"""

from __future__ import annotations

import asyncio

from paramstore.engine.namespace import NamespaceState
from paramstore.errors import WaitTimeout


async def until_woken(future: asyncio.Future[None], namespace: NamespaceState, *, stall_s: float, what: str) -> None:
    """Returns when `future` is done. Raises WaitTimeout, saying `what` was waited for; the future is left as it is."""
    while not future.done():
        landed = namespace.landed
        await asyncio.wait([future], timeout=stall_s)
        if not future.done() and namespace.landed == landed:
            raise WaitTimeout(f"{what}: nothing of namespace {namespace.name!r} has moved for {stall_s} s")
