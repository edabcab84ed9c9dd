"""Which transfer gets the next free worker, in what bursts, and that every piece runs exactly once."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paramstore.engine.tables.requests import Urgency
from paramstore.engine.transfers.scheduler import (
    AHEAD_READ_BYTES,
    BURST_PIECES,
    LIGHT_BURST_BYTES,
    LIGHT_READ_BYTES,
    Burst,
    LaneStats,
    Scheduler,
    Transfer,
)
from paramstore.errors import ParamStoreError, VolumeError

DEMAND, PREFETCH, WRITE_BACK = Urgency.DEMAND, Urgency.PREFETCH, Urgency.WRITE_BACK


def transfer(
    *pieces: object, urgency: Urgency = DEMAND, deadline_s: float | None = None, final: object = None, lane: Hashable = "disk",
    light_bytes: int = 0, is_read: bool = False,
) -> Transfer:
    return Transfer(
        lane=lane, urgency=urgency, run=lambda piece: piece, pieces=deque(pieces), settle=lambda _: None, final=final,
        deadline_s=deadline_s, light_bytes=light_bytes, is_read=is_read,
    )  # fmt: skip


def scheduler(workers: int = 1, **lanes: int) -> Scheduler:
    made = Scheduler()
    for lane, count in {"disk": workers, **lanes}.items():
        made.add_lane(lane, count)
    return made


def finish(made: Scheduler, burst: Burst | None, error: ParamStoreError | None = None) -> list[Transfer]:
    """The burst's worker returns, with an error or what it was given. Gives what is over."""
    assert burst is not None
    return made.finish_burst("disk", burst, [(pieces if error is None else None, error) for _, pieces in burst])


def order_of(made: Scheduler, *transfers: Transfer) -> list[object]:
    """The pieces in the order in which one worker runs them."""
    for one in transfers:
        made.submit(one)
    ran: list[object] = []
    while (started := made.next_burst("disk")) is not None:
        ran.extend(piece for _, pieces in started for piece in pieces)
        finish(made, started)
    return ran


# --- order


def test_demand_goes_before_prefetch_and_prefetch_before_write_back() -> None:
    transfers = [transfer("w", urgency=WRITE_BACK), transfer("p", urgency=PREFETCH), transfer("d", urgency=DEMAND)]
    assert order_of(scheduler(), *transfers) == ["d", "p", "w"]


def test_within_a_class_the_earlier_deadline_goes_first_and_none_at_all_last() -> None:
    transfers = [transfer("never"), transfer("late", deadline_s=9.0), transfer("soon", deadline_s=1.0)]
    assert order_of(scheduler(), *transfers) == ["soon", "late", "never"]


def test_equals_go_in_the_order_they_came() -> None:
    assert order_of(scheduler(), *(transfer(number, deadline_s=1.0) for number in range(5))) == [0, 1, 2, 3, 4]


def test_a_class_outweighs_a_deadline() -> None:
    transfers = [transfer("p", urgency=PREFETCH, deadline_s=0.0), transfer("d", deadline_s=99.0)]
    assert order_of(scheduler(), *transfers) == ["d", "p"]


def test_an_urgent_transfer_waits_for_no_more_than_the_burst_under_way() -> None:
    made = scheduler()
    slow, other = transfer(*range(9), urgency=WRITE_BACK), transfer("other", urgency=WRITE_BACK)
    made.submit(slow)
    made.submit(other)
    first = made.next_burst("disk")
    assert first == [(slow, list(range(BURST_PIECES)))]
    urgent = transfer("urgent")
    made.submit(urgent)
    finish(made, first)
    assert made.next_burst("disk") == [(urgent, ["urgent"])]


def test_lanes_do_not_wait_for_each_other() -> None:
    made = scheduler(1, other=1)
    made.submit(transfer("a"))
    made.submit(transfer("b"))
    third = transfer("c", lane="other", urgency=WRITE_BACK)
    made.submit(third)
    assert made.next_burst("disk") is not None
    assert made.next_burst("disk") is None
    assert made.next_burst("other") == [(third, ["c"])]


