from __future__ import annotations

import dataclasses
import os
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

import paramstore_client as ps
from paramstore.wire import messages as m
from paramstore_client.connection import autostart
from paramstore_testkit.processes.daemon_process import DaemonProcess
from paramstore_testkit.wire.fake_daemon import FakeDaemon

Command = Callable[[str], None]

SERVE = """
    import argparse, os, sys
    from pathlib import Path
    parser = argparse.ArgumentParser()
    parser.add_argument("--dir", type=Path)
    parser.add_argument("--socket", type=Path)
    known, _ = parser.parse_known_args()
"""

FAKE = SERVE + """
    import fcntl
    from paramstore_testkit.wire.fake_daemon import FakeDaemon
    lock = open(known.dir / "lock", "w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        sys.exit("StoreLocked: another daemon holds this directory")
    with open(known.dir / "pids", "a") as pids:
        pids.write(f"{os.getpid()}\\n")
    known.socket.parent.mkdir(parents=True, exist_ok=True)
    with FakeDaemon(known.socket) as daemon:
        print(f"ready unix://{known.socket}", flush=True)
        daemon.wait_until(lambda: bool(daemon.received), timeout_s=30)
        daemon.wait_until(lambda: not daemon.sessions, timeout_s=30)
"""


@pytest.fixture
def serve_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Command]:
    """Runs a script instead of `paramstore serve`; ends the daemons it started."""

    def use(source: str) -> None:
        script = tmp_path / "serve.py"
        script.write_text(textwrap.dedent(source))
        monkeypatch.setattr(autostart, "SERVE_COMMAND", (sys.executable, str(script)))

    for process in autostart._started:
        process.wait(timeout=30)  # other tests' daemons, which they have ended
    autostart._started.clear()
    yield use
    for process in autostart._started:
        process.terminate()
        process.wait(timeout=30)
    autostart._started.clear()


@pytest.mark.slow
def test_daemon_is_started_when_none_listens(tmp_path: Path, serve_with: Command) -> None:
    serve_with(FAKE)
    with ps.connect(autostart=ps.ServeOptions(dir=tmp_path / "data"), timeout_s=30.0) as store:
        assert store.stats() == {"leases": 0}
        assert (tmp_path / "data" / "daemon.log").exists()


@pytest.mark.slow
def test_clients_that_start_together_get_one_daemon(tmp_path: Path, serve_with: Command) -> None:
    serve_with(FAKE)
    stores: list[ps.Store] = []
    gate = threading.Barrier(3)

    def run() -> None:
        gate.wait()
        stores.append(ps.connect(autostart=ps.ServeOptions(dir=tmp_path / "data"), timeout_s=30.0))

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=40)
    assert [store.stats()["leases"] for store in stores] == [0, 0, 0]
    assert len((tmp_path / "data" / "pids").read_text().splitlines()) == 1
    for store in stores:
        store.close()


def test_client_whose_daemon_lost_the_race_waits_for_the_winner(tmp_path: Path, serve_with: Command) -> None:
    serve_with("import sys; sys.exit('StoreLocked: another daemon holds this directory')")
    options = ps.ServeOptions(dir=tmp_path / "data", socket=tmp_path / "p.sock")
    stores: list[ps.Store] = []
    thread = threading.Thread(target=lambda: stores.append(ps.connect(autostart=options, timeout_s=30.0)))
    thread.start()
    while not autostart._started:
        pass
    autostart._started[-1].wait(timeout=30)
    with FakeDaemon(tmp_path / "p.sock"):
        thread.join(timeout=30)
        assert [store.stats() for store in stores] == [{"leases": 0}]
        stores[0].close()


def test_a_daemon_is_started_again_when_the_one_that_held_the_directory_has_ended(tmp_path: Path, serve_with: Command) -> None:
    serve_with(
        SERVE
        + """
    if not (known.dir / "tried").exists():
        (known.dir / "tried").touch()
        sys.exit("StoreLocked: store directory x is in use by process 1: connect to it")
    """
        + FAKE.removeprefix(SERVE)
    )
    with ps.connect(autostart=ps.ServeOptions(dir=tmp_path / "data"), timeout_s=30.0) as store:
        assert store.stats() == {"leases": 0}


