"""Whole commits on persistent memory: at every store, persist and acknowledgement any lines may be lost, kept or torn at 8 bytes.

The figures below are promises: a run that tries fewer fails.
"""

from __future__ import annotations

import asyncio
import logging
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from paramstore.core.key import KeySpace
from paramstore.core.location import Identity
from paramstore.errors import CorruptRecord
from paramstore.fsck import reader
from paramstore.storage.format.structures import (
    NOTES_START_BYTES,
    CommitNote,
    Header,
    Superblock,
    extents_start_bytes,
    pack_description,
    pack_header,
    pack_note,
    pack_superblock,
    unpack_header,
    unpack_note,
    unpack_superblock,
)
from paramstore.storage.volume.pmem_volume import PmemVolume
from paramstore_native.libpmem2 import NO_DRAIN, NO_FLUSH, Mapping
from paramstore_testkit.crash.check import Figures
from paramstore_testkit.crash.life import SCHEMA, VOLUME_BYTES
from paramstore_testkit.crash.pmem_lines import LINE_BYTES, WORD_BYTES, PageEnumeration, PmemEnumeration
from paramstore_testkit.crash.states import Plan
from paramstore_testkit.disks.crash_disk import SMALL

ACTS = (
    "train few", "commit", "train", "write back", "commit beside training", "rollback", "train few", "snapshot", "commit",
    "reopen", "train few", "commit",
)  # fmt: skip
FULL = Plan(acts=ACTS, depth=SMALL, resume_share=0.03)
SHORT = replace(FULL, acts=("train few", "commit", "train", "commit"), resume_share=0.0, with_creation=False)
RUNS: tuple[tuple[type[PmemEnumeration], int], ...] = ((PmemEnumeration, 1), (PageEnumeration, 3))
STATES_LEAST = 50_000
DISTINCT_LEAST = 35_000
PROVEN_LEAST = 1_000
"""Steps that fsck proved without a catalog."""
KINDS = {
    "none kept": 100, "all kept": 100, "one line lost": 10_000, "one line kept": 10_000, "one line torn, others kept": 10_000,
    "one line torn, others lost": 10_000, "random lines": 300, "random words": 100, "transaction lost": 20,
    "transaction lost, all kept": 20,
}  # fmt: skip
"""States of each kind, at least."""

RECORDS_START_BYTES = extents_start_bytes(Superblock(bytes(16), bytes(16), 0))
REGIONS = {"notes": (NOTES_START_BYTES, RECORDS_START_BYTES), "records": (RECORDS_START_BYTES, VOLUME_BYTES)}

TEARS = 300
PART = SCHEMA.stored


def structures() -> dict[str, tuple[bytes, bytes, tuple[Callable[[bytes], object], ...]]]:
    """New and old bytes of each, and who reads it."""
    superblocks = [pack_superblock(Superblock(bytes([at]) * 16, bytes([at + 1]) * 16, at)) for at in (1, 2)]
    description = pack_description(SCHEMA, KeySpace.of(1, 4))
    notes = [
        pack_note(CommitNote("moe", at, 5, at, None, 4, 99 + at, ((1, 1),), 77, at, (), description, b"extra")) for at in (3, 2)
    ]
    checksums = tuple(range(len(PART.chunks())))
    headers = [pack_header(Header(b"s" * 16, "moe", (0, at), Identity(1, at), 1, at, 1, checksums), PART) for at in (5, 4)]
    return {
        "superblock": (*superblocks, (unpack_superblock, reader.parse_superblock)),
        "note": (*notes, (unpack_note, reader.parse_note)),
        "header": (*headers, (lambda data: unpack_header(data, PART), reader.parse_header)),
    }


STRUCTURES = structures()
Store = Callable[[Mapping, int, memoryview], None]


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture, one_thread: None) -> None:
    caplog.set_level(logging.CRITICAL, logger="paramstore")


@pytest.mark.slow
def test_fifty_thousand_losses_of_lines_leave_a_whole_committed_step(capsys: pytest.CaptureFixture[str]) -> None:
    figures, proven, started_s = Figures(), 0, time.process_time()
    for kind, seed in RUNS:
        enumeration = kind(seed, replace(FULL, with_creation=seed == RUNS[0][1]))
        figures.add(asyncio.run(enumeration.run()))
        proven += enumeration.checker.proven_steps
    seconds = time.process_time() - started_s
    with capsys.disabled():
        sys.stdout.write(
            f"\npmem: {figures.total} states, {figures.total_distinct} distinct, {figures.events} events, {figures.resumed} "
            f"daemons started, fsck proved {proven} steps; {seconds:.1f} s of one core\n"
        )
    assert figures.total >= STATES_LEAST
    assert figures.total_distinct >= DISTINCT_LEAST
    assert proven >= PROVEN_LEAST
    assert figures.resumed >= 2
    assert not [kind for kind, least in KINDS.items() if figures.states[kind] < least]


