"""A life that one seed decides: its acts are drawn by their weights, done one after the other, logged and counted.

Whatever goes wrong says which seed it was, and what was done until then.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from contextlib import contextmanager
from random import Random
from typing import Any, TypeVar

T = TypeVar("T")
LIMIT_S = 60.0
"""Longest time of a life: beyond it, something hangs."""
TOLD_ACTS = 200
"""Number of the last acts of which a failure tells."""


class Trial:
    """One seed's life. A subclass does an act in `act`; in `after_act` it checks what must hold, or lets others go on."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.random = Random(seed)
        self.acts: list[str] = []
        """Names of the acts that were begun, in order."""
        self.figures: Counter[str] = Counter()
        """Counts of acts by name, and of whatever else a run must have met to prove anything."""

    def draw(self, weights: Mapping[str, float]) -> str:
        """Draws the name of an act."""
        return self.random.choices(list(weights), list(weights.values()))[0]

    def log(self, name: str) -> None:
        self.acts.append(name)
        self.figures[name] += 1

    async def live_through(self, names: Iterable[str]) -> None:
        """Does these acts. An iterator may draw each when the one before it is over."""
        for name in names:
            self.log(name)
            await self.act(name)
            await self.after_act()

    async def act(self, name: str) -> None:
        raise NotImplementedError

    async def after_act(self) -> None:
        """Does nothing: a life that is watched from outside needs no look of its own."""

    def story(self) -> str:
        """Tells how to repeat the life, and what it did."""
        return f"seed {self.seed}; acts so far: {', '.join(self.acts[-TOLD_ACTS:])}; counts: {dict(self.figures)}"

    def run(self, life: Coroutine[Any, Any, T], *, limit_s: float = LIMIT_S) -> T:
        """Runs the life to its end. Raises TimeoutError if it hangs; whatever it raises comes with the story."""
        with telling(self.story), one_thread():
            return asyncio.run(asyncio.wait_for(life, limit_s))


@contextmanager
def telling(story: Callable[[], str]) -> Iterator[None]:
    """Adds `story`, as it is then, to whatever is raised within the block."""
    try:
        yield
    except BaseException as error:
        error.add_note(story())
        raise


@contextmanager
def one_thread() -> Iterator[None]:
    """Lets torch use one thread: records have a few KiB at most, and more threads would only wait for each other."""
    import torch  # here, since lives with plain arithmetic do without it, and it is slow to import

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
