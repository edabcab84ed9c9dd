"""Waits that last as long as something moves."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest

from paramstore.engine.runner import Runner
from paramstore.engine.waiting import until_woken
from paramstore.errors import WaitTimeout
from paramstore_testkit.stores.small_store import run


class Moving:
    """Stands in for a runner that, at the n-th look, has finished so many bursts. At the last look `future` is woken."""

    def __init__(self, counts: list[int], future: asyncio.Future[None] | None = None) -> None:
        self.counts = counts
        self.future = future

    @property
    def finished(self) -> int:
        if len(self.counts) > 1:
            return self.counts.pop(0)
        if self.future is not None and not self.future.done():
            self.future.set_result(None)
        return self.counts[0]


def test_who_is_woken_already_does_not_wait() -> None:
    async def scenario() -> None:
        future = asyncio.get_running_loop().create_future()
        future.set_result(None)
        await until_woken(future, cast("Runner", Moving([0])), stall_s=0, what="x")

    run(scenario())


def test_a_wait_lasts_as_long_as_something_moves() -> None:
    async def scenario() -> None:
        future = asyncio.get_running_loop().create_future()
        moving = Moving([0, 1, 1, 2, 2, 3, 3], future)
        await until_woken(future, cast("Runner", moving), stall_s=0, what="x")
        assert moving.counts == [3]

    run(scenario())


def test_a_wait_ends_when_nothing_has_moved_for_the_time() -> None:
    async def scenario() -> None:
        future = asyncio.get_running_loop().create_future()
        with pytest.raises(WaitTimeout, match=r"the commit under way: nothing in the store has moved for 0 s"):
            await until_woken(future, cast("Runner", Moving([0, 1, 1, 1])), stall_s=0, what="the commit under way")
        assert not future.done()

    run(scenario())
