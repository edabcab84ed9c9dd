"""The process around the store: its socket and directory, who is let in."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
import stat
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from paramstore.config import Config
from paramstore.daemon import server as server_module
from paramstore.daemon.server import Server, listen, serve
from paramstore.daemon.session import Session
from paramstore.errors import ConfigError
from paramstore.wire import messages as m
from paramstore.wire.messages import Failed
from paramstore_testkit.wire.raw_client import ConnectionEnded, RawClient

AtDesk = Callable[..., None]
MIB = 1 << 20
LIMIT_S = 5.0
NOBODY = 65534


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


# --- the socket


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run" / "daemon.sock"


def test_socket_and_directory_are_for_their_user_alone(path: Path) -> None:
    before = os.umask(0)
    try:
        with listen(path):
            assert mode_of(path.parent) == 0o700
            assert mode_of(path) == 0o600
        assert os.umask(0) == 0  # as it was
    finally:
        os.umask(before)


def test_a_directory_that_was_made_for_the_socket_is_in_the_log(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        listen(path).close()
        assert caplog.messages == [f"made the directory {path.parent} for the socket"]
        listen(path).close()
        assert len(caplog.messages) == 1


def test_a_directory_that_is_there_keeps_its_mode_and_the_socket_is_closed_to_others(path: Path) -> None:
    """It may be `/run`, or a home."""
    path.parent.mkdir()
    path.parent.chmod(0o755)
    with listen(path):
        assert mode_of(path.parent) == 0o755
        assert mode_of(path) == 0o600


@pytest.mark.parametrize("mode", [0o770, 0o702])
def test_a_directory_that_others_can_write_is_refused(mode: int, path: Path) -> None:
    path.parent.mkdir()
    path.parent.chmod(mode)
    with pytest.raises(ConfigError, match="written by others: chmod 0700"):
        listen(path)
    assert mode_of(path.parent) == mode


@pytest.mark.skipif(os.getuid() != 0, reason="needs another user's directory")
def test_a_directory_of_another_user_is_refused(path: Path) -> None:
    path.parent.mkdir(mode=0o700)
    os.chown(path.parent, NOBODY, -1)
    with pytest.raises(ConfigError, match="written by others"):
        listen(path)


def test_a_link_to_a_directory_is_not_followed(path: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    path.parent.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="is a link"):
        listen(path)
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_a_stale_socket_is_replaced(path: Path) -> None:
    listen(path).close()
    assert path.exists()
    with listen(path), socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))


def test_a_socket_that_somebody_serves_is_left_alone(path: Path) -> None:
    with listen(path) as other:
        with pytest.raises(ConfigError, match="another process listens there"):
            listen(path)
        other.accept()[0].close()
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))


def test_a_socket_whose_owner_is_too_busy_to_accept_is_left_alone(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "BACKLOG", 0)
    with listen(path), socket.socket(socket.AF_UNIX) as waiting:
        waiting.connect(str(path))
        with pytest.raises(ConfigError, match="another process listens there"):
            listen(path)
        assert path.exists()


def test_a_file_that_is_no_socket_is_left_alone(path: Path) -> None:
    path.parent.mkdir(mode=0o700)
    path.write_text("precious")
    with pytest.raises(ConfigError, match="no socket"):
        listen(path)
    assert path.read_text() == "precious"


def test_a_path_too_long_for_a_socket_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    path = tmp_path / ("d" * 100) / "daemon.sock"
    with pytest.raises(ConfigError, match="107 bytes: give a shorter --socket"):
        listen(path)
    assert not path.parent.exists()


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"volume_size_bytes": 1}, "volume_size=1"), ({"volume_size_bytes": MIB}, "volume_size="),
        ({"socket": Path("s" * 200)}, "shorter --socket"),
        ({"socket": Path("typo/run/p.sock")}, "^socket directory typo/run: it cannot be made, as there is no directory "),
        ({"socket": Path("store/sockets/p.sock"), "volume_size_bytes": 1}, "volume_size=1"),  # `store` is made before it
    ],
)  # fmt: skip
def test_settings_that_no_store_can_have_are_refused_before_anything_is_touched(
    settings: dict[str, Any], reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "harden", lambda: None)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=reason):
        asyncio.run(asyncio.wait_for(serve(Config(dir=tmp_path / "store", **settings)), LIMIT_S))
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_cannot_be_made_is_a_setting_that_is_wrong(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="file"):
        listen(tmp_path / "file" / "daemon.sock")


# --- who is let in


def with_server(desk: Any, path: Path) -> Server:
    return Server(desk.service, listen(path))


def test_clients_are_served_side_by_side_until_the_end(at_desk: AtDesk, path: Path) -> None:
    async def scenario(desk: Any) -> None:
        server = with_server(desk, path)
        clients = [RawClient.connect(path) for _ in range(3)]
        for client in clients:
            await client.hello()
        desk.clients += clients
        server.close()
        for client in clients:
            assert await client.end() == []
        with pytest.raises(ConnectionRefusedError):
            RawClient.connect(path)
        assert not server._sessions

    at_desk(scenario)


def test_garbage_is_looked_for_everywhere_when_many_sessions_ended_and_none_is_open(
    at_desk: AtDesk, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[int] = []
    monkeypatch.setattr(server_module, "ENDED_SESSIONS", 3)

    async def scenario(desk: Any) -> None:
        server = with_server(desk, path)
        monkeypatch.setattr(server_module, "look_at_everything", lambda: looks.append(len(server._sessions)))
        staying = RawClient.connect(path)
        desk.clients.append(staying)
        await staying.hello()
        for _ in range(4):
            client = RawClient.connect(path)
            await client.hello()
            client.close()
            await desk.until(lambda: len(server._sessions) == 1)
        assert looks == [], "one is open"
        staying.close()
        await desk.until(lambda: looks == [0])
        server.close()

    at_desk(scenario)


def test_processes_of_other_users_are_turned_away(at_desk: AtDesk, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Session, "uid", property(lambda session: os.getuid() + 1))

    async def scenario(desk: Any) -> None:
        server = with_server(desk, path)
        desk.clients.append(RawClient.connect(path))
        with pytest.raises((ConnectionEnded, OSError)):
            await desk.clients[0].hello()
        assert not server._sessions
        server.close()

    at_desk(scenario)


@pytest.mark.skipif(os.getuid() != 0, reason="needs a second user")
def test_another_user_is_turned_away_even_where_the_permissions_were_opened(at_desk: AtDesk) -> None:
    async def scenario(desk: Any, path: Path) -> None:
        server = with_server(desk, path)
        for place in (path, path.parent, path.parent.parent):
            place.chmod(0o777)
        os.seteuid(NOBODY)
        try:
            desk.clients.append(RawClient.connect(path))
        finally:
            os.seteuid(0)
        with pytest.raises((ConnectionEnded, OSError)):
            await desk.clients[0].hello()
        server.close()

    with TemporaryDirectory() as directory:  # pytest's own is closed to other users
        at_desk(lambda desk: scenario(desk, Path(directory) / "run" / "daemon.sock"))


def test_more_sessions_than_allowed_are_refused_and_the_others_served(
    at_desk: AtDesk, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "SESSIONS_MAX", 2)

    async def scenario(desk: Any) -> None:
        server = with_server(desk, path)
        desk.clients += [RawClient.connect(path) for _ in range(2)]
        for client in desk.clients:
            await client.hello()
        desk.clients.append(RawClient.connect(path))
        (refusal,) = await desk.clients[2].end()
        assert isinstance(refusal, Failed)
        assert (refusal.id, refusal.error) == (0, "CapacityError")
        desk.clients[0].close()
        await desk.until(lambda: len(server._sessions) == 1)
        desk.clients.append(RawClient.connect(path))
        await desk.clients[3].hello()
        server.close()

    at_desk(scenario)


def test_beyond_the_limit_the_oldest_that_said_no_hello_goes_and_nobody_else(
    at_desk: AtDesk, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "HALF_OPEN_MAX", 2)

    async def scenario(desk: Any) -> None:
        server = with_server(desk, path)
        desk.clients.append(RawClient.connect(path))
        known = desk.clients[0]
        await known.hello()
        for count in range(3):
            desk.clients.append(RawClient.connect(path))
            await desk.until(lambda wanted=count: len(server._sessions) >= 2 + min(wanted, 1))
        _, oldest, second, third = desk.clients
        assert await oldest.end() == []
        for client in (second, third):
            await client.hello()
        assert await known.request(m.Namespaces) == []
        assert len(server._sessions) == 3
        server.close()

    at_desk(scenario)


def test_sessions_that_ended_but_for_their_leases_keep_nobody_out(
    at_desk: AtDesk, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "SESSIONS_MAX", 2)

    async def scenario(desk: Any) -> None:
        server = with_server(desk, path)
        desk.clients += [RawClient.connect(path) for _ in range(2)]
        for client in desk.clients:
            await client.hello()
        handle = await desk.create(desk.clients[0])
        assert (await desk.clients[0].request(m.Acquire, handle, [(0, 0)], "param", 5.0)).slots
        desk.clients[0].close()  # this process lives on, and may read what it leased
        await desk.until(lambda: sum(session.is_ended for session in server._sessions) == 1)
        assert desk.figures()["leased_slots"] == 1
        desk.clients.append(RawClient.connect(path))
        await desk.clients[2].hello()
        server.close()

    at_desk(scenario)


def test_a_daemon_is_unused_some_time_after_its_last_session_and_not_before(
    at_desk: AtDesk, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Leases that a process which lives on has kept are no use of it; a session that loads nothing yet is."""
    told: list[str] = []

    async def scenario(desk: Any) -> None:
        server = Server(desk.service, listen(path), unused_s=60.0, on_unused=lambda: told.append("unused"))
        timer = server._look_timer
        assert timer is not None
        assert timer.when() - server._loop.time() > 59.0, "the first session has time to come"
        desk.clients += [RawClient.connect(path) for _ in range(2)]
        leaver, stayer = desk.clients
        for client in desk.clients:
            await client.hello()
        handle = await desk.create(leaver)
        assert (await leaver.request(m.Acquire, handle, [(0, 0)], "param", 5.0)).slots
        leaver.close()
        await desk.until(lambda: server._open_count() == 1)
        for _ in range(2 * server_module.UNUSED_LOOKS):
            server._look()
        stayer.close()
        await desk.until(lambda: server._open_count() == 0)
        for _ in range(server_module.UNUSED_LOOKS - 1):
            server._look()
        desk.clients.append(RawClient.connect(path))
        await desk.clients[2].hello()
        desk.clients[2].close()
        await desk.until(lambda: server._open_count() == 0)
        for _ in range(server_module.UNUSED_LOOKS - 1):
            server._look()
        assert told == []
        server._look()
        assert told == ["unused"]
        assert server._look_timer is None
        server.close()
        assert Server(desk.service, listen(path))._look_timer is None, "unless it is set, a daemon stays"

    at_desk(scenario)


def test_an_accept_that_fails_is_tried_again_without_spinning(
    at_desk: AtDesk, path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(server_module, "ACCEPT_PAUSE_S", 0.1)

    class Exhausted:
        """A listener without descriptors left, until it is told otherwise."""

        def __init__(self, inner: socket.socket) -> None:
            self.inner = inner
            self.is_exhausted = True

        def accept(self) -> object:
            if self.is_exhausted:
                raise OSError(errno.EMFILE, "Too many open files")
            return self.inner.accept()

        def __getattr__(self, name: str) -> Any:
            return getattr(self.inner, name)

    async def scenario(desk: Any) -> None:
        listener = Exhausted(listen(path))
        server = Server(desk.service, listener)  # type: ignore[arg-type]
        desk.clients.append(RawClient.connect(path))
        await desk.until(lambda: "Too many open files" in caplog.text)
        for _ in range(20):
            await asyncio.sleep(0)
        listener.is_exhausted = False
        await desk.clients[0].hello()
        server.close()

    at_desk(scenario)
    assert caplog.text.count("Too many open files") == 1
