"""`paramstore verify` of a running daemon: what it prints, what it ends with, and that an interrupt ends the scrub too."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import paramstore_client
from paramstore.cli import verify as verify_module
from paramstore.core.location import Identity
from paramstore.core.schema import Schema
from paramstore.errors import CorruptRecord
from paramstore.storage.format.structures import check_header
from paramstore.wire import messages as m
from paramstore_testkit.processes.daemon_process import DaemonProcess
from paramstore_testkit.processes.forked_daemon import ForkedDaemon
from paramstore_testkit.stores.small_store import SCHEMA
from paramstore_testkit.wire.fake_daemon import FakeDaemon

Run = Callable[..., int]
RECORDS = 6
FINDING = {
    "namespace": "experts", "key": [1, 2], "steps": [3, 4], "epoch": 2, "version": 5, "volume": 0, "offset_bytes": 9437184,
    "reason": "chunk 2 has another checksum",
}  # fmt: skip


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    """A daemon with one committed namespace."""
    with ForkedDaemon(tmp_path_factory.mktemp("verify") / "store", "--host-budget", "32MiB") as daemon:
        with paramstore_client.connect(daemon.address) as store:
            schema = Schema.adamw({"w": (8, 8)})
            with store.create_namespace("experts", schema, layers=2, experts=3) as namespace:
                namespace.initialize(lambda key: {"w": torch.ones(8, 8)})
                namespace.commit(1).wait()
        yield daemon


@pytest.fixture
def fake(tmp_path: Path) -> Iterator[FakeDaemon]:
    with FakeDaemon(tmp_path / "daemon.sock") as daemon:
        yield daemon


def answer_with(fake: FakeDaemon, found: int) -> None:
    result = {
        "namespaces": ["experts"], "bytes_per_s": None, "state": "done", "records": 9, "records_total": 9, "bytes_read": 9 << 20,
        "bytes_total": 9 << 20, "superseded": 0, "found": found, "findings": [FINDING] * min(found, 1), "seconds": 1.25,
    }  # fmt: skip
    fake.script(m.Verify, lambda session, request: session.send(m.Done(request.id, result)))


@pytest.mark.slow
def test_a_whole_store_ends_well(daemon: DaemonProcess, paramstore: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert paramstore("verify", daemon.address) == 0
    shown, complaints = capsys.readouterr()
    assert complaints == ""
    copies = "4 copies of superblocks and commit notes"
    assert re.fullmatch(rf"{RECORDS} records, {copies}, 96 KiB read in \d+\.\d s: none damaged\n", shown)


@pytest.mark.slow
def test_json_alone_is_on_stdout_and_says_everything(
    daemon: DaemonProcess, paramstore: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    assert paramstore("verify", "--json", "--namespace", "experts", "--rate", "1GiB", daemon.address) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["namespaces"], result["bytes_per_s"], result["records"]) == (["experts"], 1 << 30, RECORDS)
    assert (result["found"], result["findings"], result["state"]) == (0, [], "done")


@pytest.mark.parametrize("rate", ["-1", "64", "fast"])
def test_a_wrong_rate_is_a_usage_error_before_a_daemon_is_asked(rate: str, paramstore: Run, tmp_path: Path) -> None:
    assert paramstore("verify", f"--rate={rate}", str(tmp_path / "none.sock")) == 2
    assert paramstore("verify", str(tmp_path / "none.sock")) == 3


@pytest.mark.slow
def test_a_namespace_that_is_not_there_is_an_error(
    daemon: DaemonProcess, paramstore: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    assert paramstore("verify", "--namespace", "nobody", daemon.address) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "there is no namespace 'nobody'" in captured.err


@pytest.mark.slow
def test_an_interrupt_ends_the_scrub_in_the_daemon(daemon: DaemonProcess) -> None:
    command = [sys.executable, "-m", "paramstore", "verify", "--rate", "1B", daemon.address]
    with paramstore_client.connect(daemon.address) as store:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        try:
            deadline_s = time.monotonic() + 30
            while store.stats()["verify"]["running"] is None:  # asking is what takes the time
                assert time.monotonic() < deadline_s
                assert process.poll() is None
            process.send_signal(signal.SIGINT)
            out, complaints = process.communicate(timeout=30)
        finally:
            process.kill()
            process.wait()
        assert process.returncode == -signal.SIGINT, complaints.decode()
        assert (out, complaints) == (b"", b"")
        while (stats := store.stats()["verify"])["running"] is not None:  # its session's end is heard a moment later
            assert time.monotonic() < deadline_s
        assert stats["last"]["state"] == "cancelled"


def test_findings_are_one_line_each_and_end_with_4(
    fake: FakeDaemon, paramstore: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    answer_with(fake, found=3)
    assert paramstore("verify", str(fake.path)) == 4
    shown, complaints = capsys.readouterr()
    assert complaints == ""
    assert shown.splitlines() == [
        "experts (1, 2), step 3, step 4, volume 0, offset 9437184: chunk 2 has another checksum",
        "and 2 more",
        "9 records, 9 MiB read in 1.2 s: 3 damaged",
    ]


def test_damaged_copies_are_lines_of_their_own_and_end_with_4(
    fake: FakeDaemon, paramstore: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    note = {
        "kind": "note", "namespace": "experts", "step": 4, "volume": 1, "offset_bytes": 1 << 20, "copy": 0,
        "reason": "no commit note; the other copy is whole",
    }  # fmt: skip
    superblock = {**note, "kind": "superblock", "namespace": None, "step": None, "offset_bytes": 0}
    result = {
        "records": 9, "bytes_read": 9 << 20, "copies": 12, "found": 4, "findings": [FINDING], "copy_findings": [superblock, note],
        "seconds": 1.25,
    }  # fmt: skip
    fake.script(m.Verify, lambda session, request: session.send(m.Done(request.id, result)))
    assert paramstore("verify", str(fake.path)) == 4
    assert capsys.readouterr().out.splitlines() == [
        "superblock, copy 0, volume 1, offset 0: no commit note; the other copy is whole",
        "experts commit note of step 4, copy 0, volume 1, offset 1048576: no commit note; the other copy is whole",
        "experts (1, 2), step 3, step 4, volume 0, offset 9437184: chunk 2 has another checksum",
        "and 1 more",
        "9 records, 12 copies of superblocks and commit notes, 9 MiB read in 1.2 s: 4 damaged",
    ]


def test_a_line_names_key_and_place_once() -> None:
    part = SCHEMA.stored
    with pytest.raises(CorruptRecord) as caught:
        check_header(
            bytes(part.header_bytes), part=part, store_uuid=bytes(16), namespace="experts", key=(1, 2), identity=Identity(2, 5),
            root=0, place="volume 0, offset 9437184",
        )  # fmt: skip
    reason = str(caught.value)
    assert reason.startswith("record (1, 2) of namespace 'experts', version 5 of epoch 2, at volume 0, offset 9437184: ")
    (line,) = verify_module.finding_lines({"found": 1, "findings": [{**FINDING, "reason": reason}]})
    rest = reason.partition("offset 9437184: ")[2]
    assert line == f"experts (1, 2), step 3, step 4, volume 0, offset 9437184: version 5 of epoch 2: {rest}"


def test_findings_as_json_end_with_4_too(fake: FakeDaemon, paramstore: Run, capsys: pytest.CaptureFixture[str]) -> None:
    answer_with(fake, found=1)
    assert paramstore("verify", "--json", str(fake.path)) == 4
    assert json.loads(capsys.readouterr().out)["findings"] == [FINDING]


@pytest.mark.slow
def test_while_it_runs_progress_comes_from_the_stats_and_goes_to_stderr(
    fake: FakeDaemon, paramstore: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(verify_module, "POLL_S", 0.001)
    monkeypatch.setenv("FORCE_COLOR", "1")  # as on a terminal
    looks: list[int] = []

    def progress(session: object, request: m.Stats) -> None:
        looks.append(request.id)
        running = {"bytes_read": len(looks) << 20, "bytes_total": 64 << 20, "found": 7} if len(looks) > 1 else None
        session.send(m.Done(request.id, {"verify": {"running": running, "last": None}}))  # type: ignore[attr-defined]
        if len(looks) == 4:
            answer_with(fake, found=0)
            held = next(request for request in fake.received if isinstance(request, m.Verify))
            fake._receive(session, held)  # type: ignore[arg-type]

    fake.hold(m.Verify)
    fake.script(m.Stats, progress)
    assert paramstore("verify", str(fake.path)) == 0
    shown, bar = capsys.readouterr()
    assert shown == "9 records, 9 MiB read in 1.2 s: none damaged\n"
    assert "verify" in bar
    assert "64.0 MiB" in re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", bar).replace("/64.0", "/ 64.0")
    assert len(looks) == 4


def test_no_daemon_is_unreachable(tmp_path: Path, paramstore: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert paramstore("verify", f"unix://{tmp_path}/none.sock") == 3
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "no daemon listens" in captured.err


@pytest.mark.parametrize("words", [("--rate", "fast"), ("--rate",), ("--unknown",)])
def test_a_wrong_flag_is_a_usage_error(
    words: tuple[str, ...], fake: FakeDaemon, paramstore: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    assert paramstore("verify", str(fake.path), *words) == 2
    assert capsys.readouterr().out == ""
    assert fake.requests(m.Verify) == []


def test_a_daemon_of_an_older_minor_is_unreachable(
    fake: FakeDaemon, paramstore: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.minor = 0
    assert paramstore("verify", str(fake.path)) == 3
    assert "VersionMismatch" in capsys.readouterr().err
