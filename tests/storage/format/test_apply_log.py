"""A log comes back from its bytes bit for bit, fits in a commit note beside everything else, and is kept with its step."""

from __future__ import annotations

import math
import random
import struct
from dataclasses import fields, replace

import msgspec
import pytest

from paramstore.core.apply_log import MISSED_MAX, ApplyLog
from paramstore.core.optimizers import SGD, Adagrad, AdamW
from paramstore.errors import CapacityError, CorruptCatalog, CorruptRecord
from paramstore.storage.catalog import row_bytes as rows
from paramstore.storage.catalog.base import StepRow
from paramstore.storage.format.apply_log import pack_log, unpack_log
from paramstore.storage.format.structures import (
    DESCRIPTION_BYTES_MAX,
    NOTE_SLOT_BYTES,
    NOTE_SLOTS,
    CommitNote,
    NotedStep,
    pack_note,
    unpack_note,
)
from paramstore.wire.messages import EXTRA_BYTES_MAX

NOTE = CommitNote("moe", 3, 9, 70, 60, 2, 0xFEED, ((1, 4),), 0xBEEF, 200, (NotedStep(60, 8, 1, False),), b"described", b"extra")


def random_log(seed: int, count: int, *, first: int = 1, epochs: int = 1 << 40) -> ApplyLog:
    source = random.Random(seed)
    log = ApplyLog(first)
    for _ in range(count):
        betas = (source.random(), source.random())
        log = log.appended(source.randrange(epochs), AdamW(source.random(), betas, source.random(), source.random()))
    return log


@pytest.mark.parametrize("count", [1, 2, MISSED_MAX])
def test_a_log_comes_back_as_it_was(count: int) -> None:
    log = random_log(count, count, first=77)
    assert unpack_log(pack_log(log)) == log


def test_every_optimizer_s_options_come_back() -> None:
    log = ApplyLog(3)
    for options in (SGD(lr=0.1, momentum=0.9, nesterov=True), SGD(lr=0.2)):
        log = log.appended(1, options)
    assert unpack_log(pack_log(log)) == log
    other = ApplyLog().appended(2, Adagrad(lr=0.3, initial_accumulator_value=0.1))
    assert unpack_log(pack_log(other)) == other


def test_a_log_of_nothing_has_no_bytes() -> None:
    assert pack_log(ApplyLog()) == b""
    assert unpack_log(b"") == ApplyLog()


def test_every_number_keeps_its_bits_in_a_run_of_equal_ones() -> None:
    values = [0.0, -0.0, 5e-324, math.pi, 1, 1.0, 1, 0.1 + 0.2, 0.3]
    log = ApplyLog()
    for value in values:
        log = log.appended(1, AdamW(lr=abs(value), weight_decay=value))
    found = [entry.options.weight_decay for entry in unpack_log(pack_log(log)).entries]
    assert {type(value) for value in found} == {float}
    assert [struct.pack("<d", value) for value in found] == [struct.pack("<d", value) for value in values]


def test_options_that_do_not_change_take_no_room() -> None:
    log = ApplyLog()
    for _ in range(MISSED_MAX):
        log = log.appended(4, AdamW())
    assert len(pack_log(log)) < 128


SHORT_COLUMN = b"\x93\x01\x02\x81\xa5epoch\x92\x01\x01"


@pytest.mark.parametrize("data", [b"\x93", b"\x93\x01\x01\x80", b"\x00", pack_log(random_log(1, 2))[:-1], SHORT_COLUMN])
def test_what_is_no_log_is_refused(data: bytes) -> None:
    with pytest.raises(CorruptCatalog, match="cannot be read"):
        unpack_log(data)


def test_a_log_with_an_unknown_rule_is_refused() -> None:
    packed = pack_log(random_log(1, 2)).replace(b"adamw", b"bread")
    with pytest.raises(CorruptCatalog, match="bread"):
        unpack_log(packed)


# --- in a commit note


def test_a_note_has_its_log_and_one_without_is_what_it_always_was() -> None:
    log = pack_log(random_log(5, 20))
    assert unpack_note(pack_note(replace(NOTE, log=log))) == replace(NOTE, log=log)
    without = pack_note(NOTE)
    assert unpack_note(without) == NOTE
    assert without[120] == 1, "a parent, and nothing else that the byte says"
    assert pack_note(replace(NOTE, parent=None, log=log))[120] == 2


def test_the_longest_log_fits_beside_the_longest_of_everything_else_but_the_bounds() -> None:
    log = pack_log(random_log(5, MISSED_MAX, first=1 << 40, epochs=1))
    steps = tuple(NotedStep(number, number, number, False) for number in range(NOTE_SLOTS // 2))
    full = replace(NOTE, extra=bytes(EXTRA_BYTES_MAX), description=bytes(DESCRIPTION_BYTES_MAX), steps=steps, log=log)
    assert len(pack_note(full)) <= NOTE_SLOT_BYTES
    with pytest.raises(CapacityError, match=f"an apply log of {len(log)} bytes"):
        pack_note(replace(full, epoch_bounds=((1, 1),) * 400))


def test_a_note_whose_flags_and_length_disagree_is_refused() -> None:
    log = pack_log(random_log(5, 20))
    for note, flags in ((NOTE, 3), (replace(NOTE, log=log), 1), (replace(NOTE, log=log), 7)):
        data = bytearray(pack_note(note))
        data[120] = flags
        (length,) = struct.unpack_from("<I", data, 12)
        struct.pack_into("<Q", data, 16, _checksum(bytes(data[24:length])))
        with pytest.raises(CorruptRecord, match="flags"):
            unpack_note(data)


def _checksum(data: bytes) -> int:
    from xxhash import xxh3_64_intdigest

    return int(xxh3_64_intdigest(data))


# --- in the catalog


def test_a_step_s_row_has_its_log_and_one_without_is_what_it_always_was() -> None:
    key = rows.step_key(1, 7)
    without = StepRow(7, 3, 2, 9, b"extra", 12, is_snapshot=True)
    assert rows.unpack_step(key, rows.pack_step(key, without)) == without
    body = msgspec.msgpack.decode(rows.pack_step(key, without)[rows.CHECKSUM_BYTES :])
    assert body == [3, 2, 9, b"extra", 12, True, False]
    logged = replace(without, log=pack_log(random_log(6, 3)))
    assert rows.unpack_step(key, rows.pack_step(key, logged)) == logged


def test_every_option_of_the_rule_is_a_column() -> None:
    _, _, columns = msgspec.msgpack.decode(pack_log(random_log(1, 1)))
    assert set(columns) == {"epoch", "kind", *(field.name for field in fields(AdamW))}
