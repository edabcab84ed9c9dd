"""How bytes of a volume come to where they are wanted: through memory of the host, which always works, or by kvikio.

Who reads must prove the bytes: nothing here looks at them. kvikio (extra `gds`) is imported where it is used first; what it does
on a device was never run on a GPU.
"""

from __future__ import annotations

import importlib
import os
import threading
from contextlib import suppress
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from paramstore.errors import VolumeError
from paramstore_client import tensors
from paramstore_client.connection.volume_file import VolumeFile

_setting = threading.Lock()
"""Held while kvikio's settings are ours: they are the process's, and each `set` puts back what it found."""
BOUNCE_BYTES = 4 << 20
"""Bytes that go through the host's memory at a time."""


def bytes_of(tensor: Tensor) -> memoryview:
    """The bytes of a uint8 tensor on the host, without a copy."""
    array: Any = tensor.numpy()
    return memoryview(array)


class VolumeReads(Protocol):
    """Fills tensors from volumes."""

    def read(self, file: VolumeFile, offset_bytes: int, into: Tensor) -> None:
        """Fills `into`, uint8 without gaps on whichever device it is. Offset and length are multiples of 4 KiB. Raises
        VolumeError; it holds garbage then."""
        ...


class BounceReads:
    """Reads through one buffer of the host's, pinned for a GPU; past the page cache where the file system has direct I/O."""

    def __init__(self, *, is_pinned: bool) -> None:
        with torch.inference_mode(False):
            self._buffer = (
                torch.empty(BOUNCE_BYTES, dtype=torch.uint8, pin_memory=True) if is_pinned
                else tensors.mapped((BOUNCE_BYTES,), torch.uint8)  # direct I/O needs whole pages
            )  # fmt: skip
        self._direct: WeakKeyDictionary[VolumeFile, VolumeFile | None] = WeakKeyDictionary()
        """Of each volume its file opened for direct I/O; None where that is refused."""

    def read(self, file: VolumeFile, offset_bytes: int, into: Tensor) -> None:
        buffer = bytes_of(self._buffer)
        for start in range(0, len(into), BOUNCE_BYTES):
            count_bytes = min(BOUNCE_BYTES, len(into) - start)
            self._fill(file, offset_bytes + start, buffer[:count_bytes])
            into[start : start + count_bytes].copy_(self._buffer[:count_bytes])

    def _fill(self, file: VolumeFile, offset_bytes: int, buffer: memoryview) -> None:
        direct = self._direct_of(file)
        try:
            if direct is not None:
                with suppress(OSError):  # buffered reads say what is wrong
                    if os.preadv(direct.fd, [buffer], offset_bytes) == len(buffer):
                        return
            done_bytes = 0
            while done_bytes < len(buffer):
                count_bytes = os.preadv(file.fd, [buffer[done_bytes:]], offset_bytes + done_bytes)
                if not count_bytes:
                    raise VolumeError(f"a volume ends at byte {offset_bytes + done_bytes}, within a leased extent")
                done_bytes += count_bytes
        except OSError as error:
            raise VolumeError(f"{len(buffer)} bytes at {offset_bytes} of a volume cannot be read: {error.strerror}") from error

    def _direct_of(self, file: VolumeFile) -> VolumeFile | None:
        if file not in self._direct:
            self._direct[file] = file.opened_direct()
        return self._direct[file]


class KvikioReads:
    """Reads by kvikio, straight into device memory where cuFile can, with direct I/O.

    module: kvikio itself, or what stands for it in tests. must_be_gds: whether files are opened so that kvikio itself reads nothing
    through the host.
    Raises VolumeError where kvikio is not installed, or does not load.
    """

    def __init__(self, module: Any = None, *, must_be_gds: bool = False) -> None:
        try:
            kvikio = module or (importlib.import_module("kvikio.defaults") and importlib.import_module("kvikio"))
            self._settings = {
                "auto_direct_io_read": True,  # else reads go through the page cache
                "compat_mode": kvikio.CompatMode.OFF if must_be_gds else kvikio.CompatMode.AUTO,
            }
        except Exception as error:  # its libraries fail in ways of their own
            raise VolumeError(f"kvikio cannot be imported: {error}") from error
        self._kvikio = kvikio
        self._files: WeakKeyDictionary[VolumeFile, Any] = WeakKeyDictionary()

    def read(self, file: VolumeFile, offset_bytes: int, into: Tensor) -> None:
        if into.is_cuda:  # kvikio knows no stream: what was queued on `into` must not come after the bytes (never run on a GPU)
            torch.cuda.current_stream(into.device).synchronize()
        target: Any = into if into.is_cuda else into.numpy()
        try:
            with _setting, self._kvikio.defaults.set(self._settings):
                if file not in self._files:
                    self._files[file] = self._kvikio.CuFile(file.path, "r")
                # In one task: where one of several fails, kvikio does not wait for the others, which would write on.
                read = self._files[file].pread(target, size=into.nbytes, file_offset=offset_bytes, task_size=into.nbytes)
                count_bytes = read.get()
        except Exception as error:  # whatever it raises, the bytes are not there
            raise VolumeError(f"kvikio failed to read {into.nbytes} bytes at {offset_bytes}: {error}") from error
        if count_bytes != into.nbytes:
            raise VolumeError(f"kvikio read {count_bytes} of {into.nbytes} bytes at {offset_bytes}")
