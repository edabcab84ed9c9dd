"""The checker: what nothing orders is told, whichever order it took; what something orders is not."""

from __future__ import annotations

import torch

from paramstore_testkit.streams.races import FOUND_MAX, GRANULE_BYTES, Races, granules, granules_between

COMPUTE, COPY, EVENT = 0, 1, 7
MEMORY = {1, 2}


def races_after_copy() -> Races:
    """A copy into MEMORY on its own stream, with an event behind it."""
    races = Races()
    races.add_stream(COMPUTE)
    races.add_stream(COPY)
    races.add_event(EVENT)
    races.launch(COPY, reads={9}, writes=MEMORY, operation="copy")
    races.record(EVENT, COPY)
    return races


def read(races: Races) -> list[str]:
    races.launch(COMPUTE, reads={2}, writes={5}, operation="kernel")
    return races.found


def test_kernel_that_does_not_wait_for_a_copy_is_found_though_it_touches_a_part() -> None:
    assert read(races_after_copy()) == [f"stream {COMPUTE}: kernel, not after stream {COPY}: copy"]


def test_kernel_that_waits_in_its_stream_or_on_the_host_is_not() -> None:
    in_stream, on_host, all_of_it = races_after_copy(), races_after_copy(), races_after_copy()
    in_stream.wait(EVENT, COMPUTE)
    on_host.synchronize_event(EVENT)
    all_of_it.synchronize_stream(COPY)
    assert [read(races) for races in (in_stream, on_host, all_of_it)] == [[], [], []]


def test_copy_over_what_a_kernel_may_still_read_is_found() -> None:
    races = races_after_copy()
    races.wait(EVENT, COMPUTE)
    read(races)
    races.launch(COPY, reads=set(), writes={2}, operation="next copy")
    assert races.found == [f"stream {COPY}: next copy, not after stream {COMPUTE}: kernel"]


def test_host_that_writes_what_a_copy_reads_must_have_waited() -> None:
    hasty, patient = races_after_copy(), races_after_copy()
    patient.synchronize_event(EVENT)
    for races in (hasty, patient):
        races.touch(reads=set(), writes={9}, operation="fill")
    assert (hasty.found, patient.found) == ([f"host: fill, not after stream {COPY}: copy"], [])


def test_stream_sees_what_the_host_did_before_the_launch() -> None:
    races = races_after_copy()
    races.touch(reads=set(), writes={20}, operation="fill")
    races.launch(COMPUTE, reads={20}, writes=set(), operation="kernel")
    assert races.found == []


def test_memory_that_was_given_back_has_no_past() -> None:
    races = races_after_copy()
    races.forget(MEMORY)
    assert read(races) == []


def test_granules_are_those_from_a_views_first_byte_to_its_last() -> None:
    whole = torch.zeros(4, GRANULE_BYTES, dtype=torch.uint8)
    first = whole.data_ptr() // GRANULE_BYTES
    assert granules([whole[1:3]]) == {first + 1, first + 2}
    assert granules([whole[:, 0]]) == {first, first + 1, first + 2, first + 3}
    assert granules([whole[:0]]) == set()
    assert granules_between(whole.data_ptr() + 1, GRANULE_BYTES) == {first, first + 1}


def test_number_of_races_that_are_told_is_bounded() -> None:
    races = races_after_copy()
    for granule in range(2 * FOUND_MAX):
        races.launch(COPY, reads=set(), writes={granule}, operation="copy")
        races.launch(COMPUTE, reads={granule}, writes=set(), operation="kernel")
    assert len(races.found) == FOUND_MAX
