"""A session's writable segments: only whole, aligned ranges of one's own are handed on."""

from __future__ import annotations

import pytest

from paramstore.daemon.uploads import Uploads
from paramstore.errors import ProtocolError
from paramstore_testkit.disks.machine import PlainSegment


@pytest.fixture
def uploads() -> Uploads:
    uploads = Uploads()
    uploads.add(7, PlainSegment(16384))
    return uploads


@pytest.mark.parametrize(("offset_bytes", "length_bytes"), [(0, 16384), (0, 1), (12288, 4096), (16384, 0)])
def test_a_range_in_the_segment_is_found(uploads: Uploads, offset_bytes: int, length_bytes: int) -> None:
    assert uploads.holding(7, offset_bytes, length_bytes).length_bytes == 16384


@pytest.mark.parametrize(
    ("segment", "offset_bytes", "length_bytes"), [(8, 0, 1), (7, 12288, 4097), (7, -4096, 1), (7, 100, 1), (7, 1 << 63, 1)]
)
def test_any_other_range_is_refused(uploads: Uploads, segment: int, offset_bytes: int, length_bytes: int) -> None:
    with pytest.raises(ProtocolError, match=str(segment)):
        uploads.holding(segment, offset_bytes, length_bytes)


def test_nothing_is_held_after_close(uploads: Uploads) -> None:
    uploads.close()
    uploads.close()
    with pytest.raises(ProtocolError):
        uploads.holding(7, 0, 1)