@pytest.mark.slow
def test_a_daemon_that_holds_the_directory_and_listens_elsewhere_is_named_at_once(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere.sock"
    with DaemonProcess(tmp_path / "data", "--socket", str(elsewhere), "--host-budget", "32MiB") as daemon:
        with pytest.raises(ps.StoreUnavailable) as caught:
            ps.connect(autostart=ps.ServeOptions(dir=daemon.directory), timeout_s=60.0)
        message = str(caught.value)
        assert f"process {daemon.pid} holds {daemon.directory} and listens at unix://{elsewhere}, not at unix://" in message
        assert "connect to that address" in message
        ps.connect(elsewhere).close()


@pytest.mark.slow
def test_a_holder_whose_address_is_not_known_is_named_when_the_time_is_over(
    tmp_path: Path, serve_with: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(autostart, "is_held", lambda directory: True)
    serve_with(f"import sys; sys.exit('StoreLocked: store directory x is in use by process {os.getpid()}: connect to it')")
    with pytest.raises(ps.StoreUnavailable, match=rf"^process {os.getpid()} holds .*nobody listened at unix://.*connect to the"):
        ps.connect(autostart=ps.ServeOptions(dir=tmp_path / "data"), timeout_s=2.0)


def test_daemon_that_ends_before_it_serves_is_reported_with_its_log(tmp_path: Path, serve_with: Command) -> None:
    serve_with("import sys; sys.exit('volume 0 at /mnt/a: no space for 3 TiB')")
    with pytest.raises(ps.StoreUnavailable, match=r"exit code 1(.|\n)*no space for 3 TiB"):
        ps.connect(autostart=ps.ServeOptions(dir=tmp_path / "data"), timeout_s=30.0)


@pytest.mark.parametrize(
    ("free_bytes", "said"), [(4096, ": its disk is full, with 4096 bytes free; free some there"), (1 << 30, r"\.$")]
)
def test_daemon_that_ends_without_a_word_on_a_full_disk_is_reported_with_it(
    tmp_path: Path, serve_with: Command, monkeypatch: pytest.MonkeyPatch, free_bytes: int, said: str
) -> None:
    serve_with("import sys; sys.exit(1)")
    monkeypatch.setattr(autostart.shutil, "disk_usage", lambda place: SimpleNamespace(free=free_bytes))
    with pytest.raises(ps.StoreUnavailable, match=f"daemon.log has nothing new{said}"):
        ps.connect(autostart=ps.ServeOptions(dir=tmp_path / "data"), timeout_s=30.0)


def test_log_of_an_earlier_daemon_is_not_reported(tmp_path: Path, serve_with: Command) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "daemon.log").write_text("StoreLocked: long ago\n")
    serve_with("import sys; sys.exit('now')")
    with pytest.raises(ps.StoreUnavailable) as caught:
        ps.connect(autostart=ps.ServeOptions(dir=tmp_path / "data"), timeout_s=30.0)
    assert "now" in str(caught.value)
    assert "long ago" not in str(caught.value)


def test_daemon_that_is_never_ready_is_not_waited_for_without_end(tmp_path: Path, serve_with: Command) -> None:
    serve_with("import signal; signal.pause()")
    with pytest.raises(ps.StoreUnavailable, match=r"not ready within 0\.2 s"):
        ps.connect(autostart=ps.ServeOptions(dir=tmp_path / "data"), timeout_s=0.2)


def test_running_daemon_is_used_and_none_started(tmp_path: Path, serve_with: Command, daemon: object) -> None:
    serve_with("raise SystemExit('must not run')")
    with ps.connect(daemon.path, autostart=ps.ServeOptions(dir=tmp_path / "data")) as store:  # type: ignore[attr-defined]
        assert store.namespaces() == []
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize(("asked", "is_told"), [("16MiB", False), ("64MiB", True), (None, False)])
def test_a_running_daemon_of_another_budget_is_told_of(
    asked: str | None, is_told: bool, tmp_path: Path, daemon: FakeDaemon, caplog: pytest.LogCaptureFixture
) -> None:
    tiers = {"host": {"budget_bytes": 16 << 20}}
    daemon.script(m.Stats, lambda session, request: session.send(m.Done(request.id, {"tiers": tiers})))
    ps.connect(daemon.path, autostart=ps.ServeOptions(dir=tmp_path / "data", host_budget=asked)).close()
    told = f"has host_budget 16 MiB, and keeps it: for the 64 MiB asked for, `paramstore stop unix://{daemon.path}`, then connect"
    assert (told in caplog.text) == is_told
    assert len(daemon.requests(m.Stats)) == (asked is not None)


@pytest.mark.parametrize("place", ["file", "file/below", "/proc/zz"])
def test_a_place_where_no_directory_can_be_is_a_config_error(place: str, tmp_path: Path, serve_with: Command) -> None:
    serve_with("raise SystemExit('must not run')")
    (tmp_path / "file").touch()
    with pytest.raises(ps.ConfigError, match=r"^ServeOptions: dir=.* cannot be made a directory: "):
        ps.connect(autostart=ps.ServeOptions(dir=tmp_path / place))


def test_a_directory_without_its_parent_is_a_config_error_and_is_not_made(tmp_path: Path, serve_with: Command) -> None:
    serve_with("raise SystemExit('must not run')")
    with pytest.raises(ps.ConfigError, match=f"^ServeOptions: dir {tmp_path}/typo/data: .* there is no directory {tmp_path}/typo;"):
        ps.connect(autostart=ps.ServeOptions(dir=tmp_path / "typo" / "data"))
    assert not (tmp_path / "typo").exists()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"dir": ""}, "^ServeOptions: dir=''"), ({"socket": ""}, "^ServeOptions: socket=''"),
        ({"volumes": ["a", "a"]}, "^ServeOptions: volumes: a and a are one directory"),
        ({"host_budget": "x"}, "^ServeOptions: host_budget"), ({"settings": {"policy__name": "x"}}, r"policy\.name='x'"),
        ({"settings": {"speed": 1}}, "^ServeOptions: there is no setting 'speed'"),
    ],
)  # fmt: skip
def test_wrong_options_are_a_config_error_before_anything_is_started(
    options: dict[str, object], reason: str, tmp_path: Path
) -> None:
    with pytest.raises(ps.ConfigError, match=reason):
        ps.connect(autostart=ps.ServeOptions(**{"dir": tmp_path / "data", **options}))  # type: ignore[arg-type]
    assert not (tmp_path / "data").exists()


