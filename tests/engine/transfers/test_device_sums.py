"""Device sums are found for the very record they were made of, and for no other."""

from __future__ import annotations

import pytest

from paramstore.core.key import KeySpace
from paramstore.core.location import Extent, Identity, Located
from paramstore.core.schema import Schema
from paramstore.engine.tables.namespace import NamespaceState
from paramstore.engine.transfers.device_sums import DeviceSums
from paramstore.storage.catalog.base import NamespaceContents, NamespaceRow
from paramstore.storage.catalog.ledger import Ledger

KEY = (0, 1)
HERE = Located(Extent(0, 4096, 8192), Identity(1, 2), 77)


def namespace_of(schema: Schema) -> NamespaceState:
    row = NamespaceRow("m", {}, (0,), 4, epoch=1, sequence=0)
    return NamespaceState("m", schema, KeySpace((0,), 4), Ledger(NamespaceContents(row)), epoch=1)


def test_sums_are_found_wherever_the_record_lies_now() -> None:
    sums = DeviceSums(is_kept=True)
    sums.note("m", KEY, HERE, b"12345678")
    assert sums.find("m", KEY, HERE) == b"12345678"
    assert sums.find("m", KEY, HERE._replace(extent=Extent(3, 0, 8192))) == b"12345678"
    assert sums.change_count == 1


@pytest.mark.parametrize("other", [HERE._replace(identity=Identity(1, 3)), HERE._replace(root=78)])
def test_sums_of_another_identity_or_root_are_not_found(other: Located) -> None:
    sums = DeviceSums(is_kept=True)
    sums.note("m", KEY, HERE, b"12345678")
    assert sums.find("m", KEY, other) is None
    assert sums.find("n", KEY, HERE) is None
    sums.note("m", KEY, other, b"abcdefgh")
    assert (sums.find("m", KEY, HERE), sums.find("m", KEY, other)) == (None, b"abcdefgh")


def test_what_an_earlier_daemon_noted_gives_way_to_what_is_known() -> None:
    earlier, sums = DeviceSums(is_kept=True), DeviceSums(is_kept=True)
    earlier.note("m", KEY, HERE._replace(root=1), b"old old ")
    earlier.note("m", (0, 2), HERE, b"others'.")
    sums.note("m", KEY, HERE, b"12345678")
    sums.take_over(earlier.records())
    assert (sums.find("m", KEY, HERE), sums.find("m", (0, 2), HERE)) == (b"12345678", b"others'.")


def test_sums_are_lacking_only_of_inference_records_that_have_none_where_any_are_kept() -> None:
    served, trained = namespace_of(Schema.param({"w": ((4,), "float32")})), namespace_of(Schema.adamw({"w": (4,)}))
    sums = DeviceSums(is_kept=True)
    assert sums.lacks(served, KEY, HERE)
    assert not sums.lacks(trained, KEY, HERE)
    assert not DeviceSums(is_kept=False).lacks(served, KEY, HERE)
    sums.note("m", KEY, HERE, b"12345678")
    assert not sums.lacks(served, KEY, HERE)
