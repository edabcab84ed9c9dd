"""What an open apply keeps in memory for those who will probably come."""

from __future__ import annotations

from paramstore.core.optimizers import AdamW
from paramstore.engine.planner.apply_order import awaited_keys
from paramstore.engine.tables.apply import Claims


def test_the_hottest_records_are_awaited_and_no_more_than_there_is_room_for() -> None:
    heat = {(0, 0): 1.0, (0, 1): 0.9, (1, 0): 0.5, (1, 1): 0.1}
    assert awaited_keys(heat, 8) == {(0, 0), (0, 1), (1, 0)}
    assert awaited_keys(heat, 2) == {(0, 0), (0, 1)}
    assert awaited_keys(heat, -1) == set()
    assert awaited_keys({}, 8) == set()


def test_an_open_apply_has_begun_with_its_first_claim_or_its_end() -> None:
    claims = Claims(AdamW(), 1.0, is_open=True)
    assert not claims.has_begun
    claims.gradients[0, 0] = ()
    assert claims.has_begun
    assert Claims(AdamW(), 1.0).has_begun
