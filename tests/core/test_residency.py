"""Both residency tables, for every pair of state and event."""

from __future__ import annotations

import itertools

import pytest

from paramstore.core.residency import (
    COPY_TABLE,
    EVICTABLE,
    MAY_MATERIALISE,
    WORKING_TABLE,
    Copy,
    CopyEvent,
    IllegalTransition,
    Working,
    WorkingEvent,
    next_copy,
    next_working,
)

WORKING = {
    "absent": {"load": "loading", "fill": "updating"},
    "loading": {"loaded": "clean", "load_failed": "absent", "discard": "absent"},
    "clean": {"update": "updating", "evict": "absent", "discard": "absent"},
    "updating": {"updated": "dirty", "update_failed": "absent", "discard": "absent"},
    "dirty": {"update": "updating", "write": "writing", "discard": "absent"},
    "writing": {"written": "clean", "write_failed": "dirty", "discard": "absent"},
}
COPY = {
    "absent": {"load": "loading"},
    "loading": {"loaded": "ready", "load_failed": "absent", "retire": "retired"},
    "ready": {"evict": "absent", "retire": "retired"},
    "retired": {"loaded": "retired", "load_failed": "absent", "free": "absent"},
}


@pytest.mark.parametrize(("state", "event"), list(itertools.product(Working, WorkingEvent)))
def test_every_event_of_a_working_copy_leads_where_the_table_says_or_is_refused(state: Working, event: WorkingEvent) -> None:
    after = WORKING[state].get(event)
    before = dict(WORKING_TABLE)
    if after is None:
        with pytest.raises(IllegalTransition, match=f"working copy in state {state} got {event}"):
            next_working(state, event)
    else:
        assert next_working(state, event) is Working(after)
    assert before == WORKING_TABLE


@pytest.mark.parametrize(("state", "event"), list(itertools.product(Copy, CopyEvent)))
def test_every_event_of_a_param_copy_leads_where_the_table_says_or_is_refused(state: Copy, event: CopyEvent) -> None:
    after = COPY[state].get(event)
    before = dict(COPY_TABLE)
    if after is None:
        with pytest.raises(IllegalTransition, match=f"param copy in state {state} got {event}"):
            next_copy(state, event)
    else:
        assert next_copy(state, event) is Copy(after)
    assert before == COPY_TABLE


def test_a_refused_event_is_a_bug_and_not_an_error_of_the_world() -> None:
    assert issubclass(IllegalTransition, AssertionError)


def test_an_update_and_a_write_exclude_each_other() -> None:
    assert (Working.UPDATING, WorkingEvent.WRITE) not in WORKING_TABLE
    assert (Working.WRITING, WorkingEvent.UPDATE) not in WORKING_TABLE


def test_nothing_is_materialised_from_bytes_that_are_missing_or_torn() -> None:
    assert set(Working) - MAY_MATERIALISE == {Working.ABSENT, Working.LOADING, Working.UPDATING}


def test_exactly_the_evictable_states_may_be_evicted() -> None:
    assert {state for state, event in WORKING_TABLE if event is WorkingEvent.EVICT} == EVICTABLE


def test_discard_leads_to_absent_from_every_state_that_holds_something() -> None:
    discards = {state: after for (state, event), after in WORKING_TABLE.items() if event is WorkingEvent.DISCARD}
    assert discards == dict.fromkeys(set(Working) - {Working.ABSENT}, Working.ABSENT)


def test_a_dirty_copy_never_becomes_absent_but_by_discard() -> None:
    losing = {event for (state, event), after in WORKING_TABLE.items() if state is Working.DIRTY and after is Working.ABSENT}
    assert losing == {WorkingEvent.DISCARD}
