"""Records that are read past the daemon are the daemon's, or nobody gets them."""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from paramstore.core.checksums import device_sums as on_host
from paramstore.core.checksums import pack_sums
from paramstore.core.location import Extent, Identity
from paramstore.core.schema import Schema
from paramstore.errors import CorruptRecord, LeaseError, VolumeError
from paramstore_client.connection.volume_file import VolumeFile
from paramstore_client.extents import extent_reader
from paramstore_client.extents.extent_reader import ExtentReader
from paramstore_client.extents.volume_reads import KvikioReads
from paramstore_client.handle.extent_lease import LeasedExtent
from paramstore_client.namespace import Namespace, acquire_extents

CPU, KEY = torch.device("cpu"), (0, 2)


def image_for(reader: Namespace) -> torch.Tensor:
    return torch.full((reader.schema.record_bytes,), 0x5A, dtype=torch.uint8)


def leased_image(reader: Namespace, key: tuple[int, int] = KEY) -> torch.Tensor:
    """The key's fields by the daemon, as they lie in an image behind its header."""
    with reader.acquire([key]) as lease:
        return lease.image(key)[reader.schema.stored.header_bytes :].clone()


def read(reader: Namespace, by: ExtentReader, key: tuple[int, int] = KEY) -> torch.Tensor:
    """What `by` reads of a key, behind the header; the identity is the lease's."""
    image = image_for(reader)
    with acquire_extents(reader, [key]) as lease, reader.acquire([key]) as held:
        assert by.read(lease, key, image) == held.identity(key)
    return image[reader.schema.stored.header_bytes :]


def test_a_record_comes_through_the_hosts_memory_as_the_daemon_has_it(reader: Namespace) -> None:
    by = ExtentReader(reader.schema.stored, CPU, direct=None)
    for key in [(0, expert) for expert in range(reader.experts)]:
        assert torch.equal(read(reader, by, key), leased_image(reader, key))
    assert not by.is_direct


def test_a_record_comes_by_kvikio_with_direct_reads_and_its_first_way(reader: Namespace, fake_kvikio: Any) -> None:
    kvikio = fake_kvikio()
    by = ExtentReader(reader.schema.stored, CPU, direct=KvikioReads(kvikio))
    assert torch.equal(read(reader, by), leased_image(reader))
    assert (kvikio.read_count, by.is_direct) == (1, True)
    assert kvikio.settings == [{"auto_direct_io_read": True, "compat_mode": kvikio.CompatMode.AUTO}]


def raising(target: Any, count: int) -> int:
    if count == 1:
        target[:] = 0xDE
        raise RuntimeError("the drive is gone")
    return len(target)


def short(target: Any, count: int) -> int:
    target[4096:] = 0xDE
    return 4096


def lying(target: Any, count: int) -> int:
    target[5000] ^= 1
    return len(target)


@pytest.mark.parametrize(
    ("spoil", "words"), [(raising, "the drive is gone"), (short, "read 4096 of"), (lying, "another device sum")]
)
def test_kvikio_that_fails_or_lies_is_said_once_and_the_bytes_are_right(
    reader: Namespace, fake_kvikio: Any, caplog: pytest.LogCaptureFixture, spoil: Callable[[Any, int], int], words: str
) -> None:
    kvikio = fake_kvikio(spoil)
    by = ExtentReader(reader.schema.stored, CPU, direct=KvikioReads(kvikio))
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert torch.equal(read(reader, by), leased_image(reader))
    assert caplog.text.count("through the host's memory from here on") == 1
    assert words in caplog.text
    assert words in by.refusal
    assert (by.is_direct, kvikio.read_count <= 2) == (False, True)


class Wordless:
    """Reads that bring wrong bytes and fail without saying why."""

    def read(self, file: VolumeFile, offset_bytes: int, into: torch.Tensor) -> None:
        into.fill_(0xDE)
        raise VolumeError


def test_a_failure_without_a_word_is_a_failure(reader: Namespace) -> None:
    by = ExtentReader(reader.schema.stored, CPU, direct=Wordless())
    assert torch.equal(read(reader, by), leased_image(reader))
    assert (by.is_direct, by.refusal) == (False, "VolumeError()")