def test_the_daemons_log_is_for_this_user_alone(tmp_path: Path, serve_with: Command) -> None:
    (tmp_path / "data").mkdir()
    log = tmp_path / "data" / "daemon.log"
    log.touch(0o644)
    serve_with("import sys; sys.exit('now')")
    with pytest.raises(ps.StoreUnavailable):
        ps.connect(autostart=ps.ServeOptions(dir=tmp_path / "data"), timeout_s=30.0)
    assert log.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("kind", ["link", "fifo"])
def test_what_lies_in_place_of_the_daemons_log_is_neither_followed_nor_waited_for(
    kind: str, tmp_path: Path, serve_with: Command
) -> None:
    log, victim = tmp_path / "data" / "daemon.log", tmp_path / "victim"
    log.parent.mkdir()
    victim.write_text("precious")
    victim.chmod(0o644)
    if kind == "link":
        log.symlink_to(victim)
    else:
        os.mkfifo(log)
    with pytest.raises(ps.StoreUnavailable, match="could not be started"):
        ps.connect(autostart=ps.ServeOptions(dir=tmp_path / "data"))
    assert (victim.read_text(), victim.stat().st_mode & 0o777) == ("precious", 0o644)


def test_a_daemon_that_this_process_started_is_found_by_its_directory(tmp_path: Path, serve_with: Command) -> None:
    serve_with("import signal; signal.pause()")
    with pytest.raises(ps.StoreUnavailable, match="not ready"):
        ps.connect(autostart=ps.ServeOptions(dir=tmp_path / "data"), timeout_s=0.2)
    process = autostart.started_in(tmp_path / "data")
    assert process is not None
    assert autostart.started_in(tmp_path) is None
    process.kill()
    process.wait()
    assert autostart.started_in(tmp_path / "data") is None


