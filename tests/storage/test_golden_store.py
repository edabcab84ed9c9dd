"""Stores of every volume format open for ever: packed ones, made by `tests/golden/make.py`, with the digests of their records."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import torch

import paramstore_client as ps
from paramstore_testkit.processes.daemon_process import QUIET, DaemonProcess
from paramstore_testkit.processes.forked_daemon import ForkedDaemon

GOLDEN = sorted((Path(__file__).parents[1] / "golden").glob("format-*.tar.xz"))
PACKED_BYTES_MAX = 200_000
KEYS = [(layer, expert) for layer in range(2) for expert in range(2)]

pytestmark = [pytest.mark.slow, pytest.mark.parametrize("packed", GOLDEN, ids=lambda path: path.name.partition(".")[0])]


def unpacked(packed: Path, tmp_path: Path) -> tuple[DaemonProcess, dict[str, dict[str, dict[str, str]]]]:
    """A daemon to be started over the store, and the digests of its records by namespace, step and key."""
    directory = tmp_path / "store"
    with tarfile.open(packed) as archive:
        archive.extraction_filter = lambda member, path: member  # it is ours; an argument `filter` is new in Python 3.11.4
        archive.extractall(directory)
    for path in (directory, *directory.rglob("*")):
        path.chmod(0o700 if path.is_dir() else 0o600)
    volumes = [argument for name in ("one", "two") for argument in ("--volume", str(directory / name))]
    return ForkedDaemon(directory, "--host-budget", "64MiB", *volumes, environment=QUIET), json.loads(
        (directory / "expected.json").read_text()
    )


def digest(fields: dict[str, torch.Tensor]) -> str:
    hashed = hashlib.sha256()
    for name in sorted(fields):
        hashed.update(name.encode())
        hashed.update(fields[name].contiguous().view(torch.uint8).numpy().tobytes())
    return hashed.hexdigest()


def test_every_record_of_every_step_is_read_and_training_goes_on(packed: Path, tmp_path: Path) -> None:
    assert packed.stat().st_size <= PACKED_BYTES_MAX
    daemon, expected = unpacked(packed, tmp_path)
    with daemon, ps.connect(daemon.address) as store:
        assert set(expected) == {"touched", "exact", "quantized", "weights", "prepared"}
        for name, steps in expected.items():
            for step, records in steps.items():
                with store.open_namespace(name, at=int(step)) as reader:
                    assert {f"{layer}/{expert}": digest(reader.read((layer, expert))) for layer, expert in KEYS} == records
        with store.open_namespace("touched", mode="write") as writer:
            assert (writer.steps(), writer.snapshots(), writer.extra(3)) == ([1, 2, 3], [1], b"step 3")
            writer.push({KEYS[0]: {"w": torch.ones(32, 8, dtype=torch.bfloat16)}})
            writer.apply(ps.AdamW(lr=0.1)).wait()
            writer.commit(4).wait()
        with store.open_namespace("prepared", mode="write", at=2) as writer:
            assert (writer.committed_step, writer.extra(2)) == (2, b"half")
        with store.create_namespace("draft", ps.adamw_schema({"w": (32, 8)}, param_dtype="bfloat16"), layers=2, experts=2) as draft:
            begun = draft.begin_initialize()
            assert (begun.missing, begun.extra) == (KEYS[1:], b"one of four")


def test_fsck_finds_nothing_and_makes_its_catalog_anew(packed: Path, tmp_path: Path) -> None:
    daemon, _ = unpacked(packed, tmp_path)
    directory = daemon.directory
    fsck = [sys.executable, "-m", "paramstore", "fsck", "--dir", str(directory)]
    volumes = [argument for name in ("one", "two") for argument in ("--volume", str(directory / name))]
    for command in ([*fsck, *volumes], [*fsck, "--rebuild", *volumes]):
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, (command, done.stdout, done.stderr)


@pytest.mark.parametrize(("number", "age"), [(2, "a newer"), (0, "an older")])
@pytest.mark.parametrize("is_known", [True, False], ids=["known", "without its catalog"])
def test_another_format_is_refused_as_such_and_not_overwritten(
    packed: Path, tmp_path: Path, number: int, age: str, is_known: bool
) -> None:
    daemon, _ = unpacked(packed, tmp_path)
    if not is_known:
        (daemon.directory / "catalog" / "data.mdb").unlink()
    for file in daemon.directory.glob("*/volume-*.data"):
        file.write_bytes(renumbered(file.read_bytes(), number))
    before = {file: file.read_bytes() for file in daemon.directory.glob("*/volume-*.data")}
    one, two = daemon.directory / "one", daemon.directory / "two"
    for command in ("serve", "fsck"):
        arguments = ["--dir", str(daemon.directory), "--volume", str(one), "--volume", str(two)]
        done = subprocess.run(
            [sys.executable, "-m", "paramstore", command, *arguments], capture_output=True, text=True, timeout=60, check=False
        )
        assert (done.returncode, "Corrupt" in done.stderr, "damage" in done.stderr) == (1, False, False), done.stderr
        assert f"has volume format {number}, which {age} paramstore writes; this one reads format 1" in done.stderr
    assert {file: file.read_bytes() for file in before} == before


def renumbered(volume: bytes, number: int) -> bytes:
    """The volume with another number in its superblocks and commit notes, as that format's program would write them."""
    changed = bytearray(volume)
    starts = [at for at in range(0, len(volume), 4096) if volume[at : at + 8] in (b"PSVOLUME", b"PSCOMMIT")]
    assert len(starts) > 10
    for at in starts:
        changed[at + 8 : at + 12] = number.to_bytes(4, "little")
    return bytes(changed)
