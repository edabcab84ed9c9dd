"""The file of device sums: what one daemon has verified the next one knows, and no damage of the file is believed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any

import pytest

from paramstore.core.location import Extent, Identity, Located
from paramstore.engine.transfers.device_sums import DeviceSums
from paramstore.errors import CapacityError, CorruptRecord
from paramstore.storage.format.device_sums import RUN_RECORDS, unpack_device_sums
from paramstore.upkeep.sums_file import INTERVAL_S, REST_TIMES, SumsFile, sums_path

STORE, KEY = b"s" * 16, (0, 1)
HERE = Located(Extent(0, 4096, 8192), Identity(1, 2), 77)


class AtOnce(Executor):
    """Runs each call where it is submitted."""

    def submit(self, function: Callable[..., Any], /, *arguments: Any, **named: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(function(*arguments, **named))
        except (OSError, CorruptRecord) as error:
            future.set_exception(error)
        return future


class Rest:
    """Pauses that end when the test says so. asked_s: how long each was to be."""

    def __init__(self) -> None:
        self.asked_s: list[float] = []
        self._over = asyncio.Event()

    async def __call__(self, seconds: float) -> None:
        self.asked_s.append(seconds)
        await self._over.wait()
        self._over.clear()

    def end(self) -> None:
        self._over.set()


def file_of(directory: Path, sums: DeviceSums, rest: Rest | None = None, *, store: bytes = STORE) -> SumsFile:
    return SumsFile(directory, sums, store_uuid=store, pause=rest or Rest(), threads=AtOnce())


async def kept_and_closed(directory: Path, sums: DeviceSums, *, store: bytes = STORE) -> None:
    file = file_of(directory, sums, store=store)
    await file.start()
    await file.close()


def run(coroutine: Coroutine[Any, Any, None]) -> None:
    asyncio.run(coroutine)


def noted(sums: bytes = b"12345678") -> DeviceSums:
    made = DeviceSums(is_kept=True)
    made.note("m", KEY, HERE, sums)
    return made


def found_by_the_next(directory: Path, *, store: bytes = STORE) -> bytes | None:
    sums = DeviceSums(is_kept=True)
    run(kept_and_closed(directory, sums, store=store))
    return sums.find("m", KEY, HERE)


def test_the_next_daemon_knows_what_was_noted(tmp_path: Path) -> None:
    run(kept_and_closed(tmp_path, noted()))
    assert sums_path(tmp_path).stat().st_mode & 0o777 == 0o600
    assert found_by_the_next(tmp_path) == b"12345678"


def test_it_is_written_after_the_interval_if_any_sums_are_new(tmp_path: Path) -> None:
    async def scenario() -> None:
        rest, sums = Rest(), DeviceSums(is_kept=True)
        file = file_of(tmp_path, sums, rest)
        await file.start()
        sums.note("m", KEY, HERE, b"12345678")
        while not rest.asked_s:
            await asyncio.sleep(0)
        assert (rest.asked_s, sums_path(tmp_path).exists()) == ([INTERVAL_S], False)
        rest.end()
        while len(rest.asked_s) < 2:
            await asyncio.sleep(0)
        written = sums_path(tmp_path).stat().st_mtime_ns
        await file.close()
        assert sums_path(tmp_path).stat().st_mtime_ns == written, "nothing was new"

    run(scenario())


@pytest.mark.parametrize("spoil", [
    lambda path: path.write_bytes(path.read_bytes()[:-1]),
    lambda path: path.write_bytes(path.read_bytes()[:-1] + bytes([path.read_bytes()[-1] ^ 1])),
    lambda path: path.write_bytes(b""),
    lambda path: path.unlink() or path.symlink_to("/dev/zero"),
])  # fmt: skip
def test_a_damaged_file_is_said_ignored_and_made_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, spoil: Callable[[Path], None]
) -> None:
    run(kept_and_closed(tmp_path, noted()))
    spoil(sums_path(tmp_path))
    with caplog.at_level(logging.WARNING):
        assert found_by_the_next(tmp_path) is None
    assert f"{sums_path(tmp_path)} is not used, so records are read again" in caplog.text
    run(kept_and_closed(tmp_path, noted(b"made new")))
    assert found_by_the_next(tmp_path) == b"made new"


def test_a_start_unpacks_in_a_thread_and_lets_the_loop_turn_meanwhile(tmp_path: Path) -> None:
    class Noting(AtOnce):
        def submit(self, function: Callable[..., Any], /, *arguments: Any, **named: Any) -> Future[Any]:
            called.append(function)
            return super().submit(function, *arguments, **named)

    async def scenario() -> None:
        async def turn() -> None:
            while True:
                found_counts.add(len(sums.records()))
                await asyncio.sleep(0)

        turning = asyncio.create_task(turn())
        file = SumsFile(tmp_path, sums, store_uuid=STORE, pause=Rest(), threads=Noting())
        await file.start()
        turning.cancel()
        await file.close()

    called: list[object] = []
    found_counts: set[int] = set()
    many = DeviceSums(is_kept=True)
    for expert in range(3 * RUN_RECORDS):
        many.note("m", (0, expert), HERE, b"12345678")
    run(kept_and_closed(tmp_path, many))
    sums = DeviceSums(is_kept=True)
    run(scenario())
    assert unpack_device_sums in called
    assert {RUN_RECORDS, 2 * RUN_RECORDS} <= found_counts
    assert len(sums.records()) == 3 * RUN_RECORDS


def test_the_file_of_another_store_is_not_used(tmp_path: Path) -> None:
    run(kept_and_closed(tmp_path, noted()))
    assert found_by_the_next(tmp_path, store=b"o" * 16) is None


def test_a_disk_that_takes_no_file_is_told_of_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        sums = noted()
        file = file_of(tmp_path / "gone", sums)
        await file.start()
        await file._write()
        await file._write()
        await file.close()

    with caplog.at_level(logging.WARNING):
        run(scenario())
    assert caplog.text.count("cannot be written") == 1


def test_a_file_that_takes_long_or_holds_no_more_is_written_less(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    late_s = [0.0]

    async def scenario() -> None:
        rest, sums = Rest(), noted()
        file = file_of(tmp_path, sums, rest)
        await file.start()
        loop = asyncio.get_running_loop()
        now_s = loop.time
        while not rest.asked_s:
            await asyncio.sleep(0)
        with monkeypatch.context() as patch:
            patch.setattr(file._file, "replace", refuse)
            patch.setattr(loop, "time", lambda: now_s() + late_s[0])
            rest.end()
            while len(rest.asked_s) < 2:
                await asyncio.sleep(0)
            assert rest.asked_s == [INTERVAL_S, pytest.approx(REST_TIMES * 3.0, rel=0.1)]
        await file.close()

    async def refuse(make: Callable[[], bytes]) -> None:
        late_s[0] = 3.0
        raise CapacityError("too many records")

    run(scenario())
    assert not sums_path(tmp_path).exists()
    assert caplog.text.count("too many records") == 1


def test_nothing_is_read_or_written_where_no_sums_are_kept(tmp_path: Path) -> None:
    run(kept_and_closed(tmp_path, noted()))
    before = sums_path(tmp_path).stat()
    run(kept_and_closed(tmp_path, DeviceSums(is_kept=False)))
    assert sums_path(tmp_path).stat() == before