def test_options_become_the_flags_of_serve(tmp_path: Path) -> None:
    options = ps.ServeOptions(
        dir=tmp_path, host_budget="4GiB", volumes=(tmp_path / "a", tmp_path / "b"), volume_size=1 << 30,
        gradient_budget="1GiB", config=tmp_path / "p.toml", settings={"policy__name": "lru"},
        add_volumes=[tmp_path / "c"],
    )  # fmt: skip
    assert options.arguments(Path("/run/p.sock")) == [
        "--dir", str(tmp_path), "--socket", "/run/p.sock", "--volume", str(tmp_path / "a"), "--volume", str(tmp_path / "b"),
        "--add-volume", str(tmp_path / "c"), "--host-budget", "4GiB", "--volume-size", str(1 << 30), "--gradient-budget", "1GiB",
        "--config", str(tmp_path / "p.toml"),
    ]  # fmt: skip
    assert options.environment()["PARAMSTORE_POLICY__NAME"] == "lru"


def test_socket_path_is_what_the_daemon_will_compute(tmp_path: Path) -> None:
    assert ps.ServeOptions(dir=tmp_path).socket_path() == tmp_path / "run" / "paramstore.sock"
    assert ps.ServeOptions(dir=tmp_path, socket=tmp_path / "p.sock").socket_path() == tmp_path / "p.sock"
    (tmp_path / "p.toml").write_text(f'socket = "{tmp_path}/c.sock"\n')
    assert ps.ServeOptions(dir=tmp_path, config=tmp_path / "p.toml").socket_path() == tmp_path / "c.sock"


class AnyPath:
    """A path of somebody else's class."""

    def __fspath__(self) -> str:
        return "/srv/moe"


def test_paths_of_any_class_are_taken() -> None:
    options = ps.ServeOptions(dir=AnyPath(), volumes=[AnyPath()])
    assert options.socket_path() == Path("/srv/moe/run/paramstore.sock")


WRONG: dict[str, tuple[object, ...]] = {
    "dir": (None, 5, "", b"moe", ["moe"]),
    "host_budget": (1.5, True, "four gigabytes", 0, ["1GiB"], b"1GiB"),
    "volumes": ("abc", "/abc", Path("abc"), None, 5, [5], [""], ["a", "./a"], {"a": "b"}, [["a"]]),
    "volume_size": (1.5, "big", -1),
    "gradient_budget": (1.5, "big", -1),
    "socket": (5, "", ["s"]),
    "config": (5, ["p.toml"], b"p.toml"),
    "settings": (None, ["io_workers"], "io_workers=4", {"io_workers": None}, {5: 5}, {"colour": "red"}, {"volumes": ["a"]}),
    "add_volumes": ("abc", None, [5], ["a", "a"]),
}


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(ps.ServeOptions)])
def test_every_option_of_a_wrong_type_is_refused_when_it_is_given_and_named(name: str) -> None:
    for value in WRONG[name]:
        with pytest.raises(ps.ConfigError, match=f"ServeOptions: {name}|ServeOptions: there is no setting"):
            ps.ServeOptions(**{name: value})  # type: ignore[arg-type]


def test_one_directory_in_place_of_a_list_of_them_is_refused_with_what_to_give() -> None:
    with pytest.raises(ps.ConfigError, match="ServeOptions: volumes='abc': must be a list of paths"):
        ps.ServeOptions(volumes="abc")


def test_options_that_serve_would_refuse_are_refused_here(tmp_path: Path) -> None:
    with pytest.raises(ps.ConfigError, match="four gigabytes"):
        ps.ServeOptions(dir=tmp_path, host_budget="four gigabytes").socket_path()
    with pytest.raises(ps.ConfigError, match="colour"):
        ps.ServeOptions(dir=tmp_path, settings={"colour": "red"}).socket_path()
