"""Reads and writes safetensors files by tensor and by byte range: one header, then the tensors' bytes end to end.

Format: https://huggingface.co/docs/safetensors (8 bytes length, little-endian; a JSON header of that length; data).

- Reads are system calls into the caller's memory: no mapped page counts as this process's, and a file that was cut off is an
  error and not a bus error. The `safetensors` package maps whole files, and writes only what is in memory as a whole.
- A header that was read has been checked: every tensor lies within the file, and has as many bytes as its shape needs.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any

import xxhash

from paramstore.errors import CheckpointError

DTYPES = {
    "F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2",
    "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8", "U8": "uint8", "BOOL": "bool",
}  # fmt: skip
"""The format's names of dtypes, and torch's."""
NAMES = {name: code for code, name in DTYPES.items()}
ITEM_BYTES = {
    "F64": 8, "F32": 4, "BF16": 2, "F16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1,
}  # fmt: skip
HEADER_BYTES_MAX = 100_000_000
"""The longest header that the format's own implementation reads."""
LENGTH = struct.Struct("<Q")
ALIGNMENT_BYTES = 8
PIECE_BYTES = 1 << 20
"""Bytes that are read at once for a checksum."""
_SORTED = ("F64", "I64", "F32", "I32", "BF16", "F16", "I16", "F8_E4M3", "F8_E5M2", "I8", "U8", "BOOL")
"""Order of dtypes in a file, the longest first, so that each tensor is aligned for its dtype."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a file. dtype: a key of DTYPES. offset_bytes: from the start of the file."""

    file: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    offset_bytes: int

    @property
    def length_bytes(self) -> int:
        return prod(self.shape) * ITEM_BYTES[self.dtype]

    def rows(self, start: int, count: int) -> StoredTensor:
        """`count` rows of its first dimension, from `start` on."""
        row_bytes = self.length_bytes // self.shape[0]
        return StoredTensor(self.file, self.name, self.dtype, (count, *self.shape[1:]), self.offset_bytes + start * row_bytes)

    def __str__(self) -> str:
        return f"tensor {self.name!r} in {self.file}"


def read_header(file: Path) -> dict[str, StoredTensor]:
    """The tensors of `file`, by name. Raises CheckpointError naming file and tensor."""
    with Files() as files:
        return files.header(file)


def _described(file: Path, descriptor: int) -> tuple[dict[str, Any], int, int]:
    """(what the header of an open file says by name, where the tensors begin, the file's size). Raises CheckpointError, OSError."""
    size_bytes = os.fstat(descriptor).st_size
    head = os.pread(descriptor, LENGTH.size, 0)
    header_bytes = LENGTH.unpack(head)[0] if len(head) == LENGTH.size else -1
    if not 0 < header_bytes <= min(HEADER_BYTES_MAX, size_bytes - LENGTH.size):
        raise CheckpointError(f"{file}: no safetensors file, or cut off within its header ({size_bytes} bytes)")
    try:
        described = json.loads(os.pread(descriptor, header_bytes, LENGTH.size))
    except ValueError as error:
        raise CheckpointError(f"{file}: its header is no JSON: {error}") from error
    if not isinstance(described, dict):
        raise CheckpointError(f"{file}: its header is no mapping")
    return described, LENGTH.size + header_bytes, size_bytes


def _tensor(file: Path, name: str, value: Any, data_start: int, size_bytes: int) -> StoredTensor:
    """The tensor that `value`, of any JSON type, describes. Raises CheckpointError where it describes none within the file."""
    try:
        dtype, shape, (start, end) = value["dtype"], tuple(int(size) for size in value["shape"]), value["data_offsets"]
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{file}: tensor {name!r} is described as {value!r}") from error
    if dtype not in DTYPES:
        raise CheckpointError(f"{file}: tensor {name!r} has dtype {dtype!r}, this version reads {', '.join(DTYPES)}")
    tensor = StoredTensor(file, name, dtype, shape, data_start + start)
    if min(shape, default=0) < 0 or start < 0 or end - start != tensor.length_bytes:
        raise CheckpointError(f"{file}: tensor {name!r} of shape {shape}, {dtype}, has {end - start} bytes")
    if data_start + end > size_bytes:
        raise CheckpointError(
            f"{file}: cut off: tensor {name!r} ends at byte {data_start + end}, the file has {size_bytes}: fetch the file again"
        )
    return tensor


def _check_apart(tensors: Iterable[StoredTensor]) -> None:
    """Raises CheckpointError naming two tensors that share bytes."""
    for one, next_one in pairwise(sorted(tensors, key=lambda tensor: (tensor.offset_bytes, tensor.length_bytes))):
        if next_one.offset_bytes < one.offset_bytes + one.length_bytes:
            raise CheckpointError(f"{next_one} lies over tensor {one.name!r}: fetch the file again")