def test_bursts_are_handed_over_ahead_of_free_workers_as_far_as_the_lane_allows() -> None:
    made = Scheduler()
    made.add_lane("disk", 1, ahead=1)
    one, two, three = transfer("a"), transfer("b"), transfer("c")
    for each in (one, two, three):
        made.submit(each)
    first = made.next_burst("disk")
    assert first == [(one, ["a"])]
    assert made.next_burst("disk") == [(two, ["b"])]
    assert made.next_burst("disk") is None
    finish(made, first)
    assert made.next_burst("disk") == [(three, ["c"])]


# --- promotion


def test_a_promoted_transfer_takes_its_place_in_its_new_class() -> None:
    made = scheduler()
    first, second = transfer("first", urgency=PREFETCH), transfer("second", urgency=WRITE_BACK)
    made.submit(first)
    made.submit(second)
    made.promote(second, DEMAND)
    assert order_of(made) == ["second", "first"]


def test_a_promoted_transfer_runs_once_though_it_is_queued_anew() -> None:
    made = scheduler()
    one = transfer("piece", urgency=WRITE_BACK)
    made.submit(one)
    for urgency in (PREFETCH, DEMAND, DEMAND):
        made.promote(one, urgency)
    assert made.stats()["disk"].queued == 1
    assert order_of(made) == ["piece"]


def test_a_promotion_never_lowers_a_class() -> None:
    made = scheduler()
    one = transfer("demanded")
    made.submit(one)
    made.promote(one, WRITE_BACK)
    assert order_of(made, transfer("later", urgency=PREFETCH)) == ["demanded", "later"]


def test_a_transfer_promoted_while_its_last_pieces_run_queues_its_final_piece_in_the_new_class() -> None:
    made = scheduler()
    write = transfer("body", urgency=WRITE_BACK, final="header")
    made.submit(write)
    started = made.next_burst("disk")
    made.promote(write, DEMAND)
    made.submit(transfer("prefetch", urgency=PREFETCH))
    finish(made, started)
    assert order_of(made) == ["header", "prefetch"]


def test_a_transfer_promoted_while_its_pieces_run_does_not_start_its_final_piece_beside_them() -> None:
    made = scheduler(2)
    write = transfer("body", urgency=WRITE_BACK, final="header")
    made.submit(write)
    made.next_burst("disk")
    made.promote(write, DEMAND)
    assert made.next_burst("disk") is None


# --- bursts


def test_in_a_queue_a_worker_takes_the_share_that_leaves_the_other_free_workers_theirs() -> None:
    made = scheduler(4)
    one = transfer(*range(6))
    made.submit(one)
    made.submit(transfer("next"))
    sizes = []
    while (started := made.next_burst("disk")) is not None and started[0][0] is one:
        sizes.append(len(started[0][1]))
    assert sizes == [2, 2, 1, 1]


def test_a_burst_is_bounded_however_few_workers_are_free() -> None:
    made = scheduler(1)
    made.submit(transfer(*range(100)))
    made.submit(transfer("next"))
    started = made.next_burst("disk")
    assert started is not None
    assert len(started[0][1]) == BURST_PIECES


def test_the_last_transfer_in_the_queue_is_moved_by_all_workers_piece_by_piece() -> None:
    made = scheduler(4)
    made.submit(transfer(*range(12)))
    sizes = [len(started[0][1]) for _ in range(4) if (started := made.next_burst("disk")) is not None]
    assert sizes == [1, 1, 1, 1]
    assert made.next_burst("disk") is None


# --- light transfers

QUARTER = LIGHT_BURST_BYTES // 4


def light(name: str, *, urgency: Urgency = WRITE_BACK, light_bytes: int = QUARTER) -> Transfer:
    return transfer(final=name, urgency=urgency, light_bytes=light_bytes)


def burst_of(made: Scheduler, *transfers: Transfer) -> list[object]:
    """The pieces of the first burst when all of these wait."""
    for one in transfers:
        made.submit(one)
    started = made.next_burst("disk")
    assert started is not None
    return [piece for _, pieces in started for piece in pieces]


def test_a_worker_takes_several_light_transfers_up_to_their_bytes() -> None:
    assert burst_of(scheduler(), *(light(name) for name in "abcdef")) == ["a", "b", "c", "d"]


