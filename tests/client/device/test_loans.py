"""Slots beyond the promise: borrowed when they are of use, given back within the visit that sees them asked for, or without one."""

from __future__ import annotations

import gc
import os
import random
import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from paramstore.core.key import ExpertKey
from paramstore.errors import CapacityError, LeaseError, StepDropped
from paramstore.testing.memory_namespace import MemoryNamespace
from paramstore_client.device import loans as loans_module
from paramstore_client.device.host_slots import HostSlots, standing
from paramstore_client.device.loans import slots_within
from paramstore_client.device.ring import RingMemory
from paramstore_client.device.slot_cache import open_slots
from paramstore_testkit.interrupts import Interrupt

MODULES = ("/host_slots.py", "/loans.py", "/slot_plan.py")
LIMIT_S = 30.0


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is missing is asked for without a pause; nobody looks at a word but visits."""
    monkeypatch.setattr(loans_module, "ASK_PAUSE_S", 0.0)
    monkeypatch.setattr(loans_module, "LOOK_PAUSE_S", LIMIT_S)


def make(lease_slots: int = 5, *, to_lend: int = 0, experts: int = 6) -> tuple[MemoryNamespace, HostSlots]:
    """Slots within a promise of five, less one, of two layers of six experts."""
    namespace = MemoryNamespace.of_swiglu(layers=2, experts=experts, lease_slots=lease_slots)
    slots = standing(namespace, policy="lru")
    assert isinstance(slots, HostSlots)
    namespace.loans.to_lend = to_lend
    return namespace, slots


def keys(*experts: int, layer: int = 0) -> list[ExpertKey]:
    return [(layer, expert) for expert in experts]


def visit(slots: HostSlots, wanted: Sequence[ExpertKey]) -> None:
    """A visit that finds the bytes of its keys."""
    with slots.acquire(wanted) as lease:
        check(slots, lease, wanted)


def check(slots: HostSlots, lease: Any, wanted: Sequence[ExpertKey]) -> None:
    namespace: Any = slots.namespace
    for key in wanted:
        for name, value in namespace.values(key).items():
            assert torch.equal(lease[key][name], value), key


def filled(*, to_lend: int) -> tuple[MemoryNamespace, HostSlots]:
    """Slots whose loan is full too: the keys visited last stand."""
    namespace, slots = make(to_lend=to_lend)
    for layer in (0, 1, 0, 1):
        for expert in range(6):
            visit(slots, keys(expert, layer=layer))
    assert namespace.leased_key_count == 4 + to_lend
    return namespace, slots


def released(namespace: MemoryNamespace) -> list[ExpertKey]:
    """What was released since the last call."""
    found = [key for _, leased in namespace.happened("release") for key in leased]
    namespace.events.clear()
    return found


def test_what_may_stand_is_the_promise_less_a_few() -> None:
    namespaces = [MemoryNamespace.of_swiglu(layers=2, experts=6, lease_slots=count) for count in (1, 2, 11, 12, 13)]
    assert [slots_within(namespace) for namespace in namespaces] == [1, 1, 10, 12, 12]


# --- borrowing


def test_nothing_is_asked_for_before_the_slots_are_full() -> None:
    namespace, slots = make(to_lend=3)
    visit(slots, keys(0, 1, 2, 3))
    visit(slots, keys(0, 1))
    assert namespace.loans.asked == []
    visit(slots, keys(4))
    assert namespace.loans.asked == [8], "all keys but the four that stand anyway"
    visit(slots, keys(5))
    assert (slots.loans.count, namespace.leased_key_count) == (3, 5)
    assert slots.lease_slots == 4, "what others may count on stays"


def test_with_what_was_lent_more_keys_stand_and_are_hits() -> None:
    namespace, slots = filled(to_lend=8)
    namespace.events.clear()
    hits = slots.counts.hits
    for layer in (0, 1):
        visit(slots, keys(*range(4), layer=layer))
    assert (slots.counts.hits, namespace.events) == (hits + 8, [])


def test_a_loan_that_is_whole_or_not_needed_is_not_asked_for_again() -> None:
    namespace, slots = filled(to_lend=8)
    assert slots.loans.count == slots.loans.most == 8
    count = len(namespace.loans.asked)
    for expert in range(6):
        visit(slots, keys(expert, layer=expert % 2))
    assert len(namespace.loans.asked) == count
    namespace = MemoryNamespace.of_swiglu(layers=2, experts=6, lease_slots=20)
    whole = standing(namespace)
    for expert in range(6):
        whole.acquire(keys(expert)).release()
    assert namespace.loans.asked == []


def test_who_was_told_its_slots_borrows_no_more_than_these() -> None:
    namespace = MemoryNamespace.of_swiglu(layers=2, experts=6, lease_slots=5)
    namespace.loans.to_lend = 9
    told, some = HostSlots(namespace, slots=3), open_slots(namespace, 7, device=torch.device("cpu"), policy="lru")
    assert isinstance(some, HostSlots)
    assert (told.loans.most, some.lease_slots, some.loans.most) == (0, 4, 3)
    for expert in range(6):
        visit(some, keys(expert))
    some.close()
    for expert in range(6):
        visit(told, keys(expert))
    assert namespace.loans.asked == [3]


def test_while_an_answer_is_on_its_way_nobody_waits_for_it() -> None:
    namespace, slots = make(to_lend=3)
    namespace.loans.holds_answers = True
    for expert in range(6):
        visit(slots, keys(expert))
    assert (namespace.loans.asked, slots.loans.count, namespace.leased_key_count) == ([8], 0, 4)
    namespace.loans.holds_answers = False
    visit(slots, keys(0, layer=1))
    assert (slots.loans.count, namespace.leased_key_count) == (3, 5)


def test_a_refusal_lends_nothing_and_is_no_error_of_the_visit(monkeypatch: pytest.MonkeyPatch) -> None:
    namespace, slots = make(to_lend=3)
    namespace.loans.error = StepDropped("step 1 was dropped")
    for expert in range(6):
        visit(slots, keys(expert))
    assert (slots.loans.count, namespace.leased_key_count) == (0, 4)

    def refuse(keeper: object, count: int) -> None:
        raise CapacityError("65536 requests of this client are unanswered")

    monkeypatch.setattr(namespace.loans, "begin_borrow", refuse)
    visit(slots, keys(0, layer=1))


def test_between_two_requests_there_is_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loans_module, "ASK_PAUSE_S", 3600.0)
    namespace, slots = make()
    for expert in range(6):
        visit(slots, keys(expert))
    assert namespace.loans.asked == [8]


def test_where_nothing_may_stand_nothing_is_borrowed() -> None:
    namespace = MemoryNamespace.of_swiglu(layers=2, experts=6, lease_slots=5)
    namespace.may_stand, namespace.loans.to_lend = False, 9
    with RingMemory(namespace, 2, device="cpu") as ring:
        for layer in (0, 1, 0):
            ring.acquire(keys(0, 1, 2, layer=layer)).release()
    assert namespace.loans.asked == []


# --- giving back


def test_what_is_asked_back_is_given_back_within_the_next_visit_which_only_hits() -> None:
    namespace, slots = filled(to_lend=6)
    released(namespace)
    namespace.loans.recall(2)
    visit(slots, keys(5, layer=1))
    assert namespace.loans.given_back == [2]
    assert len(released(namespace)) == 4
    assert (slots.loans.count, namespace.leased_key_count) == (2, 6)
    visit(slots, keys(0, 1, 2))
    assert namespace.leased_key_count == 6


def test_the_leases_are_released_before_the_slots_are_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    namespace, slots = filled(to_lend=6)
    seen = []
    monkeypatch.setattr(namespace.loans, "give_back", lambda kept: seen.append((kept, namespace.leased_key_count)))
    namespace.loans.recall(1)
    visit(slots, keys(5, layer=1))
    assert seen == [(1, 5)]


def test_a_lease_that_a_kernel_still_uses_is_given_back_when_its_visit_ends() -> None:
    namespace, slots = filled(to_lend=3)
    with slots.acquire(keys(*range(1, 5), layer=1)) as first, slots.acquire(keys(0, 5, layer=1)) as second:
        namespace.loans.recall(0)
        visit(slots, keys(0, layer=1))
        assert (namespace.loans.given_back, namespace.leased_key_count) == ([2], 6), "one was idle"
        check(slots, first, keys(*range(1, 5), layer=1))
        check(slots, second, keys(0, 5, layer=1))
    assert namespace.loans.given_back == [2, 0]
    assert namespace.leased_key_count == 4
    visit(slots, keys(0, 1, 2, 3))


def test_a_visit_that_runs_through_slots_gives_back_those_it_does_not_need() -> None:
    namespace, slots = make(to_lend=4)
    for expert in range(6):
        visit(slots, keys(expert))
    everything = [*keys(*range(6)), *keys(*range(6), layer=1)]
    order = []
    with slots.acquire_arriving(everything, may_pass=True) as lease:
        for key in lease.in_turn():
            if len(order) == 2:
                namespace.loans.recall(0)
            check(slots, lease, [key])
            order.append(key)
            assert namespace.leased_key_count <= 5 + 4
    assert sorted(order) == everything
    assert (slots.loans.count, namespace.loans.count) == (0, 0)
    assert namespace.leased_key_count <= 4


@pytest.mark.parametrize("kept", [0, 4, 7])
def test_a_recall_before_the_first_key_has_its_turn_leaves_a_slot_to_a_visit_of_which_all_stood(kept: int) -> None:
    namespace, slots = make(to_lend=8)
    everything = [*keys(*range(6)), *keys(*range(6), layer=1)]
    for _ in range(3):
        for key in everything:
            visit(slots, [key])
    assert namespace.leased_key_count == len(everything)
    with slots.acquire_arriving(everything, may_pass=True) as lease:
        namespace.loans.recall(kept)
        assert sorted(lease.in_turn()) == everything
    visit(slots, keys(0))
    assert (slots.loans.count, namespace.loans.count) == (kept, kept)


def test_who_computes_nothing_gives_back_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loans_module, "LOOK_PAUSE_S", 0.001)
    namespace, slots = filled(to_lend=5)
    is_given_back = threading.Event()
    give_back = namespace.loans.give_back

    def tell(kept: int) -> None:
        give_back(kept)
        is_given_back.set()

    monkeypatch.setattr(namespace.loans, "give_back", tell)
    namespace.loans.recall(1)
    assert is_given_back.wait(LIMIT_S)
    with slots._lock:
        assert (namespace.loans.given_back, slots.loans.count, namespace.leased_key_count) == ([1], 1, 5)
    visit(slots, keys(5, layer=1))


def threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "paramstore-loans"}


@pytest.mark.parametrize("how", ["recall", "close", "let go", "drop"])
def test_nobody_looks_any_more_once_all_was_given_back(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loans_module, "LOOK_PAUSE_S", 0.001 if how == "recall" else LIMIT_S)
    known = threads()
    namespace, slots = filled(to_lend=5)
    (look,) = threads() - known
    if how == "recall":
        namespace.loans.recall(0)
    elif how == "close":
        slots.close()
    elif how == "let go":
        slots.let_go()
    else:
        gone = weakref.ref(slots)
        del slots
        gc.collect()
        assert gone() is None
    look.join(LIMIT_S)
    assert not look.is_alive()
    assert (namespace.loans.given_back[-1], namespace.loans.count) == (0, 0)
    assert namespace.leased_key_count == (4 if how == "recall" else 0)


def test_who_is_closed_in_the_middle_of_a_visit_borrows_no_more() -> None:
    namespace, slots = filled(to_lend=5)
    with slots.acquire(keys(*range(6), layer=1)) as lease:
        slots.close()
        check(slots, lease, keys(*range(6), layer=1))
        assert not namespace.loans.has_left, "it has what was lent to the handle"
    assert (namespace.loans.count, slots.loans.count) == (0, 0)
    assert namespace.loans.has_left
    for expert in range(6):
        visit(slots, keys(expert))
    assert namespace.leased_key_count == 0


@pytest.mark.parametrize("how", ["nothing lent", "nothing asked", "lent"])
def test_who_is_closed_leaves_the_loan_to_who_comes_next(how: str) -> None:
    namespace, slots = make() if how == "nothing asked" else filled(to_lend=5 if how == "lent" else 0)
    assert namespace.loans.asked or how == "nothing asked"
    slots.close()
    assert namespace.loans.has_left
    assert namespace.leased_key_count == 0
    asked = len(namespace.loans.asked)
    for expert in range(6):
        visit(slots, keys(expert))
    assert (namespace.leased_key_count, len(namespace.loans.asked)) == (0, asked), "it goes on without what stands"


def test_what_is_asked_for_and_not_answered_is_given_up_by_giving_back() -> None:
    namespace, slots = filled(to_lend=3)
    namespace.loans.to_lend, namespace.loans.holds_answers = 6, True
    visit(slots, keys(0))
    assert (namespace.loans.count, slots.loans.count) == (6, 3)
    namespace.loans.recall(1)
    visit(slots, keys(0))
    namespace.loans.holds_answers = False
    visit(slots, keys(0))
    assert (namespace.loans.count, slots.loans.count) == (1, 1)


def with_an_answer_unread() -> tuple[MemoryNamespace, HostSlots, list[ExpertKey]]:
    """Five slots were lent in answer to the last miss. Gives what stands since."""
    namespace, slots = filled(to_lend=0)
    namespace.loans.to_lend, namespace.loans.holds_answers = 5, True
    missing = slots.lacking([*keys(*range(6)), *keys(*range(6), layer=1)])[:1]
    visit(slots, missing)
    assert (namespace.loans.count, slots.loans.count) == (5, 0)
    namespace.loans.holds_answers = False
    return namespace, slots, missing


def test_what_is_lent_after_the_last_miss_is_found_and_given_back_by_a_hit() -> None:
    namespace, slots, standing_there = with_an_answer_unread()
    visit(slots, standing_there)
    assert slots.loans.count == 5
    namespace.loans.recall(0)
    visit(slots, standing_there)
    assert (namespace.loans.count, slots.loans.count) == (0, 0)


def test_a_close_gives_back_what_was_lent_and_not_read() -> None:
    namespace, slots, _ = with_an_answer_unread()
    slots.close()
    assert (namespace.loans.count, slots.loans.count) == (0, 0)


def test_who_is_idle_finds_what_was_lent_after_its_last_miss_and_gives_it_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loans_module, "LOOK_PAUSE_S", 0.01)
    namespace, slots, _ = with_an_answer_unread()
    looking = [thread for thread in threading.enumerate() if thread.name == "paramstore-loans"]
    namespace.loans.recall(0)
    for thread in looking:
        thread.join(LIMIT_S)
    assert (namespace.loans.count, slots.loans.count) == (0, 0)


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_forked_child_has_borrowed_nothing() -> None:
    namespace, slots = filled(to_lend=5)
    assert slots.loans.count == 5
    if (child := os.fork()) == 0:
        is_right = (slots.loans.count, slots.loans.word[0], slots.loans.lend_by(None)) == (0, 0, False)
        os._exit(0 if is_right else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert slots.loans.count == namespace.loans.count == 5


def test_what_was_given_back_is_borrowed_again_when_there_is_some() -> None:
    namespace, slots = filled(to_lend=5)
    namespace.loans.recall(0)
    visit(slots, keys(0))
    namespace.loans.to_lend = 2
    for expert in range(6):
        visit(slots, keys(expert))
    assert (slots.loans.count, namespace.leased_key_count) == (2, 6)


# --- interrupts, threads, chance


@pytest.fixture
def few_objects() -> Iterator[None]:
    """What is there already is no garbage: the collector looks at what a test makes."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def interrupted(slots: HostSlots, wanted: list[ExpertKey], line: int) -> bool:
    """Interrupts a visit in a thread of its own."""
    is_raised = []

    def run() -> None:
        with Interrupt(line, MODULES) as interrupt, slots.acquire(wanted) as lease:
            assert lease[wanted[0]]
        is_raised.append(interrupt.is_raised)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(LIMIT_S)
    return is_raised[0]


