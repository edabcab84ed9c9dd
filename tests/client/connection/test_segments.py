from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Iterator
from itertools import count, takewhile

import pytest
import torch

import paramstore_client as ps
from paramstore.errors import LeaseError, ProtocolError, StoreUnavailable
from paramstore.memory.pages import SEGMENT_ALIGNMENT_BYTES
from paramstore.wire import messages as m
from paramstore_client.connection.segments import Segments
from paramstore_testkit.interrupts import InterruptAtPoint
from paramstore_testkit.wire.fake_daemon import FakeDaemon
from paramstore_testkit.wire.fake_namespace import FakeMemory

LENGTH = SEGMENT_ALIGNMENT_BYTES
KEYS = [(0, 0), (1, 1)]


@pytest.fixture
def memory() -> Iterator[FakeMemory]:
    memory = FakeMemory()
    yield memory
    memory.close()


@pytest.fixture
def segments(memory: FakeMemory) -> Iterator[Segments]:
    """Segments 1 and 2 are mapped."""
    segments = Segments()
    map_new(segments, memory, 1, 2)
    yield segments
    segments.clear()


def sent(memory: FakeMemory) -> int:
    fd = memory.segments[memory.add_shared(LENGTH)].fd
    assert fd is not None
    return fd


def map_new(segments: Segments, memory: FakeMemory, *numbers: int) -> None:
    """Maps new segments of these numbers, in which no lease lies."""
    segments.begin_lease(0, [], [(number, LENGTH) for number in numbers], [sent(memory) for _ in numbers], noted=deque())
    segments.end_lease(0)


def begin(segments: Segments, lease: int, slots: list[tuple[int, int, int, int]]) -> None:
    segments.begin_lease(lease, slots, noted=deque())


def give_up(segments: Segments, numbers: list[int]) -> list[int]:
    """Has the daemon ask these segments back; gives those that are unmapped by now, and have been acknowledged."""
    segments.ask_back(numbers)
    unmapped = segments.unmapped()
    segments.acknowledged(unmapped)
    return unmapped


def test_segment_given_up_is_forgotten_at_once_when_no_lease_refers_to_it(segments: Segments) -> None:
    assert give_up(segments, [1]) == [1]
    with pytest.raises(LeaseError):
        segments.leased(1)
    assert segments.leased(2).length_bytes == LENGTH


def test_segment_given_up_is_kept_until_its_last_lease_ends(segments: Segments) -> None:
    begin(segments, 10, [(1, 0, 1, 0)])
    begin(segments, 11, [(1, 4096, 1, 0), (2, 0, 1, 0)])
    assert give_up(segments, [1]) == []
    assert segments.end_lease(10) == []
    assert segments.leased(1).length_bytes == LENGTH
    assert segments.end_lease(11) == [1]


def test_segment_is_acknowledged_only_once_it_is_unmapped(segments: Segments) -> None:
    begin(segments, 10, [(1, 0, 1, 0)])
    tensor = torch.frombuffer(segments.leased(1).buffer, dtype=torch.uint8)
    give_up(segments, [1])
    assert segments.end_lease(10) == []
    del tensor
    begin(segments, 11, [(2, 0, 1, 0)])
    assert segments.end_lease(11) == [1]


def test_whoever_asked_is_told_of_a_segment_once_and_while_it_is_mapped(segments: Segments) -> None:
    told: list[tuple[int, int, bool]] = []
    mapping = segments.leased(1)
    segments.before_unmap(lambda address, length_bytes: told.append((address, length_bytes, mapping.is_mapped)))
    begin(segments, 10, [(1, 0, 1, 0)])
    tensor = torch.frombuffer(mapping.buffer, dtype=torch.uint8)
    give_up(segments, [1])
    assert told == [], "a lease refers to it"
    assert segments.end_lease(10) == [], "a tensor keeps it"
    del tensor
    begin(segments, 11, [(2, 0, 1, 0)])
    assert segments.end_lease(11) == [1]
    assert told == [(mapping.address, LENGTH, True)]


def test_whoever_asked_is_told_of_every_segment_when_the_connection_is_closed(segments: Segments) -> None:
    told: list[int] = []
    segments.before_unmap(lambda address, length_bytes: told.append(address))
    addresses = [segments.leased(segment).address for segment in (1, 2)]
    segments.clear()
    segments.clear()
    assert told == addresses


