"""A client asks its daemon what moved, and gets it with times that are its own clock's."""

from __future__ import annotations

import time

import paramstore_client as ps


def test_a_trace_has_the_loads_of_a_prefetch_between_its_ends(store: ps.Store, writer: ps.Namespace) -> None:
    keys = [(0, 1), (1, 2)]
    writer.evict()
    store.trace_begin()
    began_s = time.monotonic()
    writer.prefetch(keys).wait()
    with writer.acquire([*keys, (1, 3)]):
        pass
    ended_s = time.monotonic()
    trace = store.trace_end()
    rows = {(layer, expert): (kind, namespace, urgency) for kind, namespace, layer, expert, urgency, *_ in trace["transfers"]}
    assert rows[0, 1] == rows[1, 2] == ("load_param", "moe", "prefetch")
    assert rows[1, 3] == ("load_param", "moe", "demand")
    for *_, bytes_moved, submitted_s, started_s, settled_s in trace["transfers"]:
        assert bytes_moved > 0
        assert began_s <= submitted_s <= started_s <= settled_s <= ended_s
    assert trace["dropped"] == 0
    assert began_s <= trace["now_s"] <= time.monotonic()


def test_without_a_beginning_a_trace_is_empty(store: ps.Store) -> None:
    assert store.trace_end()["transfers"] == []
