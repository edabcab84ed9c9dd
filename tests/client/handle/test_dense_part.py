"""The note of a dense part comes back from the bytes of its step, beside the caller's; other bytes are the caller's alone."""

from __future__ import annotations

import json

import pytest

from paramstore.errors import CheckpointError
from paramstore_client.handle.dense_part import HEAD, MAGIC, VERSION, DensePart, callers_extra
from paramstore_client.handle.origin import Origin

DENSE = DensePart("/runs/dense", "moe.0123abcd.7.2.00112233445566aa.safetensors", 4096, "00112233445566aa")


@pytest.mark.parametrize("extra", [b"", b"my own", b"\0\xff", Origin("a", "b").to_extra(), DENSE.to_extra()])
def test_the_note_and_the_bytes_of_the_caller_come_back(extra: bytes) -> None:
    packed = DensePart(DENSE.directory, DENSE.file, DENSE.size_bytes, DENSE.xxh3, extra).to_extra()
    found = DensePart.from_extra(packed)
    assert found is not None
    assert (found.path, found.size_bytes, found.xxh3) == (DENSE.path, DENSE.size_bytes, DENSE.xxh3)
    assert found.extra == callers_extra(packed) == extra


@pytest.mark.parametrize("extra", [b"", b"my own", b"{}", b"\xff\0", MAGIC[:-1], Origin("a", "b").to_extra()])
def test_other_bytes_note_no_dense_part(extra: bytes) -> None:
    assert DensePart.from_extra(extra) is None
    assert callers_extra(extra) == extra


def test_a_note_of_another_version_says_so() -> None:
    newer = MAGIC + HEAD.pack(VERSION + 1, 2) + b"{}"
    with pytest.raises(CheckpointError, match=f"in version {VERSION + 1}; this one reads {VERSION}"):
        DensePart.from_extra(newer)
    assert Origin.from_extra(newer) is None


def test_a_note_that_is_cut_off_or_lacks_something_is_refused() -> None:
    whole = DENSE.to_extra()
    for length in range(len(MAGIC), len(whole)):
        with pytest.raises(CheckpointError, match="cannot be read"):
            DensePart.from_extra(whole[:length])
    for note in ({"file": "a"}, {"directory": "/", "file": "../a", "size_bytes": 1, "xxh3": "a"}, []):
        packed = json.dumps(note).encode()
        with pytest.raises(CheckpointError, match="cannot be read"):
            DensePart.from_extra(MAGIC + HEAD.pack(VERSION, len(packed)) + packed)


def test_the_origin_is_found_beside_a_dense_part() -> None:
    origin = Origin("a" * 16, "/models/first")
    packed = DensePart(DENSE.directory, DENSE.file, DENSE.size_bytes, DENSE.xxh3, origin.to_extra()).to_extra()
    assert Origin.from_extra(packed) == origin