def store_without_drain(mapping: Mapping, offset_bytes: int, view: memoryview) -> None:
    mapping._stores.copy_and_persist(offset_bytes, view, NO_DRAIN)


def persist_the_header_alone(mapping: Mapping, offset_bytes: int, view: memoryview) -> None:
    """A record counts as whole when its header has persisted; its chunks were stored, and nobody waited for them."""
    header_bytes = SCHEMA.stored.header_bytes if bytes(view[:8]) == b"PSRECORD" else 0
    mapping._stores.copy_and_persist(offset_bytes, view[:header_bytes], 0)
    mapping._stores.copy_and_persist(offset_bytes + header_bytes, view[header_bytes:], NO_FLUSH)


def persist_the_first_line(mapping: Mapping, offset_bytes: int, view: memoryview) -> None:
    mapping._stores.copy_and_persist(offset_bytes, view[:LINE_BYTES], 0)
    mapping._stores.copy_and_persist(offset_bytes + LINE_BYTES, view[LINE_BYTES:], NO_FLUSH)


@pytest.mark.slow
@pytest.mark.parametrize("store", [store_without_drain, persist_the_header_alone, persist_the_first_line])
@pytest.mark.parametrize("region", ["notes", "records"])
def test_a_write_that_does_not_persist_all_of_it_is_found(store: Store, region: str, monkeypatch: pytest.MonkeyPatch) -> None:
    write = Mapping.write

    def write_wrongly(mapping: Mapping, offset_bytes: int, data: Sequence[memoryview]) -> None:
        if REGIONS[region][0] <= offset_bytes < REGIONS[region][1]:
            for view in data:
                store(mapping, offset_bytes, view)
                offset_bytes += view.nbytes
        else:
            write(mapping, offset_bytes, data)

    monkeypatch.setattr(Mapping, "write", write_wrongly)
    assert is_found(PmemEnumeration)


@pytest.mark.slow
def test_a_flush_that_is_left_out_on_an_ordinary_file_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PmemVolume, "flush", lambda volume: None)
    assert is_found(PageEnumeration)


@pytest.mark.parametrize("what", list(STRUCTURES))
def test_a_structure_of_which_some_words_were_stored_is_refused_by_both_readers(what: str) -> None:
    assert torn_structures_taken(what) == []


@pytest.mark.parametrize("what", list(STRUCTURES))
def test_a_reader_that_trusts_the_first_words_of_a_structure_is_found(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Magic, version and length in words that were stored whole prove nothing of the rest."""
    monkeypatch.setattr(reader, "sealed_bytes", lambda data, magic: int.from_bytes(data[12:16], "little"))
    assert torn_structures_taken(what)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [PmemEnumeration, PageEnumeration])
def test_without_a_bug_nothing_is_found(kind: type[PmemEnumeration]) -> None:
    assert not is_found(kind)


def is_found(kind: type[PmemEnumeration], plan: Plan = SHORT) -> bool:
    """Whether some crash state of a short life fails. The life itself must not: that would prove less."""
    failure: BaseException | None = None
    try:
        asyncio.run(kind(5, plan).run())
    except Exception as error:  # noqa: BLE001 - whatever it is, the state is found
        failure = error
    assert failure is None or any("crash after event" in note for note in failure.__notes__), repr(failure)
    return failure is not None


def torn_structures_taken(what: str) -> list[int]:
    """Seeds of the tears, over zeros or over the structure that lay there before, that a reader takes for whole."""
    new, old, readers = STRUCTURES[what]
    taken = []
    for seed in range(TEARS):
        source = random.Random(seed)
        below = source.choice((old, bytes(len(old))))
        least = source.choice((0.05, 0.5, 0.95))
        torn = bytearray(new)
        for at in range(0, len(new), WORD_BYTES):
            if source.random() > least:
                torn[at : at + WORD_BYTES] = below[at : at + WORD_BYTES]
        if bytes(torn) not in (new, old):
            taken += [seed for parse in readers if _takes(parse, bytes(torn))]
    return taken


def _takes(parse: Callable[[bytes], object], data: bytes) -> bool:
    try:
        parse(data)
    except CorruptRecord:
        return False
    return True
