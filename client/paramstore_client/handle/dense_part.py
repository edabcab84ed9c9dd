"""The note, in the `extra` bytes of a step, of the file that holds the dense weights of the same step.

It begins with bytes that no text and no JSON begins with, and with the version of what follows: a length, a JSON object of that
length, and the bytes that the caller committed with the step, as they are.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from pathlib import Path

from paramstore.errors import CheckpointError

MAGIC = b"\0paramstore dense\0"
VERSION = 1
HEAD = struct.Struct("<HI")
"""Version, and length of the object."""


@dataclass(frozen=True, slots=True)
class DensePart:
    """The dense weights of a step. directory: where the file lay when the step was committed. file: its name there. size_bytes and
    xxh3 (16 hexadecimal digits): of the whole file. extra: what the caller committed with the step."""

    directory: str
    file: str
    size_bytes: int
    xxh3: str
    extra: bytes = b""

    @property
    def path(self) -> Path:
        return Path(self.directory, self.file)

    def to_extra(self) -> bytes:
        """The bytes to commit."""
        note = {"directory": self.directory, "file": self.file, "size_bytes": self.size_bytes, "xxh3": self.xxh3}
        packed = json.dumps(note).encode()
        return MAGIC + HEAD.pack(VERSION, len(packed)) + packed + self.extra

    @classmethod
    def from_extra(cls, extra: bytes) -> DensePart | None:
        """The note in the bytes of a step; None where they are of another kind, and so all the caller's.

        Raises CheckpointError for a note of another version, or one that is cut off or lacks something."""
        if not extra.startswith(MAGIC):
            return None
        try:
            version, length = HEAD.unpack_from(extra, len(MAGIC))
            if version != VERSION:
                raise CheckpointError(f"a dense part is noted in version {version}; this one reads {VERSION}: update paramstore")
            start = len(MAGIC) + HEAD.size
            note = json.loads(extra[start : start + length])
            if Path(name := str(note["file"])).name != name:
                raise ValueError(f"{name!r} is no name of a file")
            return cls(str(note["directory"]), name, int(note["size_bytes"]), str(note["xxh3"]), extra[start + length :])
        except (struct.error, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"the step's extra bytes note a dense part that cannot be read: {error!r}") from error


def callers_extra(extra: bytes) -> bytes:
    """The bytes that the caller committed, with a dense part or without. Raises CheckpointError as `DensePart.from_extra` does."""
    dense = DensePart.from_extra(extra)
    return extra if dense is None else dense.extra