@pytest.mark.parametrize("other", ["reads", "closes", "ends a lease within the telling"])
def test_memory_stays_mapped_until_whoever_is_being_told_of_it_is_through(segments: Segments, other: str) -> None:
    mappings = [segments.leased(segment) for segment in (1, 2)]
    seen, answers = list[tuple[bool, bool]](), list[list[int]]()

    def look(address: int, length_bytes: int) -> None:
        if not answers:
            answers.append([])
            end = segments.clear if other == "closes" else lambda: answers.append(segments.end_lease(11))
            thread = threading.Thread(target=end)
            if other.startswith("ends"):
                thread.run()
            else:
                thread.start()
                thread.join()
        seen.append((mappings[0].is_mapped, address == mappings[0].address))

    segments.before_unmap(look)
    begin(segments, 10, [(1, 0, 1, 0)])
    begin(segments, 11, [(2, 0, 1, 0)])
    segments.ask_back([1, 2])
    unmapped = segments.end_lease(10)
    assert [first for first in seen if first[1]] == [(True, True)]
    assert len(seen) == 2, "of the other segment too, whose lease has ended meanwhile"
    assert answers in ([[]], [[], []])
    assert unmapped == [1, 2]
    assert [mapping.is_mapped for mapping in mappings] == [False, False]


def told_and_unmapped_in_spite_of(point: int, memory: FakeMemory) -> bool:
    segments, told = Segments(), list[bool]()
    map_new(segments, memory, 1)
    mapping = segments.leased(1)
    begin(segments, 10, [(1, 0, 1, 0)])
    segments.before_unmap(lambda address, length_bytes: told.append(mapping.is_mapped))
    segments.ask_back([1])
    with InterruptAtPoint(point, ("connection/segments.py",)) as interrupt:
        segments.end_lease(10)
    assert segments.end_lease(10) == [1]
    assert (set(told), mapping.is_mapped) == ({True}, False), interrupt.place
    return interrupt.is_raised


def test_an_interrupt_anywhere_keeps_nobody_from_being_told(memory: FakeMemory) -> None:
    assert sum(1 for _ in takewhile(lambda point: told_and_unmapped_in_spite_of(point, memory), count(1))) > 10


def test_whoever_has_ended_his_asking_is_not_told(segments: Segments) -> None:
    told: list[int] = []
    stop = segments.before_unmap(lambda address, length_bytes: told.append(address))
    stop()
    stop()
    segments.clear()
    assert told == []


def test_segment_that_was_never_sent_is_acknowledged_when_it_is_given_up(segments: Segments) -> None:
    begin(segments, 10, [(1, 0, 1, 0)])
    assert give_up(segments, [1, 7]) == [7]
    assert segments.end_lease(10) == [1]


def test_end_of_an_unknown_lease_changes_nothing(segments: Segments) -> None:
    begin(segments, 10, [(1, 0, 1, 0)])
    assert segments.end_lease(99) == []
    assert segments.lease_count == 1


def test_lease_in_a_segment_that_was_never_sent_is_refused(segments: Segments) -> None:
    with pytest.raises(ProtocolError, match="segment 7"):
        begin(segments, 10, [(1, 0, 1, 0), (7, 0, 1, 0)])
    assert segments.lease_count == 0


def test_a_segment_that_is_refused_changes_nothing(segments: Segments, memory: FakeMemory) -> None:
    noted: deque[object] = deque()
    with pytest.raises(ProtocolError, match="sent twice"):
        segments.begin_lease(10, [], [(3, LENGTH), (1, LENGTH)], [sent(memory), sent(memory)], noted=noted)
    assert not noted
    assert segments.lease_count == 0
    with pytest.raises(LeaseError):
        segments.leased(3)


def test_memory_that_others_could_write_is_refused(segments: Segments) -> None:
    fd = os.memfd_create("unsealed")
    os.ftruncate(fd, LENGTH)
    with pytest.raises(ProtocolError, match="seals"):
        segments.begin_lease(10, [], [(3, LENGTH)], [fd], noted=deque())
    os.close(fd)


def test_upload_segment_of_a_closed_store_says_so(segments: Segments) -> None:
    segments.clear()
    with pytest.raises(StoreUnavailable, match="closed"):
        segments.upload(1)


# --- leases that stand


class Keeper:
    """Keeps leases, and counts how it was asked for them."""

    def __init__(self, leases: list[ps.Lease]) -> None:
        self.leases = leases
        self.asked: list[str] = []

    def give_back(self) -> None:
        self.asked.append("give back")
        self._release()

    def let_go(self) -> None:
        self.asked.append("let go")
        self._release()

    def _release(self) -> None:
        for lease in self.leases:
            lease.release()


