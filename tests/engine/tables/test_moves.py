"""The outbox is empty exactly when there is nothing to carry out."""

from __future__ import annotations

from typing import Any

import pytest

from paramstore.engine.tables.moves import Outbox


def test_a_new_outbox_is_empty() -> None:
    assert Outbox().is_empty


@pytest.mark.parametrize("box", ["moves", "promoted", "finished", "woken"])
def test_an_outbox_with_anything_to_carry_out_is_not_empty(box: str) -> None:
    outbox: Any = Outbox()
    getattr(outbox, box).append(object())
    assert not outbox.is_empty
