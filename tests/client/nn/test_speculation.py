"""How many guesses are loaded ahead: the window is what came in time, and guesses that bring nothing end by themselves."""

from __future__ import annotations

from paramstore_client.nn.speculation import FIRST_WINDOW, RETRY_EVERY, Speculation


def visited(speculation: Speculation, *, tokens: int, asked: int, in_time: int, late: int) -> int:
    """Loads `asked` guesses ahead, of which so many were visited; gives what is admitted then."""
    speculation.note(1, tokens=tokens, placed=100)
    speculation.judge(1, in_time, late, placed=100 + asked)
    return speculation.admit(tokens)


def test_the_window_doubles_while_all_of_it_comes_in_time() -> None:
    speculation = Speculation()
    assert speculation.admit(1) == FIRST_WINDOW
    assert visited(speculation, tokens=1, asked=4, in_time=4, late=0) == 8
    assert visited(speculation, tokens=1, asked=3, in_time=3, late=0) == 8, "fewer than it allows say nothing of it"
    assert visited(speculation, tokens=1, asked=8, in_time=5, late=3) == 6, "what came in time, and one more"
    assert visited(speculation, tokens=1, asked=6, in_time=0, late=6) == 1


def test_each_size_of_a_batch_has_a_window_of_its_own() -> None:
    speculation = Speculation()
    visited(speculation, tokens=512, asked=4, in_time=4, late=0)
    assert (speculation.admit(512), speculation.admit(600), speculation.admit(1)) == (8, 8, FIRST_WINDOW)


def test_guesses_that_nobody_visits_end_by_themselves_and_are_tried_again() -> None:
    speculation = Speculation()
    admitted = [visited(speculation, tokens=1, asked=4, in_time=0, late=0) for _ in range(20)]
    assert admitted[0] == FIRST_WINDOW
    assert admitted[-1] == 0
    assert speculation.counts.wasted == speculation.counts.asked == 80
    tries = [speculation.admit(1) for _ in range(2 * RETRY_EVERY)]
    assert sum(tries) == 2 * FIRST_WINDOW
    for _ in range(20):
        visited(speculation, tokens=1, asked=4, in_time=4, late=0)
    assert speculation.admit(1) > 0


def test_no_more_came_of_guesses_than_were_asked_for() -> None:
    """A forward that ends between its guesses and their layer leaves loads that the next one finds beside its own."""
    speculation = Speculation()
    visited(speculation, tokens=1, asked=2, in_time=3, late=2)
    visited(speculation, tokens=1, asked=4, in_time=3, late=2)
    counts = speculation.counts
    assert (counts.asked, counts.in_time, counts.late, counts.wasted) == (6, 5, 1, 0)


def test_every_key_is_counted_once() -> None:
    speculation = Speculation()
    visited(speculation, tokens=3, asked=7, in_time=3, late=2)
    speculation.judge(1, 5, 5, placed=200)  # nothing was asked for since
    speculation.note(1, tokens=3, placed=200)
    speculation.judge(2, 5, 5, placed=210)  # another layer: a forward on another thread
    speculation.note(1, tokens=3, placed=210)
    speculation.judge(1, 0, 0, placed=210)  # none of them got a slot
    counts = speculation.counts
    assert (counts.asked, counts.in_time, counts.late, counts.wasted) == (7, 3, 2, 2)


def test_guesses_whose_count_began_anew_are_not_judged() -> None:
    speculation = Speculation()
    speculation.note(1, tokens=1, placed=100)
    speculation.judge(1, 2, 0, placed=3)  # after an interrupt the slots count from 0
    assert (speculation.counts.asked, speculation.counts.in_time, speculation.counts.wasted) == (0, 0, 0)
    assert speculation.admit(1) == FIRST_WINDOW