def test_light_transfers_are_shared_among_the_workers_of_the_lane() -> None:
    assert burst_of(scheduler(3), *(light(name) for name in "abcdef")) == ["a", "b"]


def test_a_burst_of_light_transfers_ends_at_a_heavy_one_and_at_another_class() -> None:
    assert burst_of(scheduler(), light("a"), transfer("heavy", urgency=WRITE_BACK), light("b"), light("c")) == ["a"]
    assert burst_of(scheduler(), light("a", urgency=PREFETCH), light("b"), light("c"), light("d")) == ["a"]
    assert burst_of(scheduler(), transfer("heavy"), light("a"), light("b"), light("c")) == ["heavy"]
    assert burst_of(scheduler(), light("a"), light("large", light_bytes=LIGHT_BURST_BYTES), light("b"), light("c")) == ["a"]


def test_light_transfers_of_one_burst_end_apart() -> None:
    made = scheduler()
    good, bad, other = transfers = [light(name) for name in "abc"]
    burst_of(made, *transfers)  # one worker: all of them are under way
    error = VolumeError("broken")
    burst: Burst = [(good, ["a"]), (bad, ["b"]), (other, ["c"])]
    assert made.finish_burst("disk", burst, [(["a"], None), (None, error), (["c"], None)]) == transfers
    assert [one.error for one in transfers] == [None, error, None]
    assert made.stats() == {"disk": LaneStats(queued=0, running=0)}


