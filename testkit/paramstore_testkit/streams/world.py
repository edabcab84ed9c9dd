"""The streams and events of a device that runs what it was given in a seeded order, which is legal and as nasty as may be.

- A stream runs its own work in order; work after a wait runs after what the event had recorded by the time of that wait.
- The host learns that something is done only where it asks (`query`, `synchronize`). Nothing else orders anything: at every call of
  the host, each stream runs on with the chance that its pace says, none, now and then, or all that it can.
- A lazy world runs only what somebody waits for. In it a query is never true by luck, which would order what nothing else orders:
  there one run shows `Races` every missing edge.

`Stream` and `Event` have the names of torch.cuda's, so that code written for those runs on them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import count
from random import Random

from paramstore_testkit.streams.races import Races

PACES = (0.0, 0.0, 0.3, 1.0)
"""Chances of a stream to run its next work at a call of the host."""
NEW_PACES_EVERY = 64
"""Number of calls after which the streams' paces are drawn again."""

Work = Callable[[], object]


class Stream:
    """A queue of work. Owner of what it was given and has not run; `done` counts what it has."""

    def __init__(self, world: StreamWorld) -> None:
        self.number = len(world.streams)
        self.given = 0
        self.done = 0
        self.pace = 0.0
        self.queue: deque[Work | tuple[Stream, int]] = deque()
        """Work, or a wait: a stream, and how much of it must be done."""
        self._world = world
        world.streams.append(self)
        world.races.add_stream(self.number)

    def wait_event(self, event: Event) -> None:
        """Makes what is given from here on run after what the event has recorded by now; an event that recorded nothing holds up
        nobody, as CUDA has it."""
        self._world.races.wait(event.number, self.number)
        if event.at is not None:
            self._world.give(self, event.at)

    def synchronize(self) -> None:
        """Waits on the host until all that was given is done."""
        self._world.host_waits += 1
        self._world.run_until(self, self.given)
        self._world.races.synchronize_stream(self.number)


class Event:
    """A point in a stream's work. at: the stream, and how much of it must be done; None before the first record."""

    def __init__(self, world: StreamWorld) -> None:
        self.number = next(world.event_numbers)
        self.at: tuple[Stream, int] | None = None
        self._world = world
        world.races.add_event(self.number)

    def record(self, stream: Stream) -> None:
        """Takes the end of what the stream was given so far as its point."""
        self.at = (stream, stream.given)
        self._world.races.record(self.number, stream.number)
        self._world.turn()

    def query(self) -> bool:
        """Whether the point is reached; a host that has seen so may go on from it."""
        self._world.turn()
        is_reached = self.at is None or self.at[0].done >= self.at[1]
        if is_reached:
            self._world.races.synchronize_event(self.number)
        return is_reached

    def synchronize(self) -> None:
        """Waits on the host until the point is reached."""
        self._world.host_waits += 1
        if self.at is not None:
            self._world.run_until(*self.at)
        self._world.races.synchronize_event(self.number)


class StreamWorld:
    """A device's streams. Owner of their paces and of the races found. `current` is the stream that is given work; `host_waits`
    counts how often the host waited for a stream or an event, whether or not it had to."""

    def __init__(self, seed: int, *, is_lazy: bool = False) -> None:
        self.seed = seed
        self.races = Races()
        self.host_waits = 0
        self.streams: list[Stream] = []
        self.event_numbers = count()
        self._random = Random(seed)
        self._is_lazy = is_lazy
        self._turns = 0
        self.current = Stream(self)

    def give(self, stream: Stream, work: Work | tuple[Stream, int]) -> None:
        """Puts work, or a wait, at the end of a stream."""
        stream.queue.append(work)
        stream.given += 1
        self.turn()

    def finish(self) -> None:
        """Waits on the host until every stream has run everything."""
        for stream in self.streams:
            stream.synchronize()

    def run_until(self, stream: Stream, count: int) -> None:
        """Runs a stream until `count` of what it was given is done, and of the others what that waits for."""
        while stream.done < count:
            first = stream
            while not _is_ready(first):  # ends: a wait is for what was given before it
                wait = first.queue[0]
                assert isinstance(wait, tuple), "work is always ready"
                first = wait[0]
            _run_next(first)
        self.turn()

    def turn(self) -> None:
        """Lets the streams run on, each as its pace has it."""
        if self._is_lazy:
            return
        if self._turns % NEW_PACES_EVERY == 0:
            for stream in self.streams:
                stream.pace = self._random.choice(PACES)
        self._turns += 1
        for stream in self._random.sample(self.streams, len(self.streams)):
            while stream.queue and _is_ready(stream) and self._random.random() < stream.pace:
                _run_next(stream)


def _is_ready(stream: Stream) -> bool:
    first = stream.queue[0]
    return not isinstance(first, tuple) or first[0].done >= first[1]


def _run_next(stream: Stream) -> None:
    first = stream.queue.popleft()
    if not isinstance(first, tuple):
        first()
    stream.done += 1
