"""`paramstore status` of a running daemon, of none, and of one that cannot be used."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console
from rich.table import Table

import paramstore_client
from paramstore import __version__
from paramstore.cli import status
from paramstore.core.schema import Schema
from paramstore.errors import VolumeError
from paramstore.sizes import format_size
from paramstore.storage.volume.file_volume import UNTOLD
from paramstore_client import client as client_module
from paramstore_testkit.disks.machine import Machine
from paramstore_testkit.processes.daemon_process import DaemonProcess
from paramstore_testkit.processes.forked_daemon import ForkedDaemon
from paramstore_testkit.stores.small_store import SCHEMA, create, run, train

Run = Callable[..., int]


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    """A daemon with one namespace that has no commit."""
    with ForkedDaemon(tmp_path_factory.mktemp("status") / "store", "--host-budget", "32MiB") as daemon:
        with paramstore_client.connect(daemon.address) as store:
            store.create_namespace("experts", Schema.adamw({"w": (8, 8)}), layers=2, experts=3)
        yield daemon


@pytest.mark.slow
def test_one_screen_shows_tiers_volumes_and_namespaces(
    daemon: DaemonProcess, paramstore: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert paramstore("status", daemon.address) == 0
    shown, complaints = capsys.readouterr()
    assert complaints == ""
    assert f"paramstore {__version__}, pid {daemon.pid}" in shown
    assert re.search(r"host .* 32 MiB", shown)
    assert re.search(r"nvme ", shown)
    assert str(daemon.directory / "volume") in shown
    assert re.search(r"experts .*None .* ok", shown)
    assert re.search(rf"^catalog in {re.escape(str(daemon.directory))}: [\d.]+ \w+ free on its file system$", shown, re.MULTILINE)


def test_the_speed_of_volumes_is_told_and_what_was_read_from_each() -> None:
    volumes: dict[str, dict[str, Any]] = {
        "0": {"speed_class": 1, "read_bytes_per_s": 1 << 30, "bytes_read": 1 << 20},
        "1": {"speed_class": 0, "read_bytes_per_s": None, "bytes_read": 3 << 20}, "2": {"bytes_read": 0},
    }  # fmt: skip
    assert [status._speed(volume) for volume in volumes.values()] == ["1 (1 GiB/s)", "0", ""]
    assert [status._read(volume, volumes) for volume in volumes.values()] == ["1 MiB, 25%", "3 MiB, 75%", "0 B, 0%"]
    assert status._read(volumes["0"], {"0": volumes["0"]}) == "1 MiB"


def printed(capsys: pytest.CaptureFixture[str], *cells: str) -> str:
    """The screen of a table of two rows, whose second has long cells."""
    table = Table(title="Things")
    for column in ("name", "place", "empty", *(f"column {number}" for number in range(len(cells)))):
        table.add_column(column)
    table.add_row("one", "[here]", "", *("" for _ in cells))
    table.add_row("two", "there", "", *cells)
    status._show(Console(), table)
    return capsys.readouterr()[0]


def test_a_row_that_is_wider_than_the_screen_is_a_paragraph_in_which_nothing_is_cut(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    cells = [f"word{number} " * 3 for number in range(9)]
    shown = printed(capsys, *cells)
    assert all(len(line) <= 80 for line in shown.splitlines())
    assert "…" not in shown
    assert shown.splitlines()[:3] == ["Things", "name one", "  place [here]".ljust(80)]
    assert "empty" not in shown, "what says nothing is left out"
    text = " ".join(shown.split())
    assert all(f"column {number} {' '.join(cell.split())}" in text for number, cell in enumerate(cells))
    assert "│" in printed(capsys, "short"), "one that fits is a table"


@pytest.mark.slow
def test_in_a_pipe_a_row_is_a_line(daemon: DaemonProcess) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    command = [sys.executable, "-m", "paramstore", "status", daemon.address]
    shown = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60, env=environment).stdout
    assert "…" not in shown
    (row,) = (line for line in shown.splitlines() if "experts" in line and "│" in line)
    assert row.rstrip(" │").endswith("ok")
    (head,) = (line for line in shown.splitlines() if "amplification" in line)
    assert head.count("┃") == row.count("│") == 12


@pytest.mark.slow
@pytest.mark.parametrize("columns", [60, 80, 200])
def test_readers_and_namespaces_are_told_whole_at_any_width(
    columns: int, daemon: DaemonProcess, paramstore: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    assert paramstore("status", daemon.address) == 0
    shown = capsys.readouterr()[0]
    assert "…" not in shown
    text = " ".join(shown.split())
    for word in ("param slots", "optim slots", "leased", "written in all", "endurance", "not stated", "0 B"):
        assert word in text, word
    assert str(daemon.directory / "volume") in "".join(shown.split())


@pytest.mark.slow
def test_the_version_is_whole_on_a_terminal_with_colours(
    daemon: DaemonProcess, paramstore: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert paramstore("status", daemon.address) == 0
    shown = capsys.readouterr().out
    assert "\x1b[" in shown, "there are colours"
    assert f"paramstore {__version__}, pid {daemon.pid}, up " in shown


@pytest.mark.slow
def test_json_alone_is_on_stdout_and_says_everything(
    daemon: DaemonProcess, paramstore: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    assert paramstore("status", "--json", daemon.address) == 0
    stats = json.loads(capsys.readouterr().out)
    assert stats["daemon"]["pid"] == daemon.pid
    assert stats["tiers"]["host"]["budget_bytes"] == 32 << 20
    assert stats["namespaces"]["experts"]["keys"] == 6
    assert {"daemon", "tiers", "volumes", "queues", "namespaces"} <= stats.keys()


@pytest.mark.slow
def test_the_address_may_be_a_path_or_the_stores_directory_or_come_from_the_environment(
    daemon: DaemonProcess, paramstore: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert paramstore("status", "--json", str(daemon.socket)) == 0
    assert paramstore("status", "--json", str(daemon.directory)) == 0
    monkeypatch.setenv("PARAMSTORE_ADDRESS", daemon.address)
    assert paramstore("status", "--json") == 0
    assert capsys.readouterr().out.count(f'"pid": {daemon.pid}') == 3


def test_a_fenced_volume_dirty_bytes_and_the_wear_of_drives_are_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "240")
    machine = Machine(volume_count=2)
    machine.config = msgspec.structs.replace(
        machine.config, dirty_limit_bytes=1 << 30, volume_endurance_bytes=4 * SCHEMA.record_bytes
    )

    async def scenario() -> None:
        store = machine.start()
        view = await create(store)
        await train(store, view)
        store.transfers._planner.space.fences.fail_flush(1, VolumeError("the cable is loose"))
        stats: Any = await machine.service.stats()
        stats["volumes"]["0"].update({"mode": "buffered", "reason": UNTOLD, "path": "/data/[old]/[/red]"})
        status._print(stats)

    run(scenario())
    shown = capsys.readouterr().out
    assert "/data/[old]/[/red]" in shown
    assert f"\nvolume 0 has mode buffered: {UNTOLD}\n" in shown, "a line of its own, not in the table"
    assert re.search(r"│ buffered +│", shown)
    assert "catalog in" not in shown, "nobody knows the disk of a simulated store"
    assert "volume 1 is fenced, it gets no new records: a flush failed: the cable is loose; restart the daemon" in shown
    assert "volume 0 is fenced" not in shown
    assert f"{format_size(4 * SCHEMA.record_bytes)} of 1 GiB" in shown
    assert re.search(r"\d+\.\d\d% of 112 KiB", shown)
    assert re.search(r" 1\.\d{3} ", shown), "the write amplification of the namespace"


def test_a_prepared_step_is_the_namespaces_state_with_the_way_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "240")

    async def scenario() -> None:
        machine = Machine()
        store = machine.start()
        view = await create(store)
        await train(store, view)
        await store.committer.prepare(view, 1, b"")
        stats: Any = await machine.service.stats()
        status._print(stats)
        await store.history.finalize(view, 1)
        stats = await machine.service.stats()
        (line,) = status.namespace_lines(stats["namespaces"])
        parts = "4 times its state: 2 for retained_steps, 1 for the step being made, 1 for records written again"
        assert line == f"namespace moe may take 448 KiB of the volumes, {parts}"

    run(scenario())
    shown = capsys.readouterr().out
    assert re.search(r"moe .* step 1 is prepared ", shown)
    told = "step 1 is prepared: finalize it, or open a writer at=1, which commits it, or at=0, which drops it"
    assert f"\nnamespace moe: {told}\n" in shown


def test_why_a_namespace_is_broken_is_told_below_the_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    reason = "apply failed: " + "a long story " * 30

    async def scenario() -> None:
        machine = Machine()
        store = machine.start()
        view = await create(store)
        view.namespace.writing.broken = reason
        stats: Any = await machine.service.stats()
        status._print(stats)

    run(scenario())
    shown = capsys.readouterr().out
    assert re.search(r"moe .* broken ", shown)
    assert shown.count("a long story") == 30
    assert f"\nnamespace moe is broken: {reason}\n" in shown


def test_leased_extents_and_how_they_are_read_are_said_where_any_may_be_leased() -> None:
    extents: dict[str, Any] = {"leased": 3, "leases_max": 8, "modes": {"0": ["gds", "host"]}}
    assert list(status.extent_lines(extents)) == [
        "extents: 3 of 8 are leased", "extents of volume 0 are read so, as clients have proven: gds, host",
    ]  # fmt: skip
    assert list(status.extent_lines({**extents, "leases_max": 0})) == list(status.extent_lines(None)) == []


def test_no_daemon_is_unreachable_with_the_way_to_start_one(
    tmp_path: Path, paramstore: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    assert paramstore("status", f"unix://{tmp_path}/none.sock") == 3
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "no daemon listens" in captured.err
    assert "`paramstore serve --dir DIR`" in captured.err
    assert paramstore("status", str(tmp_path)) == 3
    told = capsys.readouterr().err
    assert f"start one with `paramstore serve --dir {tmp_path}`, or connect with autostart=ServeOptions(dir='{tmp_path}')" in told


@pytest.mark.slow
def test_a_daemon_of_another_version_is_unreachable(
    daemon: DaemonProcess, paramstore: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(client_module, "PROTOCOL_MAJOR", client_module.PROTOCOL_MAJOR + 1)
    assert paramstore("status", daemon.address) == 3
    assert "VersionMismatch" in capsys.readouterr().err


@pytest.mark.parametrize("address", ["http://host", "unix://" + "d" * 200])
def test_an_address_that_cannot_be_one_is_a_usage_error(
    address: str, paramstore: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    assert paramstore("status", address) == 2
    assert "ConfigError" in capsys.readouterr().err


SCRUB = {
    "bytes_read": 3 << 30, "bytes_total": 4 << 30, "found": 1, "state": "done", "copy_findings": [],
    "findings": [{
        "namespace": "experts", "key": [1, 2], "steps": [3], "volume": 0, "offset_bytes": 4096,
        "reason": "chunk 2 has another checksum",
    }],
}  # fmt: skip


@pytest.mark.parametrize(
    ("patrol", "lines"),
    [
        (None, []),
        ({"scrub_days": 0.0, "running": None, "last": None, "last_ended_s": None}, ["patrol: off, scrub_days is 0"]),
        (
            {"scrub_days": 14.0, "running": None, "last": None, "last_ended_s": None},
            ["patrol: a pass every 14 days; none is under way; none has ended yet"],
        ),
        (
            {"scrub_days": 0.5, "running": {**SCRUB, "found": 0, "findings": []}, "last": SCRUB, "last_ended_s": 86_400 * 2.5},
            [
                "patrol: a pass every 0.5 days; 3 GiB of 4 GiB are read: none damaged; "
                "the last one ended 2.5 days ago, done: 1 damaged",
                "experts (1, 2), step 3, volume 0, offset 4096: chunk 2 has another checksum",
            ],
        ),
    ],
)
def test_what_the_patrol_did_and_found_is_told(patrol: dict[str, Any] | None, lines: list[str]) -> None:
    assert list(status.patrol_lines(patrol)) == lines


def findings(count: int) -> list[Any]:
    return [{**SCRUB["findings"][0], "offset_bytes": number} for number in range(count)]  # type: ignore[index]


@pytest.mark.parametrize(("found", "described"), [(15, 15), (1500, 20), (11, 1)])
def test_many_findings_of_the_patrol_are_told_in_ten_lines(found: int, described: int) -> None:
    """A daemon describes a few of its findings, and counts all."""
    patrol = {
        "scrub_days": 14.0, "running": {**SCRUB, "found": 1, "findings": findings(1)},
        "last": {**SCRUB, "found": found, "findings": findings(described)}, "last_ended_s": 1.0,
    }  # fmt: skip
    lines = list(status.patrol_lines(patrol))
    assert len(lines) == 1 + min(described, 10) + 1
    assert lines[-1] == f"and {found - min(described, 10)} more: `paramstore verify` names them"


def test_findings_of_two_passes_that_are_not_the_same_are_all_counted() -> None:
    last = {**SCRUB, "found": 12, "findings": findings(12)}
    running = {**SCRUB, "found": 1, "findings": [{**SCRUB["findings"][0], "namespace": "others"}]}  # type: ignore[index]
    lines = list(status.patrol_lines({"scrub_days": 14.0, "running": running, "last": last, "last_ended_s": 1.0}))
    assert lines[-1] == "and 3 more: `paramstore verify` names them"


@pytest.mark.parametrize("verify", [None, {"running": None, "last": None}, {"last": {**SCRUB, "found": 0, "findings": []}}])
def test_a_verify_that_found_nothing_is_not_told(verify: dict[str, Any] | None) -> None:
    assert list(status.verify_lines(verify)) == []


@pytest.mark.parametrize(("found", "described"), [(15, 15), (1500, 20)])
def test_what_the_last_verify_found_is_told_in_ten_lines(found: int, described: int) -> None:
    lines = list(status.verify_lines({"running": None, "last": {**SCRUB, "found": found, "findings": findings(described)}}))
    assert lines[0] == f"verify: the last one ended, done: {found} damaged"
    assert lines[1] == "experts (1, 2), step 3, volume 0, offset 0: chunk 2 has another checksum"
    assert len(lines) == 1 + 10 + 1
    assert lines[-1] == f"and {found - 10} more: `paramstore verify` names them"


def test_the_screen_has_the_findings_of_the_last_verify(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "160")

    async def scenario() -> None:
        machine = Machine()
        store = machine.start()
        await create(store)
        stats: Any = await machine.service.stats()
        status._print({**stats, "verify": {"running": None, "last": SCRUB}})

    run(scenario())
    assert "experts (1, 2), step 3, volume 0, offset 4096: chunk 2 has another checksum" in capsys.readouterr().out