def read(name: str, *, light_bytes: int = LIGHT_READ_BYTES // 4) -> Transfer:
    return transfer(name, light_bytes=light_bytes, is_read=True)


def test_as_many_light_reads_are_under_way_as_keep_a_disk_busy_so_that_the_first_end_first() -> None:
    made = scheduler(8)
    for name in "abcdef":
        made.submit(read(name))
    started = [made.next_burst("disk") for _ in range(4)]
    assert [one is not None and one[0][1] for one in started] == [["a"], ["b"], ["c"], ["d"]]
    assert made.next_burst("disk") is None
    finish(made, started[2])
    (then,) = made.next_burst("disk") or ()
    assert then[1] == ["e"]
    assert made.next_burst("disk") is None
    finish(made, started[0], VolumeError("broken"))
    assert made.next_burst("disk") is not None


def test_a_light_read_larger_than_all_that_may_be_under_way_goes_alone() -> None:
    made = scheduler(8)
    for name in "ab":
        made.submit(read(name, light_bytes=2 * LIGHT_READ_BYTES))
    first = made.next_burst("disk")
    assert made.next_burst("disk") is None
    finish(made, first)
    assert made.next_burst("disk") is not None


def test_demand_begins_beside_any_loads_ahead_which_leave_it_room() -> None:
    made = scheduler(12)
    sizes = [AHEAD_READ_BYTES // 3] * 6
    ahead = [transfer(str(size), urgency=PREFETCH, light_bytes=size, is_read=True) for size in sizes]
    for one in ahead:
        made.submit(one)
    bursts = [made.next_burst("disk") for _ in range(3)]
    assert all(bursts)
    assert made.next_burst("disk") is None, "three are as many as may be under way while nobody waits"
    for name in "abcdef":
        made.submit(read(name))
    assert started_in(made) == ["a", "b", "c", "d"]
    finish(made, bursts[0])
    assert started_in(made) == []
    made.promote(bursts[1][0][0], DEMAND)  # type: ignore[index]  # it is there, as was asked
    finish(made, bursts[2])
    assert started_in(made) == [], "what somebody waits for now counts as demand"
    finish(made, bursts[1])
    assert started_in(made) == []


def test_writes_and_reads_of_several_pieces_begin_beside_light_reads() -> None:
    made = scheduler(8)
    for name in "abcd":
        made.submit(read(name))
    assert all(made.next_burst("disk") for _ in range(4))
    made.submit(transfer("p", "q", is_read=True))
    assert made.next_burst("disk") is not None
    made.submit(light("w", urgency=DEMAND, light_bytes=LIGHT_READ_BYTES))
    assert made.next_burst("disk") is not None


# --- what waits beside light reads that may not begin yet


def crowded(*, workers: int = 8, waiting: int = 1) -> tuple[Scheduler, list[Burst | None]]:
    """A lane with as many light reads under way as may be, and their bursts; so many more wait."""
    made = scheduler(workers)
    for number in range(4 + waiting):
        made.submit(read(f"read {number}"))
    bursts = [made.next_burst("disk") for _ in range(4)]
    assert all(bursts)
    assert made.next_burst("disk") is None
    return made, bursts


def started_in(made: Scheduler) -> list[object]:
    """The pieces of all bursts that may begin now, in their order."""
    pieces: list[object] = []
    while (burst := made.next_burst("disk")) is not None:
        pieces += [piece for _, taken in burst for piece in taken]
    return pieces


@pytest.mark.parametrize("outstanding", [4, 5, 6, 7, 8, 12])
def test_a_write_back_begins_at_once_beside_light_reads_that_never_stop_coming(outstanding: int) -> None:
    made = scheduler(8)
    for number in range(outstanding):
        made.submit(read(f"read {number}"))
    bursts = []
    while (burst := made.next_burst("disk")) is not None:
        bursts.append(burst)
    made.submit(transfer("write", urgency=WRITE_BACK, light_bytes=LIGHT_READ_BYTES // 4))
    assert started_in(made) == ["write"]
    for number in range(20):  # a worker that gets free takes the next read: it is more urgent
        finish(made, bursts.pop(0))
        made.submit(read(f"more {number}"))
        made.submit(transfer("next write", urgency=WRITE_BACK, light_bytes=1))
        burst = made.next_burst("disk")
        assert burst is not None
        assert burst[0][0].is_read
        bursts.append(burst)


def test_what_else_waits_goes_by_class_and_deadline_beside_light_reads_that_may_not_begin() -> None:
    made, _ = crowded(workers=10)
    for one in (
        transfer("w", urgency=WRITE_BACK), transfer("p", urgency=PREFETCH), transfer("late", deadline_s=9.0),
        transfer("soon", deadline_s=1.0), transfer(*range(4), urgency=WRITE_BACK, is_read=True),
    ):  # fmt: skip
        made.submit(one)
    assert started_in(made) == ["soon", "late", "p", "w", 0, 1, 2, 3]


def test_light_reads_and_others_go_in_one_order() -> None:
    transfers = [
        transfer("w", urgency=WRITE_BACK), transfer("rw", urgency=WRITE_BACK, light_bytes=LIGHT_READ_BYTES, is_read=True),
        read("r1"), transfer("d"), read("r2"), transfer("p", urgency=PREFETCH),
        transfer("soon", deadline_s=1.0, light_bytes=LIGHT_READ_BYTES, is_read=True), transfer("sooner", deadline_s=0.5),
    ]  # fmt: skip
    assert order_of(scheduler(), *transfers) == ["sooner", "soon", "r1", "d", "r2", "p", "w", "rw"]


def test_the_last_in_the_queue_is_the_last_of_light_reads_and_others_together() -> None:
    made, _ = crowded()
    made.submit(transfer(*range(6)))
    burst = made.next_burst("disk")
    assert burst is not None
    assert burst[0][1] == [0, 1], "a light read waits for a worker as well"


def test_light_transfers_are_shared_among_the_workers_without_counting_reads_that_may_not_begin() -> None:
    made, _ = crowded(waiting=20)
    for name in "abcdefghij":
        made.submit(light(name, urgency=DEMAND, light_bytes=1))
    sizes = [len(made.next_burst("disk") or ()) for _ in range(4)]
    assert sizes == [2, 1, 1, 1], "of 10 for 8 workers, each has its share"


def test_light_reads_join_light_writes_in_their_order_and_only_while_they_may_begin() -> None:
    made = scheduler()
    small = [read("r", light_bytes=1), light("w", urgency=DEMAND, light_bytes=1), read("s", light_bytes=1)]
    assert burst_of(made, *small) == ["r", "w", "s"]
    made, _ = crowded(workers=5, waiting=0)
    for one in (light("w", urgency=DEMAND, light_bytes=1), read("r", light_bytes=1), light("x", urgency=DEMAND, light_bytes=1)):
        made.submit(one)
    assert started_in(made) == ["w"], "five workers share the two that may begin"
    assert made.stats()["disk"].queued == 2


def test_a_light_read_that_may_not_begin_is_counted_promoted_and_cancelled() -> None:
    made, bursts = crowded(waiting=0)
    low, lower, gone = (transfer(name, urgency=WRITE_BACK, light_bytes=LIGHT_READ_BYTES, is_read=True) for name in "abc")
    for one in (low, gone, lower):
        made.submit(one)
    made.promote(lower, PREFETCH)
    made.promote(lower, DEMAND)
    assert made.stats() == {"disk": LaneStats(queued=3, running=4)}
    assert made.cancel(gone)
    assert made.stats() == {"disk": LaneStats(queued=2, running=4)}
    assert made.next_burst("disk") is None
    finish(made, bursts[0])
    burst = made.next_burst("disk")
    assert burst == [(lower, ["b"])]
    for each in (*bursts[1:], burst):
        finish(made, each)
    assert order_of(made) == ["a"]


# --- the final piece


def test_the_final_piece_runs_only_when_nothing_else_of_its_transfer_does() -> None:
    made = scheduler(3)
    write = transfer("a", "b", final="header")
    made.submit(write)
    first, second = made.next_burst("disk"), made.next_burst("disk")
    assert made.next_burst("disk") is None, "a worker is free, but the others still run"
    assert not finish(made, first)
    assert made.next_burst("disk") is None
    assert not finish(made, second)
    last = made.next_burst("disk")
    assert last == [(write, ["header"])]
    assert finish(made, last) == [write]
    assert write.results == ["a", "b", "header"]
    assert write.is_settled


def test_a_transfer_of_only_a_final_piece_runs_it() -> None:
    assert order_of(scheduler(), transfer(final="alone")) == ["alone"]


# --- errors


def test_an_error_stops_the_pieces_that_have_not_started_and_the_first_one_counts() -> None:
    made = scheduler(2)
    one = transfer(1, 2, 3, final="header")
    made.submit(one)
    bursts = made.next_burst("disk"), made.next_burst("disk")
    first, second = VolumeError("first"), VolumeError("second")
    assert not finish(made, bursts[0], first), "the other worker is still at it"
    assert made.next_burst("disk") is None
    assert finish(made, bursts[1], second) == [one]
    assert one.error is first
    assert not one.pieces
    assert one.final is None


def test_an_error_of_one_transfer_stops_no_other() -> None:
    made = scheduler()
    bad = transfer("bad")
    made.submit(bad)
    finish(made, made.next_burst("disk"), VolumeError("broken"))
    assert order_of(made, transfer("good")) == ["good"]


# --- cancel


def test_a_transfer_that_has_not_started_can_be_cancelled_and_never_runs() -> None:
    made = scheduler()
    one = transfer("a", final="header")
    made.submit(one)
    assert made.cancel(one)
    assert not made.cancel(one), "only once"
    assert made.next_burst("disk") is None
    assert made.stats() == {"disk": LaneStats(queued=0, running=0)}


@pytest.mark.parametrize("is_finished", [False, True])
def test_a_transfer_that_has_started_is_not_cancelled(is_finished: bool) -> None:
    made = scheduler()
    one = transfer("a", "b")
    made.submit(one)
    started = made.next_burst("disk")
    if is_finished:
        finish(made, started)
    assert not made.cancel(one)
    assert list(one.pieces) == ["b"]


# --- figures


def test_the_figures_count_what_waits_and_what_runs() -> None:
    made = scheduler(1)
    for number in range(3):
        made.submit(transfer(number))
    made.next_burst("disk")
    assert made.stats() == {"disk": LaneStats(queued=2, running=1)}


# --- whatever happens


SPECS = st.lists(st.tuples(st.integers(1, 9), st.sampled_from(Urgency), st.booleans()), max_size=9)
"""Per transfer: pieces, class, whether there is a final piece. One of one piece without a final one is light."""
ACTIONS = st.lists(st.tuples(st.sampled_from(["submit", "start", "finish", "promote", "cancel"]), st.integers(0, 7)), max_size=40)
LIGHT_SIZES = [QUARTER, LIGHT_READ_BYTES // 2]
"""Of the large ones two are as many as may be under way."""


class Shift:
    """Workers of one lane, and what they ran."""

    def __init__(self, limit: int, specs: list[tuple[int, Urgency, bool]]) -> None:
        self.limit = limit
        self.made = scheduler(limit)
        self.transfers = [
            transfer(
                *((number, piece) for piece in range(count)), urgency=urgency, final=(number, "final") if is_final else None,
                light_bytes=LIGHT_SIZES[number // 2 % 2] if count == 1 and not is_final else 0, is_read=number % 2 == 0,
                deadline_s=None if number % 3 else float(number),
            )
            for number, (count, urgency, is_final) in enumerate(specs)
        ]  # fmt: skip
        self.pieces = [piece for one in self.transfers for piece in (*one.pieces, *([one.final] if one.final else []))]
        self.waiting = list(self.transfers)
        self.running: list[Burst] = []
        self.ran: list[object] = []
        self.over: list[Transfer] = []
        """Settled or cancelled."""

    def do(self, action: str, number: int) -> None:
        one = self.transfers[number % len(self.transfers)] if self.transfers else None
        if action == "submit" and self.waiting:
            self.made.submit(self.waiting.pop())
        elif action == "promote" and one and one.order and not one.is_settled:
            self.made.promote(one, Urgency(number % 3))
        elif action == "cancel" and one and one.order:
            left = list(one.pieces) + ([one.final] if one.final else [])
            if self.made.cancel(one):
                self.over.append(one)
                self.pieces = [piece for piece in self.pieces if piece not in left]
        elif action == "start":
            self.start()
        elif action == "finish" and self.running:
            self.over += finish(self.made, self.running.pop(number % len(self.running)))
        stats = self.made.stats()["disk"]
        assert len(self.running) == stats.running <= self.limit
        assert stats.queued == sum(one.order > 0 and one.has_piece for one in self.transfers)

    def start(self) -> None:
        under_way = [one for burst in self.running for one, _ in burst]
        waiting = [one for one in self.transfers if one.order and one.has_piece]
        waiting.sort(key=lambda one: (one.urgency, inf if one.deadline_s is None else one.deadline_s, one.order))
        read = next((one for one in waiting if one.is_light_read), None)
        is_awaited = read is not None and read.urgency is DEMAND
        counted = [one for burst in self.running if not is_awaited or burst[0][0].urgency is DEMAND for one, _ in burst]
        most_bytes = LIGHT_READ_BYTES if is_awaited else AHEAD_READ_BYTES
        may_read = sum(one.light_bytes for one in counted if one.is_read) < most_bytes
        in_turn = [one for one in waiting if may_read or not one.is_light_read]
        burst = self.made.next_burst("disk")
        if burst is None:
            assert not in_turn or len(self.running) == self.limit, "a worker is free, and something may begin"
            return
        assert [one for one, _ in burst] == in_turn[: len(burst)], "in their order"
        for one, pieces in burst:
            is_final = pieces[0] in [(at, "final") for at in range(len(self.transfers))]
            assert not (is_final and any(one is other for other in under_way))
            self.ran.extend(pieces)
        self.running.append(burst)


@given(limit=st.integers(1, 4), specs=SPECS, actions=ACTIONS)
def test_every_piece_runs_once_in_its_turn_and_no_worker_is_free_while_one_may_begin(
    limit: int, specs: list[tuple[int, Urgency, bool]], actions: list[tuple[str, int]]
) -> None:
    shift = Shift(limit, specs)
    for action in actions:
        shift.do(*action)
    while len(shift.over) < len(specs):
        for action in ("submit", "start", "finish"):
            shift.do(action, 0)
    assert sorted(shift.ran, key=str) == sorted(shift.pieces, key=str)
    assert len(set(map(id, shift.over))) == len(specs)
    assert shift.made.next_burst("disk") is None
