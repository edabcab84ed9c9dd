"""Streams run in every order that is legal, and in none that is not."""

from __future__ import annotations

from random import Random

import pytest

from paramstore_testkit.streams.world import Event, Stream, StreamWorld


class Noted:
    """A world whose work only notes that it ran."""

    def __init__(self, seed: int, *, is_lazy: bool = False) -> None:
        self.world = StreamWorld(seed, is_lazy=is_lazy)
        self.streams = [self.world.current, Stream(self.world), Stream(self.world)]
        self.ran: list[str] = []

    def give(self, stream: int, name: str) -> None:
        self.world.give(self.streams[stream], lambda: self.ran.append(name))

    def record(self, stream: int) -> Event:
        event = Event(self.world)
        event.record(self.streams[stream])
        return event


def test_two_streams_run_in_either_order() -> None:
    orders = set()
    for seed in range(20):
        noted = Noted(seed)
        noted.give(0, "a")
        noted.give(1, "b")
        noted.world.finish()
        orders.add("".join(noted.ran))
    assert orders == {"ab", "ba"}


@pytest.mark.parametrize("seed", range(20))
def test_work_runs_in_the_order_of_its_stream_and_after_what_it_waits_for(seed: int) -> None:
    noted, random, before = Noted(seed), Random(seed), dict[str, list[str]]()
    given: list[list[str]] = [[], [], []]
    events: list[tuple[Event, list[str]]] = []
    for number in range(60):
        stream = random.randrange(3)
        if events and random.random() < 0.3:
            event, recorded = random.choice(events)
            noted.streams[stream].wait_event(event)
            given[stream] += recorded
        before[str(number)] = list(given[stream])
        noted.give(stream, str(number))
        given[stream].append(str(number))
        events.append((noted.record(stream), list(given[stream])))
    noted.world.finish()
    places = {name: place for place, name in enumerate(noted.ran)}
    assert len(places) == 60, f"seed {seed}"
    early = [(name, other) for name, others in before.items() for other in others if places[other] > places[name]]
    assert early == [], f"seed {seed}"


def test_lazy_world_runs_only_what_somebody_waits_for() -> None:
    noted = Noted(0, is_lazy=True)
    noted.give(1, "copy")
    event = noted.record(1)
    noted.give(1, "later")
    noted.streams[0].wait_event(event)
    noted.give(0, "kernel")
    assert not event.query()
    noted.record(0).synchronize()
    assert noted.ran == ["copy", "kernel"]
    assert event.query()


def test_wait_is_for_what_an_event_had_recorded_by_then() -> None:
    noted = Noted(0, is_lazy=True)
    event = Event(noted.world)
    noted.streams[0].wait_event(event)
    assert event.query(), "an event that recorded nothing is reached"
    noted.give(1, "first")
    event.record(noted.streams[1])
    noted.streams[0].wait_event(event)
    noted.give(1, "second")
    event.record(noted.streams[1])
    noted.give(0, "kernel")
    noted.streams[0].synchronize()
    assert noted.ran == ["first", "kernel"]