def test_the_cpu_proves_by_numpy_not_by_torchs_expression(reader: Namespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(extent_reader, "device_sums")
    assert torch.equal(read(reader, ExtentReader(reader.schema.stored, CPU, direct=None)), leased_image(reader))


def test_a_released_lease_reads_nothing(reader: Namespace) -> None:
    lease = acquire_extents(reader, [KEY])
    lease.release()
    with pytest.raises(LeaseError, match="was released"):
        ExtentReader(reader.schema.stored, CPU, direct=None).read(lease, KEY, image_for(reader))


@pytest.mark.parametrize("is_direct", [True, False])
def test_a_record_that_is_damaged_after_its_lease_is_never_served(
    reader: Namespace, volume: Path, fake_kvikio: Any, is_direct: bool
) -> None:
    part = reader.schema.stored
    places = {"header": 100, "first field": part.fields[0].offset_bytes + 1_200_000, "last byte": part.fields[1].offset_bytes + 6}
    kvikio = KvikioReads(fake_kvikio()) if is_direct else None
    by = ExtentReader(part, CPU, direct=kvikio)
    with acquire_extents(reader, [KEY]) as lease, volume.open("r+b", buffering=0) as file:
        for name, place in places.items():
            at = lease[KEY].extent.offset_bytes + place
            (byte,) = os.pread(file.fileno(), 1, at)
            os.pwrite(file.fileno(), bytes([byte ^ 0x10]), at)
            try:
                with pytest.raises(CorruptRecord, match=r"record \(0, 2\) of namespace 'm'.*offset"):
                    by.read(lease, KEY, image_for(reader))
            finally:
                os.pwrite(file.fileno(), bytes([byte]), at)
            assert by.read(lease, KEY, image_for(reader)), name
    assert by.is_direct == is_direct, "what the volume has is not kvikio's fault"


class OneRecord:
    """A lease of one record, and reads that bring whatever bytes they are told to."""

    namespace = "m"

    def __init__(self, part: Any, image: numpy.ndarray) -> None:
        sums = pack_sums(on_host(memoryview(image), part.chunks()))
        from paramstore.core.checksums import header_root

        root = header_root(memoryview(image)[: part.header_bytes])
        self.leased = LeasedExtent(None, Extent(0, 0, len(image)), Identity(1, 1), root, sums)  # type: ignore[arg-type]
        self.bytes = image

    def __getitem__(self, key: object) -> LeasedExtent:
        return self.leased

    def read(self, file: VolumeFile, offset_bytes: int, into: torch.Tensor) -> None:
        into.copy_(torch.from_numpy(self.bytes))


def damages(whole: numpy.ndarray, chance: random.Random, count: int) -> Iterator[numpy.ndarray]:
    """`count` damaged copies: flips of 1, 2 and 8 bits, of two words' top bits, pages swapped or zeroed, shifts by sectors."""
    pages, words = len(whole) // 4096, len(whole) // 4
    for number in range(count):
        image = whole.copy()
        kind = number % 7
        if kind < 3:
            for place in chance.sample(range(len(whole)), (1, 2, 8)[kind]):
                image[place] ^= 1 << chance.randrange(8)
        elif kind == 3:
            image[[place * 4 + 3 for place in chance.sample(range(words), 2)]] ^= 0x80
        elif kind == 4:
            one, other = (slice(page * 4096, page * 4096 + 4096) for page in chance.sample(range(pages), 2))
            image[one], image[other] = whole[other], whole[one]
        elif kind == 5:
            page = chance.randrange(pages)
            image[page * 4096 : page * 4096 + 4096] = 0
        else:
            image = numpy.roll(whole, 512 * chance.randrange(1, pages * 8))
        yield image


@pytest.mark.parametrize(
    ("seed", "count"), [(50, 1900), *(pytest.param(seed, 1900, marks=pytest.mark.soak) for seed in range(51, 61))]
)
def test_of_all_damages_none_is_served(seed: int, count: int) -> None:
    part = Schema.param({"w": ((64, 1024), "bfloat16"), "v": ((101, 1001), "uint8")}).stored
    whole = numpy.random.default_rng(seed).integers(0, 256, part.image_bytes, dtype=numpy.uint8)
    padding = numpy.ones(part.image_bytes, dtype=bool)
    padding[: part.header_bytes] = False
    for field in part.fields:
        padding[field.offset_bytes : field.offset_bytes + field.length_bytes] = False
    whole[padding] = 0
    record = OneRecord(part, whole)
    by, image = ExtentReader(part, CPU, direct=None, bounce=record), torch.empty(part.image_bytes, dtype=torch.uint8)
    by.read(record, KEY, image)  # type: ignore[arg-type]
    served = 0
    for damaged in damages(whole, random.Random(seed), count):
        if numpy.array_equal(damaged[~padding], whole[~padding]):
            continue  # only what belongs to no field
        record.bytes = damaged
        try:
            by.read(record, KEY, image)  # type: ignore[arg-type]
        except CorruptRecord:
            continue
        served += 1
    assert served == 0, f"seed {seed}"
