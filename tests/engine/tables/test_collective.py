"""Collective calls, decided: every state of a group against everything that can happen to it."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable

import pytest

from paramstore.engine.tables.collective import (
    GROUP_NAME_MAX,
    WORLD_SIZE_MAX,
    Argument,
    Call,
    Collective,
    Settled,
    bits_of,
    check_rank,
)
from paramstore.errors import ConfigError, ParamStoreError, RankLost, StepMismatch, WriterFenced

SIZE = 3
WHAT = "group 'g' on namespace 'moe'"
WAY_ON = "All ranks call rollback"


def apply_of(lr: float) -> Call:
    return Call("apply", (Argument("lr", lr), Argument("eps", 1e-8)))


APPLY, OTHER_APPLY, COMMIT = apply_of(0.1), apply_of(0.2), Call("commit", (Argument("step", 3),))
ROLLBACK, OTHER_ROLLBACK = Call("rollback", (Argument("step", 1),)), Call("rollback", (Argument("step", 0),))


def fresh() -> Collective:
    return Collective(SIZE, what=WHAT, way_on=WAY_ON)


def idle() -> Collective:
    return fresh()


def gathering() -> Collective:
    """Ranks 0 and 1 wait in an apply."""
    group = fresh()
    assert group.arrive(0, APPLY) is None
    assert group.arrive(1, APPLY) is None
    return group


def out_of_step() -> Collective:
    group = fresh()
    group.arrive(0, APPLY)
    group.arrive(1, COMMIT)
    return group


def mending() -> Collective:
    """Out of step; ranks 0 and 1 wait in a rollback."""
    group = out_of_step()
    assert group.arrive(0, ROLLBACK) is None
    assert group.arrive(1, ROLLBACK) is None
    return group


def lost() -> Collective:
    group = fresh()
    group.lose(1, "is gone")
    return group


Outcome = tuple[str, tuple[int, ...]]
STATES: dict[str, Callable[[], Collective]] = {
    "idle": idle, "gathering": gathering, "out of step": out_of_step, "mending": mending, "lost": lost,
}  # fmt: skip
EVENTS: dict[str, Callable[[Collective], object]] = {
    "rank 2 calls apply": lambda group: group.arrive(2, APPLY),
    "rank 2 calls another apply": lambda group: group.arrive(2, OTHER_APPLY),
    "rank 2 calls commit": lambda group: group.arrive(2, COMMIT),
    "rank 2 calls rollback": lambda group: group.arrive(2, ROLLBACK),
    "rank 2 calls another rollback": lambda group: group.arrive(2, OTHER_ROLLBACK),
    "rank 0 calls apply": lambda group: group.arrive(0, APPLY),
    "rank 0 calls rollback": lambda group: group.arrive(0, ROLLBACK),
    "rank 2 is lost": lambda group: group.lose(2, "is gone"),
    "rank 0 is lost": lambda group: group.lose(0, "is gone"),
    "rank 0 is withdrawn": lambda group: group.withdraw(0),
    "rank 2 is withdrawn": lambda group: group.withdraw(2),
    "the deadline passes": lambda group: group.expire(),
    "another group fences it": lambda group: group.end(WriterFenced("fenced")),
    "a rollback succeeds": lambda group: group.mend(group.refusal),
}
WAITING = ("gathering", "mending")
BOTH, ALL = (0, 1), (0, 1, 2)
WAITS: Outcome = ("waits", ())
REFUSED_ALONE: Outcome = ("raises StepMismatch", ())
IS_LOST: Outcome = ("raises RankLost", ())
NOTHING: Outcome = ("nothing", ())
TABLE: dict[tuple[str, str], Outcome] = {
    **{("idle", f"rank {rank} calls {what}"): WAITS for rank, what in (
        (2, "apply"), (2, "another apply"), (2, "commit"), (2, "rollback"), (2, "another rollback"), (0, "apply"), (0, "rollback")
    )},
    ("gathering", "rank 2 calls apply"): ("begins", ALL),
    **{("gathering", f"rank 2 calls {what}"): ("StepMismatch", ALL) for what in (
        "another apply", "commit", "rollback", "another rollback"
    )},
    ("gathering", "rank 0 calls apply"): REFUSED_ALONE,
    ("gathering", "rank 0 calls rollback"): REFUSED_ALONE,
    **{(state, f"rank {rank} calls {what}"): REFUSED_ALONE for state in ("out of step", "mending") for rank, what in (
        (2, "apply"), (2, "another apply"), (2, "commit"), (0, "apply")
    )},
    **{("out of step", f"rank {rank} calls {what}"): WAITS for rank, what in (
        (2, "rollback"), (2, "another rollback"), (0, "rollback")
    )},
    ("mending", "rank 2 calls rollback"): ("begins", ALL),
    ("mending", "rank 2 calls another rollback"): ("StepMismatch", ALL),
    ("mending", "rank 0 calls rollback"): REFUSED_ALONE,
    **{("lost", f"rank {rank} calls {what}"): IS_LOST for rank, what in (
        (2, "apply"), (2, "another apply"), (2, "commit"), (2, "rollback"), (2, "another rollback"), (0, "apply"), (0, "rollback")
    )},
    **{(state, f"rank {rank} is lost"): ("RankLost", BOTH if state in WAITING else ()) for state in STATES for rank in (0, 2)},
    **{(state, "rank 0 is withdrawn"): ("withdrawn", ()) if state in WAITING else NOTHING for state in STATES},
    **{(state, "rank 2 is withdrawn"): NOTHING for state in STATES},
    **{(state, "the deadline passes"): ("StepMismatch", BOTH) for state in WAITING},
    **{(state, "another group fences it"): ("WriterFenced", BOTH if state in WAITING else ()) for state in STATES},
    **{(state, "a rollback succeeds"): NOTHING for state in STATES},
}  # fmt: skip


def figures(group: Collective) -> object:
    return group.waiting, group.missing, group.is_in_step, group.is_lost


def outcome(group: Collective, event: Callable[[Collective], object]) -> Outcome:
    try:
        found = event(group)
    except ParamStoreError as error:
        return f"raises {type(error).__name__}", ()
    if isinstance(found, Settled):
        return ("begins" if found.error is None else type(found.error).__name__), found.ranks
    if isinstance(found, bool):
        return ("withdrawn" if found else "nothing"), ()
    return ("nothing" if event is EVENTS["a rollback succeeds"] else "waits"), ()


@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("state", STATES)
def test_everything_that_happens_in_every_state_has_one_outcome(state: str, event: str) -> None:
    group = STATES[state]()
    before = figures(group)
    if (state, event) not in TABLE:
        assert event == "the deadline passes", "nobody waits: its owner has no timer"
        with pytest.raises(AssertionError):
            group.expire()
        return
    expected = TABLE[state, event]
    assert outcome(group, EVENTS[event]) == expected
    what, settled = expected
    if what.startswith("raises") or (expected == NOTHING and event != "a rollback succeeds"):
        assert figures(group) == before, "a refusal changes nothing"
    if settled:
        assert group.waiting == (), "what was settled waits no longer"
    if what == "StepMismatch":
        assert not group.is_in_step
    if what == "RankLost":
        assert group.is_lost
    if event == "a rollback succeeds":
        assert group.is_in_step


# --- what the ranks are told


def error_of(settled: Settled | None) -> str:
    assert settled is not None
    assert isinstance(settled.error, StepMismatch | RankLost)
    return str(settled.error)


def test_a_mismatch_names_ranks_calls_the_values_that_differ_and_the_way_on() -> None:
    group = gathering()
    assert error_of(group.arrive(2, OTHER_APPLY)) == (
        f"{WHAT}: rank 0 called apply(lr=0.1), rank 1 called apply(lr=0.1), rank 2 called apply(lr=0.2): nothing ran. {WAY_ON}"
    )


def test_different_calls_are_named_without_their_arguments_and_so_is_who_had_not_called() -> None:
    group = fresh()
    group.arrive(2, COMMIT)
    assert "rank 0 called apply(), rank 2 called commit(), rank 1 had not called" in error_of(group.arrive(0, APPLY))


def test_a_mismatch_is_certain_before_the_last_rank_has_called() -> None:
    group = fresh()
    group.arrive(0, APPLY)
    settled = group.arrive(1, OTHER_APPLY)
    assert settled is not None
    assert settled.ranks == (0, 1)
    with pytest.raises(StepMismatch, match=r"rank 0 called apply\(lr=0.1\), rank 1 called apply\(lr=0.2\)"):
        group.arrive(2, APPLY)  # and the third hears the same


def test_a_deadline_names_who_called_what_and_who_did_not() -> None:
    group = fresh()
    group.arrive(1, APPLY)
    assert f"{WHAT}: apply of rank 1: ranks 0, 2 did not call in time: nothing ran" in error_of(group.expire())


def test_whoever_is_lost_first_is_named_ever_after() -> None:
    group = gathering()
    assert "rank 2 is gone: the group is broken. All ranks open the namespace again" in error_of(group.lose(2, "is gone"))
    group.lose(0, "closed the namespace")
    with pytest.raises(RankLost, match="rank 2 is gone"):
        group.arrive(1, ROLLBACK)
    with pytest.raises(RankLost, match="rank 2 is gone"):
        group.check_in_step()


def test_ranks_out_of_step_are_in_step_after_a_call_that_starts_over() -> None:
    group = mending()
    assert group.arrive(2, ROLLBACK) == Settled(ALL)
    assert not group.is_in_step, "it has begun, and may fail"
    group.mend(group.refusal)
    group.check_in_step()
    assert group.arrive(0, APPLY) is None


def test_calls_of_one_group_follow_each_other() -> None:
    group = fresh()
    for call in (APPLY, COMMIT, OTHER_APPLY):
        assert [group.arrive(rank, call) for rank in (2, 0, 1)] == [None, None, Settled(ALL)]


# --- equality


NAN_OF_ANOTHER_KIND = struct.unpack("<d", struct.pack("<Q", 0x7FF8000000000001))[0]


@pytest.mark.parametrize(
    ("one", "other", "is_equal"),
    [
        (0.1, 0.1, True), (0.1, math.nextafter(0.1, 1), False), (0.0, -0.0, False), (math.nan, math.nan, True),
        (math.nan, NAN_OF_ANOTHER_KIND, False), (1, 1.0, False), (1, True, False), (None, 0, False), (b"a", b"a", True),
        ([1, 2.0], (1, 2.0), True), ([0.0], [-0.0], False), ({"lr": 0.0, "n": 1}, {"n": 1, "lr": 0.0}, True),
        ({"lr": 0.0}, {"lr": -0.0}, False), ({"lr": 0.0}, {}, False),
    ],
)  # fmt: skip
def test_arguments_are_equal_if_all_their_bits_are(one: object, other: object, is_equal: bool) -> None:
    assert (bits_of(one) == bits_of(other)) is is_equal
    first, second = Call("apply", (Argument("x", one),)), Call("apply", (Argument("x", other),))
    assert first.matches(second) is is_equal


def test_long_arguments_are_shown_short() -> None:
    call = Call("commit", (Argument("extra", b"\x01" * 60000), Argument("schema", {"name": "x" * 500})))
    shown = call.shown(["extra", "schema"])
    assert "60000 bytes" in shown
    assert len(shown) < 200


@pytest.mark.parametrize(
    ("rank", "world_size", "group"),
    [(-1, 2, ""), (2, 2, ""), (0, 0, ""), (0, WORLD_SIZE_MAX + 1, ""), (0, 2, "g" * (GROUP_NAME_MAX + 1))],
)
def test_a_rank_that_cannot_be_is_refused(rank: int, world_size: int, group: str) -> None:
    with pytest.raises(ConfigError):
        check_rank(rank, world_size, group)
    check_rank(WORLD_SIZE_MAX - 1, WORLD_SIZE_MAX, "g" * GROUP_NAME_MAX)
