"""What is known of one layer: chances, outlooks, and what has ended."""

from __future__ import annotations

from math import inf, log2

import pytest

from paramstore.core.visits import apply_visits, training_visits
from paramstore.policy.layer_uses import BETA, UNIT_MAX, DecayedCounts, LayerUses, Outlook


def placed(layer: int, layers: int = 3) -> LayerUses:
    """The layer in a training step of layers 0, 1, ..."""
    visits = training_visits(range(layers))
    uses = LayerUses()
    uses.place([(position, visit) for position, visit in enumerate(visits) if visit.layer == layer], cycle=len(visits))
    return uses


def test_a_share_counts_older_visits_less() -> None:
    counts = DecayedCounts()
    assert counts.share("a") == 0.0
    for used in ("ab", "a", "a"):
        counts.decay(0.5)
        for name in used:
            counts.add(name)
    assert counts.share("a") == 1.0
    assert counts.share("b") == pytest.approx(0.25 / 1.75)


def test_a_share_survives_the_end_of_the_range_of_a_float() -> None:
    counts, visits = DecayedCounts(), 1200
    for visit in range(visits):
        counts.decay(0.5)
        counts.add("always")
        if visit % 2:
            counts.add("every second")
    assert visits > log2(UNIT_MAX), "the weights were scaled back on the way"
    assert counts.share("always") == pytest.approx(1.0)
    assert counts.share("every second") == pytest.approx(2 / 3)


def test_an_outlook_counts_visits_round_the_end_of_the_cycle() -> None:
    uses = placed(1)  # visited at 1 (forward) and 4 (backward), updated at 7, of 9
    assert uses.outlook(0) == Outlook(1, 1, 7)
    assert uses.outlook(1) == Outlook(3, 9, 6)
    assert uses.outlook(4) == Outlook(6, 6, 3)
    assert uses.outlook(8) == Outlook(2, 2, 8)


def test_what_forward_used_is_sure_for_backward_and_has_ended_after_it() -> None:
    uses = placed(1)
    uses.begin(1)
    uses.use("used", 1)
    uses.hold("idle", 2)
    uses.begin(4)
    uses.fresh.clear()
    assert uses.visits_until("used", uses.outlook(3), is_current=False) == 1
    uses.use("used", 3)
    assert uses.visits_until("used", uses.outlook(5), is_current=False) == inf
    assert uses.visits_until("idle", uses.outlook(5), is_current=False) < inf, "an update leaves what was not used"


def test_a_copy_made_by_the_update_is_sure_for_the_next_forward() -> None:
    uses = placed(1)
    uses.begin(1)
    uses.use("made", 1)
    uses.begin(4)
    uses.use("made", 2)
    uses.forget("made")
    uses.hold("made", 3)
    assert uses.visits_until("made", uses.outlook(5), is_current=False) == 5


def test_a_name_used_at_every_second_visit_is_expected_a_cycle_later_on_average() -> None:
    uses = placed(0, layers=2)
    for visit in range(400):
        uses.begin(0)
        uses.use("always", visit)
        if visit % 2:
            uses.use("sometimes", visit)
        uses.begin(3)
        uses.use("always", visit)
    always, sometimes = (uses.visits_until(name, uses.outlook(5), is_current=False) for name in ("always", "sometimes"))
    assert always == pytest.approx(1.0)
    chance = 1 / (1 + BETA)  # the last visit used it: 1 + beta^2 + beta^4 ... of 1 + beta + beta^2 ...
    assert sometimes == pytest.approx(1 + (1 / chance - 1) * 6)


def test_gathered_visits_rank_by_chance_alone() -> None:
    visits = apply_visits(range(4))
    near, far = LayerUses(), LayerUses()
    for uses, layer in ((near, 2), (far, 0)):
        uses.place([(position, visit) for position, visit in enumerate(visits) if visit.layer == layer], cycle=len(visits))
        for visit in range(3):
            uses.begin(uses.uses[0])
            uses.use("steady", visit)
            if visit < 2:
                uses.use("fading", visit)
    steady, fading = (
        [uses.visits_until(name, uses.outlook(0), is_current=False) for uses in (near, far)] for name in ("steady", "fading")
    )
    assert steady == [0.0, 0.0], "whose turn comes first within an apply is not known"
    assert fading[0] == fading[1] > 0.0
