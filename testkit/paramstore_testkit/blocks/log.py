"""The log of block devices: writes with their bytes, flushes, and the notes of the run that made them, in order.

The process that serves the devices appends records to a file that both sides have open; whoever replays reads it when the
run is over. A record that was cut off, since its writer was killed, ends the log.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator

from paramstore_testkit.disks.journal import Event, Flushed, Noted, Wrote

WROTE, FLUSHED, NOTED = 1, 2, 3
_RECORD = struct.Struct("<BBxxIQ")
"""Head of a record: kind, device, 2 bytes of padding, length of the data that follow, offset on the device."""


def pack_write(device: int, offset_bytes: int, data: bytes | memoryview) -> bytes:
    """Makes the record of a write that the device has taken."""
    return _RECORD.pack(WROTE, device, len(data), offset_bytes) + data


def pack_flush(device: int) -> bytes:
    """Makes the record of a flush; it covers the writes before it on that device."""
    return _RECORD.pack(FLUSHED, device, 0, 0)


def pack_note(text: bytes | memoryview) -> bytes:
    """Makes the record of a note by `format_note`."""
    return _RECORD.pack(NOTED, 0, len(text), 0) + text


def format_note(what: str, step: int) -> bytes:
    """Makes a note as the run writes it."""
    return f"{step} {what}".encode()


def read_log(descriptor: int) -> Iterator[Event]:
    """Reads every whole record of the log, from its start."""
    size_bytes, position = os.fstat(descriptor).st_size, 0
    while position + _RECORD.size <= size_bytes:
        kind, device, length_bytes, offset_bytes = _RECORD.unpack(os.pread(descriptor, _RECORD.size, position))
        position += _RECORD.size
        if position + length_bytes > size_bytes:
            return
        data = os.pread(descriptor, length_bytes, position)
        position += length_bytes
        yield _event(kind, device, offset_bytes, data)


def _event(kind: int, device: int, offset_bytes: int, data: bytes) -> Event:
    if kind == WROTE:
        return Wrote(device, offset_bytes, data)
    if kind == FLUSHED:
        return Flushed(device)
    assert kind == NOTED, f"a record of kind {kind}"
    step, _, what = data.decode().partition(" ")
    return Noted(what, int(step))