def test_who_keeps_leases_is_asked_once_where_there_are_no_more(daemon: FakeDaemon, namespace: ps.Namespace) -> None:
    keeper = Keeper([namespace.acquire(KEYS)])
    assert namespace.let_stand(keeper)
    namespace.acquire(KEYS).release()
    assert keeper.asked == []
    daemon.fail(m.Acquire, ps.LeaseError("this handle has 16 of 16"))
    namespace.acquire(KEYS).release()
    assert keeper.asked == ["give back"]
    assert len(daemon.wait_for(m.Release, 3)) == 3
    daemon.fail(m.Acquire, ps.LeaseError("this handle has 16 of 16"))
    with pytest.raises(ps.LeaseError, match="16 of 16"):
        namespace.begin_acquire(KEYS).wait()
    assert keeper.asked == ["give back"], "a ticket's affair is its owner's"


def test_who_keeps_leases_of_another_handle_is_not_asked(daemon: FakeDaemon, store: ps.Store, namespace: ps.Namespace) -> None:
    namespace.commit(1).wait()
    keeper = Keeper([])
    reader = store.open_namespace("moe")
    reader.let_stand(keeper)
    daemon.fail(m.Acquire, ps.LeaseError("16 of 16"))
    with pytest.raises(ps.LeaseError):
        namespace.acquire(KEYS)
    assert keeper.asked == []
    store.close()
    assert keeper.asked == ["let go"]


def test_who_keeps_leases_and_is_gone_is_not_asked(daemon: FakeDaemon, namespace: ps.Namespace) -> None:
    namespace.let_stand(Keeper([]))
    daemon.fail(m.Acquire, ps.LeaseError("16 of 16"))
    with pytest.raises(ps.LeaseError):
        namespace.acquire(KEYS)
    assert len(daemon.requests(m.Acquire)) == 1


def test_nothing_stands_in_debug_mode_or_without_promises(daemon: FakeDaemon, namespace: ps.Namespace) -> None:
    namespace._connection.minor = m.PROMISE_MINOR - 1
    assert not namespace.let_stand(Keeper([]))
    with ps.connect(daemon.path, timeout_s=5.0, debug=True) as store:
        assert not store.open_namespace("moe", "write").let_stand(Keeper([]))
    assert not namespace._connection.segments.keepers()


def test_a_handle_says_whether_it_can_be_used(store: ps.Store, namespace: ps.Namespace) -> None:
    namespace.check_usable()
    namespace.close()
    with pytest.raises(ps.UnknownNamespace):
        namespace.check_usable()


def test_what_stands_is_given_back_before_the_store_is_closed(daemon: FakeDaemon, store: ps.Store, namespace: ps.Namespace) -> None:
    lease = namespace.acquire(KEYS)
    keeper = Keeper([lease])
    namespace.let_stand(keeper)
    store.close()
    assert keeper.asked == ["let go"]
    assert len(daemon.wait_for(m.Release)) == 1


def test_a_close_waits_a_bounded_time_for_a_daemon_that_takes_nothing(
    daemon: FakeDaemon, store: ps.Store, namespace: ps.Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paramstore_client.connection.shared_socket.CLOSE_SENDS_S", 0.01)
    daemon.pause()
    namespace._connection.timeout_s = 0.01
    tickets = (namespace.prefetch([(0, 0)] * 1000) for _ in range(10_000))
    with pytest.raises(ps.WaitTimeout):
        list(tickets)
    store.close()
    assert namespace._connection.is_failed


def test_volumes_are_taken_once_with_descriptors_of_their_own_and_go_at_the_end(segments: Segments) -> None:
    given = os.memfd_create("volume")
    noted: deque[object] = deque()
    segments.adopt_volumes([3], [given], noted=noted)
    os.close(given)
    file = segments.volume(3)
    assert (len(noted), os.fstat(file.fd).st_size) == (1, 0)
    other = os.memfd_create("volume")
    for twice in ([3], [4, 4]):
        with pytest.raises(ProtocolError, match="sent twice"):
            segments.adopt_volumes(twice, [other] * len(twice), noted=noted)
    os.close(other)
    with pytest.raises(ProtocolError, match="volume 4, which was never sent"):
        segments.volume(4)
    segments.clear()
    with pytest.raises(ProtocolError):
        segments.volume(3)
    assert os.fstat(file.fd).st_size == 0, "who reads through it keeps it"
