"""Which failures fence a volume, what is said of it, and what may go on."""

from __future__ import annotations

import logging

import pytest

from paramstore.errors import VolumeError
from paramstore.storage.space.fences import WRITE_FAILURES_MAX, Fences


def failed(number: int) -> VolumeError:
    return VolumeError(f"failure {number}")


def test_a_volume_that_never_failed_is_not_fenced() -> None:
    fences = Fences()
    assert not fences.is_fenced(0)
    assert (fences.reason(0), fences.write_failures(0), fences.hint()) == (None, 0, "")
    fences.check_provable()


def test_the_second_failed_write_of_a_volume_fences_it_and_no_other() -> None:
    fences = Fences()
    fences.fail_write(0, failed(1))
    fences.fail_write(1, failed(2))
    assert not fences.is_fenced(0)
    assert not fences.is_fenced(1)
    fences.fail_write(0, failed(3))
    assert fences.is_fenced(0)
    assert not fences.is_fenced(1)
    assert fences.reason(0) == "2 writes failed, the last: failure 3"
    assert WRITE_FAILURES_MAX == 2


def test_steps_can_be_proven_on_a_volume_that_only_failed_writes_fenced() -> None:
    fences = Fences()
    for number in range(5):
        fences.fail_write(0, failed(number))
    fences.check_provable()
    assert fences.write_failures(0) == 5
    assert fences.reason(0) == "2 writes failed, the last: failure 1", "why it was fenced, not what came after"


def test_one_failed_flush_fences_and_nothing_can_be_proven_any_more() -> None:
    fences = Fences()
    fences.fail_flush(3, failed(7))
    assert fences.is_fenced(3)
    with pytest.raises(VolumeError, match=r"volume 3 is fenced \(a flush failed: failure 7\): restart the daemon after looking"):
        fences.check_provable()


def test_a_flush_that_fails_on_a_volume_fenced_by_writes_ends_the_proofs_too() -> None:
    fences = Fences()
    for number in range(2):
        fences.fail_write(0, failed(number))
    fences.fail_flush(0, failed(9))
    assert fences.reason(0) == "a flush failed: failure 9"
    with pytest.raises(VolumeError, match="failure 9"):
        fences.check_provable()


def test_who_lacks_space_is_told_of_every_fenced_volume() -> None:
    fences = Fences()
    fences.fail_flush(2, failed(1))
    fences.fail_flush(0, failed(2))
    assert fences.hint() == (
        "; volume 0 is fenced (a flush failed: failure 2), volume 2 is fenced (a flush failed: failure 1): "
        "restart the daemon after looking at the device, or making room where it is full"
    )


def test_fences_lead_the_message_of_one_who_lacks_space() -> None:
    fences = Fences()
    assert fences.first("1 byte is missing") == "1 byte is missing"
    fences.fail_flush(0, failed(2))
    assert fences.first("1 byte is missing") == (
        "volume 0 is fenced (a flush failed: failure 2): restart the daemon after looking at the device, or making room where it "
        "is full. "
        "Without it: 1 byte is missing"
    )


def test_a_fence_is_one_line_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    fences = Fences()
    with caplog.at_level(logging.ERROR):
        for number in range(4):
            fences.fail_write(1, failed(number))
    (record,) = caplog.records
    assert "volume 1 is fenced, it gets no new extents: 2 writes failed, the last: failure 1" in record.getMessage()
