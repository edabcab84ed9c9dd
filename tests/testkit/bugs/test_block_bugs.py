"""Bugs are planted only where there is something to replace. That each is found is in tests/crash/test_file_systems.py."""

from __future__ import annotations

import pytest

from paramstore.errors import ConfigError
from paramstore_testkit.bugs.block_bugs import plant, replace_in


class Owner:
    value = 1


def test_a_replacement_takes_the_place_of_what_is_there() -> None:
    replace_in(Owner, value=2)
    assert Owner.value == 2


def test_what_is_not_there_cannot_be_replaced() -> None:
    with pytest.raises(AssertionError, match="has no gone"):
        replace_in(Owner, gone=2)


def test_a_bug_that_is_not_there_names_those_that_are() -> None:
    with pytest.raises(ConfigError, match="skip_flush"):
        plant("nonsense")
