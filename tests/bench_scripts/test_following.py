"""The row of a trainer beside a reader: the same decoding in both, every commit followed, or nothing is judged."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paramstore.errors import StepMismatch
from paramstore_bench.following import Decoded, Turn, check_turns, row_of


def turn(*step_s: float, step: int | None = None, tokens: int = 4) -> Turn:
    numbers = range(len(step_s))
    decoded = [Decoded(tokens, 0.5, step=None if step is None else step + number) for number in numbers]
    return Turn(step_s, [7 + number for number in numbers], decoded)


FOLLOWING, MEMORY = turn(1.0, 1.2, step=7), turn(1.0, 1.0)


def test_what_the_trainer_keeps_of_its_speed_is_judged() -> None:
    pairs = [(FOLLOWING, MEMORY), (turn(1.0, 1.0, step=7), MEMORY), (turn(1.0, 1.0, step=7), turn(1.0, 0.98))]
    row = row_of(2, pairs, tokens=512, record_bytes=8, facts={"standing": 16.0})
    assert (row.ratio, row.ratio_min, row.ratio_max, row.holds) == (0.99, pytest.approx(2 / 2.2), 1.0, True)
    assert (row.value, row.limit, row.parts["standing"], row.parts["tokens_per_commit"]) == (512.0, 512.0, 16.0, 4)
    assert row_of(1, pairs[:1], tokens=512, record_bytes=8, facts={}).holds is False


def test_a_reader_that_was_not_at_every_commit_is_an_error() -> None:
    check_turns(FOLLOWING, MEMORY)
    for decoded in (turn(1.0, 1.0, step=6).decoded, MEMORY.decoded):
        with pytest.raises(StepMismatch, match="when step 7 was committed"):
            check_turns(replace(FOLLOWING, decoded=decoded), MEMORY)


def test_other_work_beside_it_is_an_error() -> None:
    with pytest.raises(StepMismatch, match=r"following \[4, 4\] tokens were decoded, from memory \[5, 5\]"):
        check_turns(FOLLOWING, turn(1.0, 1.0, tokens=5))
