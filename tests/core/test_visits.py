"""Cycles of visits: what a step and a ring declare, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from paramstore.core.visits import VISITS_MAX, Visit, VisitKind, apply_visits, check_visits, ring_visits, training_visits
from paramstore.errors import ConfigError

ROUTED, REPEATED, GATHERED = VisitKind.ROUTED, VisitKind.REPEATED, VisitKind.GATHERED
UPDATED, REPLACED = VisitKind.UPDATED, VisitKind.REPLACED


def test_a_step_goes_up_and_down_for_each_micro_batch_and_ends_with_the_update() -> None:
    once = [(3, ROUTED), (7, ROUTED), (7, REPEATED), (3, REPEATED)]
    assert list(training_visits([3, 7])) == [*once, (7, UPDATED), (3, UPDATED)]
    assert list(training_visits([3, 7], micro_batches=2, is_exact=True)) == [*once, *once, (7, REPLACED), (3, REPLACED)]


def test_an_apply_gathers_in_backward_order_after_what_the_forward_caught_up() -> None:
    assert list(apply_visits([3, 7])) == [(7, GATHERED), (3, GATHERED)]
    assert list(apply_visits([3, 7], is_exact=True)) == [(3, ROUTED), (7, ROUTED), (7, GATHERED), (3, GATHERED)]


def test_a_ring_goes_round() -> None:
    assert list(ring_visits([5, 2])) == [(5, ROUTED), (2, ROUTED)]


def test_pairs_become_visits() -> None:
    pairs = [(0, "routed"), (0, "repeated")]
    assert check_visits(pairs, [0], what="x") == (Visit(0, ROUTED), Visit(0, REPEATED))
    assert check_visits([], [0], what="x") == ()


@pytest.mark.parametrize(
    ("pairs", "words"),
    [
        ([(0, "routed"), (1, "routed")], r"param_visits\[1\]=\(1, 'routed'\): give .* of a layer"),
        ([(False, "routed")], r"param_visits\[0\]=\(False, 'routed'\): give"),
        ([(0, ["routed"])], r"param_visits\[0\]=\(0, \['routed'\]\): give"),
        ([(0, "backward")], "one of routed, repeated"),
        ([(0, "repeated")], "no visit of 1 is routed"),
        ([(0, "routed")] * (VISITS_MAX + 1), f"at most {VISITS_MAX}"),
    ],
)
def test_what_is_no_cycle_is_refused(pairs: list[tuple[int, Any]], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_visits(pairs, [0], what="param_visits")


@pytest.mark.parametrize(("layers", "micro_batches"), [([], 1), ([1, 1], 1), ([0], 0), (range(64), 1000)])
def test_a_step_that_is_none_is_refused(layers: list[int], micro_batches: int) -> None:
    with pytest.raises(ConfigError):
        training_visits(layers, micro_batches=micro_batches)
