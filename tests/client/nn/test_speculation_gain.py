"""Whether guesses are made: the way that is faster stays, and trials of the other way become rare."""

from __future__ import annotations

import random

import pytest

from paramstore_client.nn.speculation_gain import FIRST_STAY, LONGEST_STAY, TRIAL, SpeculationGain


class Forwards:
    """Forwards on a clock of their own. with_s, without_s: what one takes. recomputes: whether a backward follows each of them."""

    def __init__(
        self, with_s: float, without_s: float, *, layers: tuple[int, ...] = (3, 4, 5), spread: float = 0.0, seed: int = 0,
        recomputes: bool = False,
    ) -> None:  # fmt: skip
        self.gain = SpeculationGain()
        self.layers = layers
        self.recomputes = recomputes
        self.seconds = {True: with_s, False: without_s}
        self.spread = spread
        self.random = random.Random(seed)
        self.now_s = 0.0

    def run(self, count: int) -> list[bool]:
        """Which of so many forwards guessed."""
        guessed = []
        for _ in range(count):
            took_s = self.seconds[self.gain.is_on] * self.random.uniform(1 - self.spread, 1 + self.spread)
            ways = set[bool]()
            for layer in self.layers:
                ways.add(self.gain.begin_layer(layer, self.now_s))
                self.now_s += took_s / len(self.layers)
                self.gain.end_layer(self.now_s)
            (way,) = ways  # no forward goes both ways
            for layer in reversed(self.layers):  # a checkpoint's recomputation
                self.now_s += 5.0 if self.recomputes else 0.0
                if self.recomputes:
                    self.gain.begin_layer(layer, self.now_s)
                    self.gain.end_layer(self.now_s + 1.0)
            self.now_s += self.random.uniform(0, 100)  # until the next forward, for what somebody else does
            guessed.append(way)
        return guessed


def test_both_ways_are_tried_first() -> None:
    # The end of a forward is known at the next one's begin.
    assert Forwards(1.0, 1.0).run(2 * TRIAL) == [True] * TRIAL + [False] * TRIAL


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("layers", [(0,), (0, 1), (3, 4, 5), tuple(range(40))])
@pytest.mark.parametrize(("with_s", "is_on"), [(0.9, True), (0.99, False), (1.0, False), (1.2, False)])
def test_the_faster_way_stays_and_no_gain_is_as_bad_as_a_loss(
    with_s: float, is_on: bool, layers: tuple[int, ...], recomputes: bool
) -> None:
    forwards = Forwards(with_s, 1.0, layers=layers, spread=0.005, recomputes=recomputes and len(layers) > 1)
    forwards.run(2 * TRIAL)
    assert forwards.run(FIRST_STAY) == [is_on] * FIRST_STAY
    assert forwards.run(TRIAL) == [not is_on] * TRIAL, "it is tried again"


def test_a_way_that_wins_again_stays_longer_each_time() -> None:
    forwards = Forwards(1.1, 1.0)
    assert sum(forwards.run(20_000)) < 0.02 * 20_000
    longest = max(map(len, "".join("x" if way else " " for way in forwards.run(5000)).split("x")))
    assert longest == LONGEST_STAY


def test_what_changes_is_found_out() -> None:
    forwards = Forwards(1.1, 1.0)
    forwards.run(5000)
    forwards.seconds[True] = 0.8
    guessed = forwards.run(3 * LONGEST_STAY)
    assert all(guessed[-FIRST_STAY:])


@pytest.mark.parametrize("seed", range(5))
def test_times_that_differ_by_a_fifth_from_one_to_the_next_cost_little(seed: int) -> None:
    for with_s in (0.8, 1.2):
        forwards = Forwards(with_s, 1.0, spread=0.2, seed=seed)
        guessed = forwards.run(4000)
        took_s = sum(forwards.seconds[way] for way in guessed)
        assert took_s < 1.02 * 4000 * min(with_s, 1.0)
