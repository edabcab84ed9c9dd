"""The error tree: what is drawn is what there is, and errors survive the wire."""

from __future__ import annotations

import re

import pytest

from paramstore import errors


def test_the_tree_at_the_top_of_the_file_names_every_class() -> None:
    drawn = set(re.findall(r"[├└]── (\w+)", errors.__doc__ or "")) | {"ParamStoreError"}
    assert drawn == set(errors.CLASSES)


@pytest.mark.parametrize("name", sorted(errors.CLASSES))
def test_every_class_comes_back_from_the_wire_with_its_message(name: str) -> None:
    error = errors.from_wire(name, "key (1, 2): no")
    assert type(error) is errors.CLASSES[name]
    assert str(error) == "key (1, 2): no"


@pytest.mark.parametrize("name", sorted(errors.CLASSES))
def test_every_class_says_what_it_is_for(name: str) -> None:
    assert errors.CLASSES[name].__doc__


@pytest.mark.parametrize("name", ["ValueError", "SystemExit", "", "os.system"])
def test_an_unknown_name_becomes_the_base_class_and_is_kept(name: str) -> None:
    error = errors.from_wire(name, "why")
    assert type(error) is errors.ParamStoreError
    assert str(error) == f"{name}: why"


def test_a_wait_that_ran_out_is_a_timeout_for_everybody() -> None:
    assert issubclass(errors.WaitTimeout, TimeoutError)
    assert isinstance(errors.from_wire("WaitTimeout", "x"), TimeoutError)


def test_corruption_is_a_volume_s_fault_and_a_lost_daemon_can_be_told_by_its_base() -> None:
    assert issubclass(errors.CorruptRecord, errors.VolumeError)
    assert issubclass(errors.ForkedClient, errors.StoreUnavailable)
