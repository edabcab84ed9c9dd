"""The limit of the control plane: the same frames over a Unix socket, with nothing behind it.

`python -m paramstore.bench.limits.echo SOCKET KEYS` answers each Acquire with a Granted that was made beforehand and ignores
Release, in the daemon's shape (asyncio protocol on one side, a blocking socket on the other).
"""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from paramstore.clock import Clock
from paramstore.errors import StoreUnavailable
from paramstore.wire.codec import FrameDecoder, decode_answer, decode_request, encode
from paramstore.wire.messages import Acquire, Granted, Release

RECEIVE_BYTES = 1 << 16
STARTUP_S = 20.0
SLOT_BYTES = 4 << 20


class EchoProtocol(asyncio.Protocol):
    """One connection: decodes each request, answers an Acquire with as many slots as it was started for."""

    def __init__(self, key_count: int) -> None:
        self._frames = FrameDecoder()
        self._slots = [(1, i * SLOT_BYTES, 1, 1) for i in range(key_count)]
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        assert self._transport is not None
        for body in self._frames.feed(data):
            request = decode_request(body)
            if isinstance(request, Acquire):
                self._transport.write(encode(Granted(request.id, self._slots, [])))


async def serve(path: Path, key_count: int) -> None:
    """Serves until cancelled; prints one line on stdout when it is ready."""
    server = await asyncio.get_running_loop().create_unix_server(lambda: EchoProtocol(key_count), str(path))
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    await server.serve_forever()


class Echo:
    """Owner of one echo process and of a connection to it."""

    def __init__(self, path: Path, *, key_count: int) -> None:
        self._keys = [(0, expert) for expert in range(key_count)]
        self._frames = FrameDecoder()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "paramstore.bench.limits.echo", str(path), str(key_count)], stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        if self._process.stdout.readline() != "ready\n":
            raise StoreUnavailable(f"the echo process did not start (exit code {self._process.wait()})")
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(STARTUP_S)
        self._socket.connect(str(path))

    def acquire_and_release(self) -> None:
        """Makes one round trip: Acquire, Granted, and a Release that nobody answers."""
        self._socket.sendall(encode(Acquire(1, 1, self._keys, "param", 1.0)))
        while not self._received_answer():
            pass
        self._socket.sendall(encode(Release([1])))

    def close(self) -> None:
        self._socket.close()
        self._process.terminate()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def _received_answer(self) -> bool:
        answers = [decode_answer(body) for body in self._frames.feed(self._socket.recv(RECEIVE_BYTES))]
        return bool(answers)


def time_calls(call: Callable[[], object], count: int, clock: Clock) -> list[float]:
    """Times `count` calls, back to back; gives the seconds of each."""
    seconds = []
    for _ in range(count):
        started_s = clock.now_s()
        call()
        seconds.append(clock.now_s() - started_s)
    return seconds


if __name__ == "__main__":
    asyncio.run(serve(Path(sys.argv[1]), int(sys.argv[2])))
