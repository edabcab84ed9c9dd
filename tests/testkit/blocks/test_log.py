"""The log of a block device: what was written is read, in order; what was cut off is not."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from paramstore_testkit.blocks.log import format_note, pack_flush, pack_note, pack_write, read_log
from paramstore_testkit.disks.journal import Flushed, Noted, Wrote


@pytest.fixture
def log() -> Iterator[int]:
    descriptor = os.memfd_create("log")
    yield descriptor
    os.close(descriptor)


def test_records_are_read_in_the_order_in_which_they_were_appended(log: int) -> None:
    for record in (pack_write(2, 1 << 40, b"abc"), pack_note(format_note("rolled back", 7)), pack_flush(1), pack_write(0, 0, b"")):
        os.write(log, record)
    assert list(read_log(log)) == [Wrote(2, 1 << 40, b"abc"), Noted("rolled back", 7), Flushed(1), Wrote(0, 0, b"")]


def test_a_record_that_was_cut_off_anywhere_ends_the_log(log: int) -> None:
    whole, last = pack_flush(3), pack_write(1, 4096, b"abcd")
    for length in range(len(last)):
        os.truncate(log, 0)
        os.pwrite(log, whole + last[:length], 0)
        assert list(read_log(log)) == [Flushed(3)]


def test_a_log_that_nobody_wrote_is_empty(log: int) -> None:
    assert list(read_log(log)) == []
