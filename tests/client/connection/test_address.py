from __future__ import annotations

import os
import socket
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import pytest

from paramstore.config import Config
from paramstore.errors import ConfigError, StoreUnavailable
from paramstore_client.connection import address
from paramstore_client.connection.address import (
    absence,
    default_path,
    listener_of,
    nobody_listens,
    parse_address,
    store_of,
    try_connect,
)


def listener_at(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(path))
    listener.listen(1)
    return listener


def test_address_is_a_path_with_or_without_its_scheme() -> None:
    assert parse_address("unix:///run/p.sock") == Path("/run/p.sock")
    assert parse_address("/run/p.sock") == parse_address(Path("/run/p.sock")) == Path("/run/p.sock")


@pytest.mark.parametrize("wrong", ["", "unix://", "tcp://host:1", "unix:///" + "x" * 108])
def test_address_that_no_socket_can_have_is_refused(wrong: str) -> None:
    with pytest.raises(ConfigError):
        parse_address(wrong)


def test_default_is_the_variable_else_where_serve_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARAMSTORE_ADDRESS", "unix:///run/p.sock")
    assert default_path() == Path("/run/p.sock")
    monkeypatch.delenv("PARAMSTORE_ADDRESS")
    assert default_path() == Config().socket_path


def test_nobody_at_a_path_is_none(tmp_path: Path) -> None:
    assert try_connect(tmp_path / "none.sock", timeout_s=1.0) is None
    listener_at(tmp_path / "dead.sock").close()
    assert try_connect(tmp_path / "dead.sock", timeout_s=1.0) is None


def test_nobody_listens_at_a_path_that_lies_in_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert try_connect(tmp_path / "file" / "p.sock", timeout_s=1.0) is None


def test_a_stores_directory_stands_for_the_socket_in_it(tmp_path: Path) -> None:
    assert parse_address(tmp_path) == parse_address(f"unix://{tmp_path}") == Config(dir=tmp_path).socket_path


def test_people_are_shown_the_whole_path_wherever_they_stand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert str(nobody_listens(Path("run/p.sock"))).startswith(f"no daemon listens at unix://{tmp_path}/run/p.sock, where")
    monkeypatch.setattr(address, "_check_peer", refuse_peer)
    with listener_at(Path("live")), pytest.raises(StoreUnavailable, match=f"^unix://{tmp_path}/live: refused"):
        try_connect(Path("live"), timeout_s=1.0)


def test_a_place_where_no_daemon_can_listen_is_said_to_be_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    listener_at(tmp_path / "dead.sock").close()
    said = {
        "none": ", where there is neither a store's directory nor a socket",
        "file": ", where there is a file, and neither a store's directory nor a socket",
        "dead.sock": "", ".": "",
    }  # fmt: skip
    for name, why in said.items():
        path = parse_address(tmp_path / name)
        assert absence(path) == f"no daemon listens at unix://{path}{why}"
    monkeypatch.chdir(tmp_path)
    path = Config().socket_path
    assert absence(path).endswith(f", as there is no directory {tmp_path}/paramstore-data")
    (tmp_path / "paramstore-data").touch()
    assert absence(path).endswith(f", as {tmp_path}/paramstore-data is a file")


def refuse_peer(sock: socket.socket, path: Path) -> None:
    raise OSError("refused")


@pytest.mark.parametrize("place", ["run/paramstore.sock", "hidden/run/paramstore.sock"])
def test_a_place_of_another_user_is_refused_with_whose_it_is(tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(sock: socket.socket, path: Path, timeout_s: float) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(address, "_connect", refuse)
    wanted = f"Permission denied: {tmp_path} belongs to user {os.getuid()}, and a daemon serves its own user alone: run this as "
    with pytest.raises(StoreUnavailable, match=wanted):
        try_connect(tmp_path / place, timeout_s=1.0)


def test_a_store_is_known_by_its_default_socket_alone(tmp_path: Path) -> None:
    assert store_of(parse_address(tmp_path)) == tmp_path
    assert store_of(Config().socket_path) == Config().dir
    assert store_of(tmp_path / "own.sock") is None


def test_the_listener_of_a_socket_is_the_process_behind_it(tmp_path: Path) -> None:
    assert listener_of(tmp_path / "p.sock", timeout_s=1.0) is None
    with listener_at(tmp_path / "p.sock"):
        assert listener_of(tmp_path / "p.sock", timeout_s=1.0) == os.getpid()


def test_daemon_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listener = listener_at(tmp_path / "p.sock")

    class Credentials:
        """Reads every peer as a process of user 4242."""

        size = address.PEER_CREDENTIALS.size

        def unpack(self, data: bytes) -> tuple[int, int, int]:
            return (77, 4242, 4242)

    monkeypatch.setattr(address, "PEER_CREDENTIALS", Credentials())
    with pytest.raises(StoreUnavailable, match="process 77 behind it belongs to user 4242"):
        try_connect(tmp_path / "p.sock", timeout_s=1.0)
    listener.close()


def test_daemon_of_this_user_is_connected_to(tmp_path: Path) -> None:
    listener = listener_at(tmp_path / "p.sock")
    sock = try_connect(tmp_path / "p.sock", timeout_s=1.0)
    assert sock is not None
    sock.close()
    listener.close()


def full_listener_at(path: Path) -> tuple[socket.socket, socket.socket]:
    """One that accepts nobody for now, and the client that fills its queue."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(path))
    listener.listen(0)
    waiting = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    waiting.connect(str(path))
    return listener, waiting


def test_a_daemon_with_a_full_queue_is_waited_for(tmp_path: Path) -> None:
    listener, waiting = full_listener_at(tmp_path / "p.sock")
    with listener, waiting, ThreadPoolExecutor(1) as pool:
        connecting = pool.submit(try_connect, tmp_path / "p.sock", timeout_s=10.0)
        assert not wait([connecting], timeout=0.02).done
        for _ in range(2):
            listener.accept()[0].close()
        sock = connecting.result(10.0)
        assert sock is not None
        sock.close()


def test_a_daemon_that_accepts_nobody_is_given_up_at_the_deadline(tmp_path: Path) -> None:
    listener, waiting = full_listener_at(tmp_path / "p.sock")
    with listener, waiting, pytest.raises(StoreUnavailable, match=r"accepted no connection within 0.02 s"):
        try_connect(tmp_path / "p.sock", timeout_s=0.02)
