"""Pins are counted, and leases among them tell that nobody may wait for their end."""

from __future__ import annotations

import pytest

from paramstore.storage.space.pins import Pins
from paramstore_testkit.stores.small_space import extent, space


def test_an_extent_is_pinned_until_its_last_pin_goes() -> None:
    pins = Pins()
    pins.add(extent(1))
    pins.add(extent(1))
    assert (pins.remove(extent(1)), extent(1) in pins) == (False, True)
    assert (pins.remove(extent(1)), extent(1) in pins) == (True, False)
    with pytest.raises(AssertionError, match="not pinned"):
        pins.remove(extent(1))


def test_only_pins_of_transfers_end_by_themselves() -> None:
    pins = Pins()
    for _ in range(2):
        pins.add(extent(1))
        pins.note_lease(extent(1))
    pins.forget_lease(extent(1))
    assert not pins.ends_by_itself(extent(1))
    pins.forget_lease(extent(1))
    assert pins.ends_by_itself(extent(1))


def test_nothing_returns_by_itself_where_a_client_has_leased_what_was_released() -> None:
    made = space(4)
    held = made.reserve(4096)
    assert held is not None
    made.pin(held)
    made.pin(held)
    made.pins.note_lease(held)
    made.release(held)
    assert not made.has_leaving
    made.pins.forget_lease(held)
    made.unpin(held)
    assert made.has_leaving
    made.unpin(held)
    assert (made.has_leaving, made.free_bytes) == (False, 4 * 4096)
