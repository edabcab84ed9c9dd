"""A small file in the store's directory that a daemon reads at its start and puts a newer one in place of from time to time.

- It is replaced in one step, after a flush: a crash at any moment leaves the old file or the new one.
- Threads of its own wait for the disk, so no commit and no session ever does.
- Whatever else lies in its place is not followed, waited for, or taken for ours.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import Executor, Future
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import ParamSpec, TypeVar

import aiofiles
import aiofiles.os

from paramstore.errors import CapacityError
from paramstore.storage.ownership import objection_to

P = ParamSpec("P")
T = TypeVar("T")


class Threads(Executor):
    """Runs each call in a thread of its own. One that hangs does not keep the process from its end, as a pool's would."""

    def submit(self, function: Callable[P, T], /, *arguments: P.args, **named: P.kwargs) -> Future[T]:
        future: Future[T] = Future()
        future.set_running_or_notify_cancel()

        def run() -> None:
            try:
                future.set_result(function(*arguments, **named))
            except Exception as error:  # noqa: BLE001 - belongs to whoever waits for the call
                future.set_exception(error)

        Thread(target=run, name="paramstore-hints", daemon=True).start()
        return future


class HintFile:
    """One such file. threads: run what may wait for the disk."""

    def __init__(self, path: Path, threads: Executor) -> None:
        self.path = path
        self._threads = threads

    async def read(self, bytes_max: int) -> bytes:
        """Reads the file, and a byte more than `bytes_max`, if it is longer. Raises OSError."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, _read, self.path, bytes_max)

    async def replace(self, pack: Callable[[], bytes]) -> None:
        """Puts a file of what `pack` returns, which a thread calls, in place of the old one. Its directory need not be flushed:
        after a power cut either one may be there. Raises OSError, and CapacityError as `pack` does; the old file is there then."""
        try:
            await self._replace(pack)
        except (OSError, CapacityError):
            with suppress(OSError):
                await aiofiles.os.unlink(self._new_path, executor=self._threads)
            raise

    async def _replace(self, pack: Callable[[], bytes]) -> None:
        data = await asyncio.get_running_loop().run_in_executor(self._threads, pack)
        with suppress(FileNotFoundError):  # what a crash has left
            await aiofiles.os.unlink(self._new_path, executor=self._threads)
        file = await aiofiles.open(self._new_path, "xb", opener=_open_private, executor=self._threads)
        try:
            await file.write(data)
            await file.flush()
            await aiofiles.os.wrap(os.fsync)(file.fileno(), executor=self._threads)
        finally:
            await file.close()
        await aiofiles.os.replace(self._new_path, self.path, executor=self._threads)

    @property
    def _new_path(self) -> Path:
        """Where the next file is written, until it is whole."""
        return self.path.with_name(f"{self.path.name}.new")


def _read(path: Path, bytes_max: int) -> bytes:
    """Reads in one call: where a read hangs, so does its file's close, and nobody may wait for that."""
    with open(path, "rb", opener=_open_ours) as file:
        return file.read(bytes_max + 1)


def _open_private(path: str, flags: int) -> int:
    """Opens a file that only this user may read. Whatever is there already is refused, since the file has to be a new one."""
    return os.open(path, flags | os.O_CLOEXEC, 0o600)


def _open_ours(path: str, flags: int) -> int:
    """Opens a file that is ours, without waiting for whatever else is there. Raises OSError."""
    descriptor = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    if objection := objection_to(os.fstat(descriptor)):
        os.close(descriptor)
        raise OSError(f"it is not ours: {objection}")
    return descriptor
