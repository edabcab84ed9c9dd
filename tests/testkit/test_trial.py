"""A life does its acts in the order of its seed, and what goes wrong in it says how to repeat it."""

from __future__ import annotations

import pytest

from paramstore_testkit.trial import Trial

WEIGHTS = {"go": 3, "stop": 1}


class Walk(Trial):
    """Goes and stops; falls where it is told to."""

    falls_at = 1000
    looks = 0

    async def act(self, name: str) -> None:
        if len(self.acts) == self.falls_at:
            raise KeyError(name)

    async def after_act(self) -> None:
        self.looks += 1

    def walk(self, count: int) -> Walk:
        self.run(self.live_through(self.draw(WEIGHTS) for _ in range(count)))
        return self


def test_a_seed_decides_the_acts_and_each_is_counted_and_looked_at() -> None:
    walk = Walk(3).walk(50)
    assert walk.acts == Walk(3).walk(50).acts != Walk(4).walk(50).acts
    assert walk.figures == {name: walk.acts.count(name) for name in WEIGHTS}
    assert walk.figures.total() == walk.looks == 50


def test_a_failure_says_its_seed_and_the_acts_so_far() -> None:
    walk = Walk(3)
    walk.falls_at = 4
    with pytest.raises(KeyError) as failure:
        walk.walk(50)
    (note,) = failure.value.__notes__
    assert note.startswith(f"seed 3; acts so far: {', '.join(Walk(3).walk(4).acts)};")