@pytest.mark.usefixtures("few_objects")
@pytest.mark.parametrize("how", ["given back", "borrowed", "taken"])
def test_an_interrupt_at_any_line_loses_no_slot(how: str) -> None:
    for line in range(1, 500):
        if how == "given back":
            namespace, slots = filled(to_lend=4)
            namespace.loans.recall(1)
        else:
            namespace, slots = make(to_lend=4)
            for expert in range(4 if how == "borrowed" else 5):
                visit(slots, keys(expert))
        is_raised = interrupted(slots, keys(5), line)
        gc.collect()
        visit(slots, keys(0))
        assert slots.loans.count <= namespace.loans.count <= 4, line
        assert namespace.leased_key_count <= namespace.lease_slots - 1 + namespace.loans.count, line
        namespace.loans.recall(0)
        visit(slots, keys(1))
        assert namespace.loans.count == 0, f"line {line}: what is lent is given back when it is asked for"
        visit(slots, keys(0, 1, 2, 3))
        assert namespace.leased_key_count <= 4, line
        if not is_raised:
            break
    assert 20 < line < 499


@pytest.mark.parametrize("seed", range(6))
def test_at_random_no_more_is_leased_than_promised_and_lent_and_the_bytes_are_right(seed: int) -> None:
    rng = random.Random(seed)
    namespace, slots = make(lease_slots=rng.randint(2, 6))
    under_way: list[tuple[Any, list[ExpertKey]]] = []
    for turn in range(300):
        where = f"seed {seed}, turn {turn}"
        action = rng.random()
        if action < 0.12:
            namespace.loans.to_lend = rng.randint(0, 9)
        elif action < 0.24 and namespace.loans.count:
            namespace.loans.recall(rng.randint(0, namespace.loans.count))
        elif action < 0.34 and under_way:
            lease, wanted = under_way.pop(rng.randrange(len(under_way)))
            check(slots, lease, wanted)
            lease.release()
        elif action < 0.4:
            namespace.loans.holds_answers = not namespace.loans.holds_answers
        else:
            wanted = keys(*rng.sample(range(6), rng.randint(1, 4)), layer=rng.randrange(2))
            try:
                lease = slots.acquire(wanted)
            except (CapacityError, LeaseError):
                assert under_way or len(wanted) > slots.lease_slots, where
                continue
            under_way.append((lease, wanted))
            if rng.random() < 0.7:
                check(slots, lease, wanted)
                under_way.pop()[0].release()
        assert slots.loans.count <= namespace.loans.count, where
        in_use = len({key for _, wanted in under_way for key in wanted})
        beyond = max(0, in_use - slots.lease_slots)
        if action >= 0.4:  # a visit has seen the word
            assert slots.loans.count <= max(namespace.loans.word[0], beyond), where
        assert namespace.leased_key_count <= slots.lease_slots + slots.loans.count, where


def test_threads_and_recalls_never_part_a_visit_from_its_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loans_module, "LOOK_PAUSE_S", 0.0005)
    namespace, slots = make(lease_slots=9, to_lend=4)
    errors: list[BaseException] = []
    is_over = threading.Event()

    def run(seed: int) -> None:
        rng = random.Random(seed)
        try:
            for _ in range(100):
                visit(slots, keys(*rng.sample(range(6), 2), layer=rng.randrange(2)))
        except BaseException as error:  # noqa: BLE001 - told by the test
            errors.append(error)

    def ask_back() -> None:
        rng = random.Random(7)
        while not is_over.wait(0.001):
            namespace.loans.recall(rng.randint(0, 4))

    readers = [threading.Thread(target=run, args=(seed,)) for seed in range(3)]
    recaller = threading.Thread(target=ask_back)
    for thread in (*readers, recaller):
        thread.start()
    for thread in readers:
        thread.join(LIMIT_S)
    is_over.set()
    recaller.join(LIMIT_S)
    assert errors == []
    namespace.loans.recall(0)
    visit(slots, keys(0))
    assert namespace.loans.count == 0
