"""Asks a file system about O_DIRECT on one file: statx(2) with STATX_DIOALIGN (Linux 6.1), which os.stat leaves out."""

from __future__ import annotations

import struct
from typing import Any

import cffi

_AT_EMPTY_PATH = 0x1000
_STATX_DIOALIGN = 0x2000
_STATX_BYTES = 256
_MASK = struct.Struct("=I")  # stx_mask, at the start of the struct
_DIRECT = struct.Struct("=II")  # stx_dio_mem_align, stx_dio_offset_align
_DIRECT_OFFSET = 152

_ffi = cffi.FFI()
_ffi.cdef("int statx(int directory, const char *path, int flags, unsigned int mask, void *buffer);")
_libc: Any = _ffi.dlopen(None)  # its functions are known at run time only


def direct_io_alignment(descriptor: int) -> int | None:
    """Alignment in bytes that memory and offsets need for O_DIRECT on this file.

    0: the file system refuses it here. None: kernel or file system do not say; trying is the only way to
    know.
    """
    try:
        statx = _libc.statx
    except AttributeError:  # a C library older than the call
        return None
    buffer = _ffi.new("char[]", _STATX_BYTES)
    if statx(descriptor, b"", _AT_EMPTY_PATH, _STATX_DIOALIGN, buffer) != 0:
        return None
    answer = _ffi.buffer(buffer)[:]
    if not _MASK.unpack_from(answer)[0] & _STATX_DIOALIGN:
        return None
    memory_bytes, offset_bytes = _DIRECT.unpack_from(answer, _DIRECT_OFFSET)
    return max(memory_bytes, offset_bytes) if memory_bytes and offset_bytes else 0