class Files:
    """Files that are read from, opened once each. A context manager."""

    def __init__(self) -> None:
        self._descriptors: dict[Path, int] = {}
        self.bytes_read = 0

    def read(self, tensor: StoredTensor, into: memoryview) -> None:
        """Fills `into`, `tensor.length_bytes` long, with the tensor's bytes. Raises CheckpointError naming file and tensor."""
        try:
            descriptor = self._descriptor(tensor.file)
        except OSError as error:
            raise CheckpointError(f"{tensor}: cannot be opened: {error.strerror}") from error
        done = 0
        while done < len(into):
            try:
                count = os.preadv(descriptor, [into[done:]], tensor.offset_bytes + done)
            except OSError as error:
                raise CheckpointError(f"{tensor}: cannot be read at byte {tensor.offset_bytes + done}: {error.strerror}") from error
            if count == 0:
                raise CheckpointError(f"{tensor}: the file was cut off at byte {tensor.offset_bytes + done} while it was read")
            done += count
        self.bytes_read += done

    def header(self, file: Path) -> dict[str, StoredTensor]:
        """The tensors of `file`, by name. Raises CheckpointError naming file and tensor."""
        try:
            described, data_start, size_bytes = _described(file, self._descriptor(file))
        except OSError as error:
            raise CheckpointError(f"{file}: cannot be read: {error.strerror}") from error
        tensors = {
            name: _tensor(file, name, value, data_start, size_bytes) for name, value in described.items() if name != "__metadata__"
        }
        _check_apart(tensors.values())
        return tensors

    def checksum(self, file: Path) -> tuple[int, str]:
        """Reads the whole of `file`. Returns its size and its xxh3, as 16 hexadecimal digits. Raises CheckpointError."""
        try:
            descriptor, hasher, done = self._descriptor(file), xxhash.xxh3_64(), 0
            while piece := os.pread(descriptor, PIECE_BYTES, done):
                hasher.update(piece)
                done += len(piece)
        except OSError as error:
            raise CheckpointError(f"{file}: cannot be read: {error.strerror}") from error
        return done, hasher.hexdigest()

    def _descriptor(self, file: Path) -> int:
        """The descriptor of `file`: what is read later is the same file, whatever bears its name then."""
        if file not in self._descriptors:
            self._descriptors[file] = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        return self._descriptors[file]

    def close(self) -> None:
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])

    def __enter__(self) -> Files:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class Shard:
    """A file that is being made, under the name `partial` until `publish`. Its tensors are written in any order, in any pieces.

    tensors: (name, dtype, shape). Owner of the file's descriptor.
    """

    def __init__(self, file: Path, tensors: Iterable[tuple[str, str, Sequence[int]]], *, metadata: Mapping[str, str]) -> None:
        self.file = file
        self.partial = file.with_name(f"{file.name}.partial")
        ordered = sorted(tensors, key=lambda one: (_SORTED.index(one[1]), one[0]))
        described: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
        end = 0
        starts = []
        for name, dtype, shape in ordered:
            starts.append(end)
            end += prod(shape) * ITEM_BYTES[dtype]
            described[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [starts[-1], end]}
        header = json.dumps(described, separators=(",", ":"), ensure_ascii=False).encode()
        header += b" " * (-len(header) % ALIGNMENT_BYTES)
        data_start = LENGTH.size + len(header)
        self.tensors = {
            name: StoredTensor(file, name, dtype, tuple(shape), data_start + start)
            for (name, dtype, shape), start in zip(ordered, starts, strict=True)
        }
        self._descriptor = os.open(self.partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        try:
            os.ftruncate(self._descriptor, data_start + end)
            self._write(0, memoryview(LENGTH.pack(len(header)) + header))
        except BaseException:
            self.discard()  # nobody has it to do so
            raise

    def write(self, tensor: StoredTensor, data: memoryview) -> None:
        """Writes `data`, the bytes of `tensor`, which is one of `tensors` or `rows` of it. Raises OSError."""
        assert len(data) == tensor.length_bytes, f"{tensor}: {len(data)} bytes for {tensor.length_bytes}"
        self._write(tensor.offset_bytes, data)

    def _write(self, offset_bytes: int, data: memoryview) -> None:
        done = 0
        try:
            while done < len(data):
                done += os.pwrite(self._descriptor, data[done:], offset_bytes + done)
        except OSError as error:
            error.filename = str(self.partial)
            raise

    def publish(self, name: str | None = None) -> None:
        """Gives the file its name, or this other one; it is durable with the directory's next flush. Raises OSError."""
        os.fsync(self._descriptor)
        self.close()
        self.partial.rename(self.file if name is None else self.file.with_name(name))

    def discard(self) -> None:
        """Removes what was written, unless it was published."""
        if self._descriptor >= 0:
            self.close()
            self.partial.unlink(missing_ok=True)

    def close(self) -> None:
        if self._descriptor >= 0:
            descriptor, self._descriptor = self._descriptor, -1
            os.close(descriptor)
