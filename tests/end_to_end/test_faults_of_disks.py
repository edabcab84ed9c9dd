"""Disks that are full, damaged, missing or not ours: the daemon says so, and everything else goes on."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import paramstore_client as ps
from paramstore.core.key import ExpertKey
from paramstore_testkit.processes.daemon_process import DaemonProcess

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("in_time")]

MIB = 1 << 20
OPTIONS = ps.AdamW(lr=0.1)
SPOILT: ExpertKey = (1, 2)

Serve = Callable[..., DaemonProcess]
ValueOf = Callable[[ExpertKey], dict[str, torch.Tensor]]


def volume_of(directory: Path) -> Path:
    return directory / "volume" / "volume-000.data"


def spoil(directory: Path, value: torch.Tensor) -> None:
    """Flips a bit of the only place of the volume that holds `value`."""
    content = volume_of(directory).read_bytes()
    place = content.find(value.numpy().tobytes())
    assert place > 0
    with volume_of(directory).open("r+b") as file:
        file.seek(place + 1000)
        file.write(bytes([content[place + 1000] ^ 1]))


# --- full


def test_a_namespace_that_does_not_fit_the_disk_is_refused_and_a_smaller_one_fits(
    small_disk: Path, tmp_path: Path, serve: Serve
) -> None:
    daemon = serve(tmp_path / "store", "--volume", str(small_disk), "--host-budget", "64MiB").start()
    with ps.connect(daemon.address) as store:
        with pytest.raises(ps.CapacityError, match=r"volume 0 cannot grow .* No space left on device; \d+ bytes are missing"):
            store.create_namespace("moe", ps.adamw_schema({"w": (512, 512)}), layers=1, experts=4)
        assert store.namespaces() == []
        with store.create_namespace("moe", ps.adamw_schema({"w": (16, 16)}), layers=1, experts=4) as namespace:
            namespace.initialize(lambda key: {"w": torch.full((16, 16), float(key[1]))})
            namespace.commit(1).wait()
            assert namespace.steps() == [1]
    daemon.stop()


def fill(disk: Path) -> None:
    """Leaves nothing free: what others write takes every byte."""
    with (disk / "others").open("wb", buffering=0) as others:
        while free := os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize:
            others.write(bytes(min(free, MIB)))


@pytest.mark.parametrize("small_disk", [48], indirect=True)
def test_on_a_disk_that_others_fill_after_the_namespace_was_created_every_commit_succeeds(small_disk: Path, serve: Serve) -> None:
    daemon = serve(small_disk / "store", "--host-budget", "64MiB").start()
    value = torch.ones(64, 64)
    with ps.connect(daemon.address) as store:
        schema = ps.adamw_schema({"w": (64, 64)}, param_dtype="float32")
        with store.create_namespace("moe", schema, layers=2, experts=16) as namespace:
            fill(small_disk)
            namespace.initialize(lambda key: {"w": value})
            for step in range(30):
                namespace.push({(layer, expert): {"w": value} for layer in range(2) for expert in range(16)})
                namespace.apply(OPTIONS)
                namespace.commit(step, extra=bytes(64 << 10) if step % 3 == 0 else b"").wait()
            assert namespace.steps() == [28, 29]
        assert store.stats()["catalog"]["free_bytes"] == 0
    daemon.stop()


@pytest.mark.parametrize("small_disk", [48], indirect=True)
def test_a_namespace_whose_catalog_finds_no_room_is_refused_with_the_fix(small_disk: Path, tmp_path: Path, serve: Serve) -> None:
    daemon = serve(small_disk / "store", "--volume", str(tmp_path / "volume"), "--host-budget", "64MiB").start()
    fill(small_disk)
    with ps.connect(daemon.address) as store:
        with pytest.raises(ps.CapacityError, match=r"catalog .*: \d+ bytes needed, .* has 0 bytes free: free some there"):
            store.create_namespace("moe", ps.adamw_schema({"w": (16, 16)}), layers=100, experts=100)
        assert store.namespaces() == []
    daemon.stop()


def test_a_disk_too_small_for_a_volume_keeps_the_daemon_from_starting(
    small_disk: Path, tmp_path: Path, serve: Serve
) -> None:
    (small_disk / "others").write_bytes(bytes(8 * MIB))
    daemon = serve(tmp_path / "store", "--volume", str(small_disk), "--host-budget", "64MiB")
    assert daemon.run() == 1
    assert "bytes are missing" in daemon.stderr
    assert "Traceback" not in daemon.stderr
    assert [path.name for path in small_disk.iterdir()] == ["others"]


@pytest.mark.parametrize("small_disk", [48], indirect=True)
def test_a_new_store_on_a_full_disk_is_refused_with_the_reason_at_every_page_and_made_once_there_is_room(
    small_disk: Path, serve: Serve
) -> None:
    daemon = serve(small_disk, "--host-budget", "64MiB")
    for free_pages in range(5):
        fill(small_disk)
        os.truncate(small_disk / "others", (small_disk / "others").stat().st_size - free_pages * os.sysconf("SC_PAGE_SIZE"))
        assert daemon.run() == 1, daemon.stderr
        assert "bytes free: free some there" in daemon.stderr or "bytes are missing" in daemon.stderr
        assert "Traceback" not in daemon.stderr
    (small_disk / "others").unlink()
    daemon.start()
    daemon.stop()


def test_a_volume_of_fixed_size_refuses_what_does_not_fit_and_names_the_missing_bytes(tmp_path: Path, serve: Serve) -> None:
    daemon = serve(tmp_path / "store", "--volume-size", "16MiB", "--host-budget", "64MiB").start()
    with ps.connect(daemon.address) as store:
        with pytest.raises(ps.CapacityError, match=r"\d+ bytes are missing; add a volume \(--add-volume\)"):
            store.create_namespace("moe", ps.adamw_schema({"w": (512, 512)}), layers=1, experts=4)
        assert store.namespaces() == []


# --- damaged or missing


def truncate(directory: Path) -> None:
    os.truncate(volume_of(directory), volume_of(directory).stat().st_size - MIB)


def remove_volume(directory: Path) -> None:
    volume_of(directory).unlink()


def replace_by_directory(directory: Path) -> None:
    volume_of(directory).unlink()
    volume_of(directory).mkdir()


def replace_by_link(directory: Path) -> None:
    volume_of(directory).rename(directory / "elsewhere")
    volume_of(directory).symlink_to(directory / "elsewhere")


def blank_superblocks(directory: Path) -> None:
    with volume_of(directory).open("r+b") as file:
        file.write(bytes(9 * MIB))


def empty_volume(directory: Path) -> None:
    os.truncate(volume_of(directory), 0)


def garble_catalog(directory: Path) -> None:
    with (directory / "catalog" / "data.mdb").open("r+b") as file:
        file.write(os.urandom(64 << 10))


def truncate_catalog(directory: Path) -> None:
    os.truncate(directory / "catalog" / "data.mdb", 8192)


def lose_catalog(directory: Path) -> None:
    shutil.rmtree(directory / "catalog")


@pytest.mark.parametrize(
    ("damage", "code", "reason"),
    [
        (truncate, 4, "truncated"), (remove_volume, 1, "is missing: give its path as --volume: it was last in"),
        (replace_by_directory, 1, "directory"),
        (replace_by_link, 1, "symbolic link"), (blank_superblocks, 4, "superblock"), (empty_volume, 4, "not a volume"),
        (garble_catalog, 4, "catalog"), (truncate_catalog, 4, "truncated"),
        (lose_catalog, 1, "its catalog is not in this directory"),
    ],
)  # fmt: skip
def test_a_damaged_store_is_refused_with_the_reason_and_its_volume_left_alone(
    damage: Callable[[Path], None], code: int, reason: str, directory: Path, serve: Serve
) -> None:
    damage(directory)
    before = volume_of(directory).read_bytes() if volume_of(directory).is_file() else None
    daemon = serve(directory)
    assert daemon.run() == code
    assert before == (volume_of(directory).read_bytes() if volume_of(directory).is_file() else None)
    assert daemon.stdout == ""
    last = daemon.stderr.splitlines()[-1]
    assert last.startswith("paramstore: ")
    assert reason in last
    assert "Traceback" not in daemon.stderr


def test_a_copy_of_an_older_volume_is_refused(directory: Path, tmp_path: Path, serve: Serve) -> None:
    shutil.copy(volume_of(directory), tmp_path / "older")
    daemon = serve(directory).start()
    with ps.connect(daemon.address) as store, store.open_namespace("moe", mode="write") as namespace:
        namespace.commit(2).wait()
    daemon.stop()
    shutil.copy(tmp_path / "older", volume_of(directory))
    assert daemon.run() == 4
    assert "step 2 of namespace 'moe' cannot be proven" in daemon.stderr


def test_a_corrupt_record_is_an_error_for_its_key_alone(directory: Path, value_of: ValueOf, serve: Serve) -> None:
    spoil(directory, value_of(SPOILT)["w"])
    with serve(directory) as daemon, ps.connect(daemon.address) as store, store.open_namespace("moe") as reader:
        for call in (lambda: reader.acquire([SPOILT]), lambda: reader.read(SPOILT), lambda: reader.prefetch([SPOILT]).wait()):
            with pytest.raises(ps.CorruptRecord, match=r"\(1, 2\).*volume 0, offset \d+"):
                call()
        with pytest.raises(ps.CorruptRecord):
            reader.acquire([(0, 0), SPOILT])
        others = [key for key in reader.space if key != SPOILT]
        with reader.acquire(others[:3]) as lease:
            for key in others[:3]:
                assert torch.equal(lease[key]["w"], value_of(key)["w"])
        assert store.stats()["namespaces"]["moe"]["leased_slots"] == 0


def test_an_apply_that_fails_half_way_breaks_the_namespace_until_rollback(
    directory: Path, value_of: ValueOf, serve: Serve
) -> None:
    spoil(directory, value_of(SPOILT)["w"])
    with serve(directory) as daemon, ps.connect(daemon.address) as store:
        reader = store.open_namespace("moe")
        writer = store.open_namespace("moe", mode="write")
        held = reader.acquire([(0, 0)])
        gradients: dict[ExpertKey, Any] = {key: {"w": torch.ones(64, 64)} for key in writer.space}
        writer.push(gradients)
        failed = writer.apply(OPTIONS)
        with pytest.raises(ps.StepFailed, match=r"apply on 'moe' failed: .*\(1, 2\)"):
            failed.wait()
        for call in (lambda: writer.push(gradients), lambda: writer.apply(OPTIONS).wait(), lambda: writer.commit(2).wait()):
            with pytest.raises(ps.StepFailed, match=r"rollback\(\) is the way on"):
                call()
        assert store.stats()["namespaces"]["moe"]["broken"] is not None
        assert torch.equal(held[0, 0]["w"], value_of((0, 0))["w"])
        with reader.acquire([(0, 1)]) as lease:  # committed reads go on
            assert torch.equal(lease[0, 1]["w"], value_of((0, 1))["w"])

        writer.rollback(1)
        whole = [key for key in writer.space if key != SPOILT]
        for key in whole:
            with writer.acquire([key]) as lease:
                assert torch.equal(lease[key]["w"], value_of(key)["w"])
        writer.push({key: gradients[key] for key in whole})
        assert writer.apply(OPTIONS).wait()["records"] == len(whole)
        writer.commit(2).wait()
        assert writer.steps() == [1, 2]
        store.close()
