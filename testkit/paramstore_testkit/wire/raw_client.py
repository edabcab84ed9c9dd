"""A client that speaks single frames, correct ones or not, for the daemon's own tests.

Runs on the event loop, so that it can sit beside the session it talks to. No tickets, no mappings: a frame goes out, the
answers come in the order the daemon sent them, each with the file descriptors that came before it was whole. Every wait
is bounded by WAIT_S.
"""

from __future__ import annotations

import array
import asyncio
import itertools
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paramstore.errors import from_wire
from paramstore.wire import messages as m
from paramstore.wire.codec import FrameDecoder, decode_answer, encode

WAIT_S = 10.0
READ_BYTES = 1 << 16
FDS_PER_READ_MAX = 253
FD_BYTES = array.array("i").itemsize


class ConnectionEnded(Exception):
    """The daemon closed the connection."""


class RawClient:
    """Owner of one connected socket. `fds` holds the descriptors received and not yet taken."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.sock = sock
        self.fds: list[int] = []
        self.unasked: list[m.Message] = []
        """Answers that `ask` passed over while it looked for its own."""
        self._ids = itertools.count(1)
        self._frames = FrameDecoder()
        self._answers: list[m.Message] = []

    @classmethod
    def connect(cls, path: Path) -> RawClient:
        """Connects. Raises OSError if nobody listens there."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.connect(str(path))
        except OSError:
            sock.close()
            raise
        return cls(sock)

    def next_id(self) -> int:
        return next(self._ids)

    async def send_bytes(self, data: bytes | bytearray | memoryview) -> None:
        """Sends bytes. Raises OSError if the daemon has closed its end."""
        async with asyncio.timeout(WAIT_S):
            await asyncio.get_running_loop().sock_sendall(self.sock, data)

    async def send(self, message: m.Message) -> None:
        await self.send_bytes(encode(message))

    async def answer(self) -> m.Message:
        """Waits for the next answer. Raises ConnectionEnded."""
        async with asyncio.timeout(WAIT_S):
            while not self._answers:
                await self._read()
        return self._answers.pop(0)

    async def ask(self, message: Any) -> Any:
        """Gives the result of a request (of Granted and Uploaded: the message). Raises the daemon's error, ConnectionEnded."""
        await self.send(message)
        return await self.result(message.id)

    async def result(self, request_id: int) -> Any:
        """Gives the result, as `ask` does, of a request sent before. Other answers that come first go to `unasked`."""
        for kept in self.unasked:
            if getattr(kept, "id", None) == request_id:
                self.unasked.remove(kept)
                return _outcome(kept)
        while True:
            answer = await self.answer()
            if getattr(answer, "id", None) == request_id:
                return _outcome(answer)
            self.unasked.append(answer)

    async def request(self, make: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """Does `ask` of `make(id, *arguments)`, with a new id."""
        return await self.ask(make(self.next_id(), *arguments, **named))

    async def hello(self) -> dict[str, Any]:
        """Says hello; gives the daemon's welcome."""
        welcome: dict[str, Any] = await self.request(m.Hello, m.MAGIC, m.PROTOCOL_MAJOR, m.PROTOCOL_MINOR, os.getpid())
        return welcome

    async def end(self) -> list[m.Message]:
        """Waits until the daemon closes the connection; gives the answers that came before."""
        async with asyncio.timeout(WAIT_S):
            while True:
                try:
                    await self._read()
                except ConnectionEnded:
                    answers, self._answers = self._answers, []
                    return answers

    def close(self) -> None:
        self.sock.close()
        while self.fds:
            os.close(self.fds.pop())

    async def _read(self) -> None:
        while True:
            try:
                data, ancillary, _, _ = self.sock.recvmsg(READ_BYTES, socket.CMSG_SPACE(FDS_PER_READ_MAX * FD_BYTES))
            except BlockingIOError:
                await self._until_readable()
                continue
            except ConnectionResetError:
                raise ConnectionEnded from None
            break
        for level, kind, content in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                self.fds.extend(array.array("i", content[: len(content) // FD_BYTES * FD_BYTES]))
        if not data:
            raise ConnectionEnded
        self._answers.extend(decode_answer(body) for body in self._frames.feed(data))

    async def _until_readable(self) -> None:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        loop.add_reader(self.sock.fileno(), _resolve, future)
        try:
            await future
        finally:
            loop.remove_reader(self.sock.fileno())


def _outcome(answer: m.Message) -> Any:
    if isinstance(answer, m.Failed):
        raise from_wire(answer.error, answer.message)
    return answer.result if isinstance(answer, m.Done) else answer


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
