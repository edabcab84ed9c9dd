"""A crash disk leaves what a power cut may leave, and knows equal images by their digest."""

from __future__ import annotations

from random import Random

import pytest

from paramstore.storage.catalog.base import Change
from paramstore.testing.catalogs import namespace_row
from paramstore_testkit.disks.crash_disk import FULL, SMALL, CrashDisk, Edit, State, copied
from paramstore_testkit.disks.journal import Applied, Flushed, FlushFailed, Wrote

PAGE = 4096
ONES, TWOS = b"\1" * PAGE, b"\2" * PAGE


def disk_after(*events: Wrote | Flushed | FlushFailed | Applied, volumes: int = 1) -> CrashDisk:
    disk = CrashDisk.blank(volume_count=volumes, volume_bytes=4 * PAGE)
    for event in events:
        disk.advance(event)
    return disk


def left(disk: CrashDisk, state: State) -> bytes:
    """The image of volume 0 that `state` leaves."""
    disk.edit(state.edits)
    image = bytes(disk.image[0])
    disk.restore(state.edits)
    assert bytes(disk.image[0]) == disk.durable[0]
    return image


def images(disk: CrashDisk, event: Wrote | None = None) -> dict[str, set[bytes]]:
    """By kind of state."""
    found: dict[str, set[bytes]] = {}
    for state in disk.states(event, Random(1), FULL):
        found.setdefault(state.kind, set()).add(left(disk, state))
    return found


def test_a_write_may_be_lost_until_a_flush_and_not_after() -> None:
    disk = disk_after(Wrote(0, 0, ONES))
    assert images(disk)["none kept"] == {bytes(4 * PAGE)}
    assert images(disk)["all kept"] == {ONES + bytes(3 * PAGE)}
    disk.advance(Flushed(0))
    assert images(disk) == {"none kept": {ONES + bytes(3 * PAGE)}}


def test_a_flush_of_one_volume_settles_nothing_on_another() -> None:
    disk = disk_after(Wrote(0, 0, ONES), Wrote(1, 0, ONES), Flushed(1), volumes=2)
    assert [pending.edit.volume for pending in disk.pending] == [0]
    assert disk.durable[1][:PAGE] == ONES


def test_what_a_failed_flush_left_in_doubt_no_later_flush_settles() -> None:
    disk = disk_after(Wrote(0, 0, ONES), FlushFailed(0), Wrote(0, PAGE, TWOS), Flushed(0))
    assert images(disk)["none kept"] == {bytes(PAGE) + TWOS + bytes(2 * PAGE)}
    assert images(disk)["all kept"] == {ONES + TWOS + bytes(2 * PAGE)}


def test_doubt_ends_where_something_else_is_durably_written() -> None:
    disk = disk_after(Wrote(0, 0, ONES * 3), FlushFailed(0), Wrote(0, PAGE, TWOS), Flushed(0))
    assert [(pending.edit.offset_bytes, len(pending.edit.data)) for pending in disk.pending] == [(0, PAGE), (2 * PAGE, PAGE)]
    assert images(disk)["none kept"] == {bytes(PAGE) + TWOS + bytes(2 * PAGE)}
    assert images(disk)["all kept"] == {ONES + TWOS + ONES + bytes(PAGE)}


def test_each_write_is_lost_alone_and_kept_alone() -> None:
    disk = disk_after(Wrote(0, 0, ONES), Wrote(0, PAGE, TWOS))
    end = bytes(2 * PAGE)
    assert images(disk)["one lost"] == {ONES + bytes(PAGE) + end, bytes(PAGE) + TWOS + end}
    assert images(disk)["one kept"] == images(disk)["one lost"]


def test_the_newest_write_stops_at_every_sector_with_garbage_or_without() -> None:
    event = Wrote(0, PAGE, TWOS)
    disk = disk_after(Wrote(0, 0, ONES), event)
    found = images(disk, event)
    ends = [TWOS[:border] + bytes(PAGE - border) for border in range(512, PAGE, 512)]
    assert found["last torn at 512"] == {first + end + bytes(2 * PAGE) for first in (ONES, bytes(PAGE)) for end in ends}
    assert len(found["garbage in a torn 512"]) == 2 * 8
    assert len(found["garbage in a torn 4096"]) == 2
    assert all(image[:PAGE] in (ONES, bytes(PAGE)) for image in found["garbage in a torn 512"])
    assert "last torn at 512" not in {state.kind for state in disk.states(event, Random(1), SMALL)}


def test_one_volume_may_have_everything_and_the_other_nothing() -> None:
    disk = disk_after(Wrote(0, 0, ONES), Wrote(1, 0, TWOS), volumes=2)
    kept = [state.edits for state in disk.states(None, Random(1), FULL) if state.kind == "one volume kept"]
    assert [[edit.volume for edit in edits] for edits in kept] == [[0], [1]]


def test_a_transaction_is_lost_or_there() -> None:
    event = Applied(Change(put_namespaces=(namespace_row(),)))
    disk = disk_after(event)
    kinds = {state.kind: state.is_applied for state in disk.states(event, Random(1), FULL)}
    assert kinds == {"none kept": True, "transaction lost": False, "transaction lost, all kept": False}
    assert disk.before.contents.namespaces == {}
    assert list(disk.catalog.contents.namespaces) == ["moe"]
    assert disk.before.number != disk.catalog.number


def test_equal_images_have_equal_digests_whichever_way_they_came_about() -> None:
    one_way = disk_after(Wrote(0, 0, ONES), Wrote(0, PAGE, TWOS), Flushed(0))
    other_way = disk_after(Wrote(0, PAGE, ONES), Flushed(0), Wrote(0, PAGE, TWOS), Flushed(0))
    assert one_way.digest != other_way.digest
    effect = other_way.edit([Edit(0, 0, ONES)])
    assert effect.digest == one_way.digest
    assert list(effect.delta) == [0]
    other_way.restore([Edit(0, 0, ONES)])
    assert other_way.edit([]).digest == other_way.digest


def test_the_same_bytes_elsewhere_are_another_image() -> None:
    assert disk_after(Wrote(0, 0, ONES), Flushed(0)).digest != disk_after(Wrote(0, PAGE, ONES), Flushed(0)).digest


def test_a_write_that_changes_nothing_is_no_crash_state_of_its_own() -> None:
    disk = disk_after(Wrote(0, 0, bytes(PAGE)))
    assert not disk.pending
    disk = disk_after(Wrote(0, 0, ONES), Wrote(0, 0, bytes(PAGE)))  # this one takes the other's bytes away
    assert len(disk.pending) == 2
    assert images(disk)["all kept"] == {bytes(4 * PAGE)}


@pytest.mark.parametrize("image", [b"", bytes(70_000), b"\1" + bytes(70_000) + b"\2", b"\3" * 65_536])
def test_a_copy_has_the_same_bytes(image: bytes) -> None:
    assert copied(bytearray(image)) == image
