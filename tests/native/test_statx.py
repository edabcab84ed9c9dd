import os
from pathlib import Path

from paramstore_native.statx import direct_io_alignment


def test_a_regular_file_has_an_alignment_or_the_file_system_does_not_say(tmp_path: Path) -> None:
    descriptor = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    alignment_bytes = direct_io_alignment(descriptor)
    os.close(descriptor)
    assert alignment_bytes is None or alignment_bytes == 0 or alignment_bytes & (alignment_bytes - 1) == 0


def test_what_has_no_direct_io_says_nothing_or_no() -> None:
    reader, writer = os.pipe()
    assert not direct_io_alignment(reader)
    os.close(reader)
    os.close(writer)


def test_a_closed_descriptor_is_no_answer() -> None:
    assert direct_io_alignment(-1) is None
