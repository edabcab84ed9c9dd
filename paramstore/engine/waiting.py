"""Waits inside the daemon that last as long as something moves.

A commit of a large model takes as long as its bytes take, and so does whatever waits behind it: a fixed bound would break a healthy
namespace. These waits fail when no worker of the store has finished anything for `stall_s`: a device hangs, or there is a bug.
"""

from __future__ import annotations

import asyncio

from paramstore.engine.runner import Runner
from paramstore.errors import WaitTimeout


async def until_woken(future: asyncio.Future[None], runner: Runner, *, stall_s: float, what: str) -> None:
    """Waits until `future` is done. Raises WaitTimeout, saying `what` was waited for; the future is left as it is."""
    while not future.done():
        finished = runner.finished
        await asyncio.wait([future], timeout=stall_s)
        if not future.done() and runner.finished == finished:
            raise WaitTimeout(f"{what}: nothing in the store has moved for {stall_s} s")
