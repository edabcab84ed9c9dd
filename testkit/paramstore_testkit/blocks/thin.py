"""Lets thin provisioning run out: `fallocate` gave the space, the device below has none, and a write or a flush says so.

A file system lies on a loop device over a sparse file in a small tmpfs, and another file takes the rest of the tmpfs. From then
on the store must stop: commits fail with an error of ours and none is acknowledged. After the space has come back and the
file systems were mounted anew, everything acknowledged must be there.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from paramstore.errors import ParamStoreError
from paramstore.storage.volume import file_volume
from paramstore_testkit.blocks.check import reopen
from paramstore_testkit.blocks.life import CATALOG_DISK, FIRST_VOLUME_DISK, DiskLife, config_of, live_on
from paramstore_testkit.blocks.mounts import DISK_BYTES, detach, disk_at, mount, mounted_loops, unmount
from paramstore_testkit.bugs.block_bugs import plant
from paramstore_testkit.crash import check as crash_check
from paramstore_testkit.crash import life as crash_life
from paramstore_testkit.crash.initialization import begin
from paramstore_testkit.crash.life import KEYS

KIND = "ext4"
TMPFS_BYTES = 64 << 20
HOG_BYTES = 1 << 20
EXTRA_WORDS = 200
EXTRA_BYTES_MAX = 60_000
FILLING_COMMITS_MAX = 12
"""Most commits until one needs a block that was never written."""
DISKS = {"volume": FIRST_VOLUME_DISK, "buffered": FIRST_VOLUME_DISK, "catalog": CATALOG_DISK}
"""The disk that runs out of space: a volume's, a volume's that goes through the page cache, or the catalog's."""


def fill_up(root: Path, *, place: str, seed: int, bug: str = "") -> str:
    """Runs one place out of space; gives the store's error in one line. Raises AssertionError if it went on, or lost something."""
    told: list[tuple[str, int]] = []
    config = config_of(root, volume_count=1)
    for module in (crash_life, crash_check):
        vars(module).update(extra_of=growing_extra)
    if bug:
        plant(bug)
    if place == "buffered":
        vars(file_volume).update(refusal_of_direct=lambda file, probe: "the page cache is wanted")
    with thin_files(root, DISKS[place]) as (files, hog), mounted_loops(root, files, kind=KIND) as loops:
        life = DiskLife(config, seed=seed, tell=lambda what, step: told.append((what, step)))
        said = life.run(_live_until_full(life, hog))
        for index in range(len(files)):
            unmount(disk_at(root, index))
        hog.unlink()
        for index, loop in enumerate(loops):
            mount(loop.path, disk_at(root, index), KIND)
        acknowledged = max(step for what, step in told if what == "acknowledged")
        started = max(step for what, step in told if what == "started")
        verdict = reopen(config, life.model.steps)
        assert verdict.step is not None
        assert acknowledged <= verdict.step <= started, f"reopens at {verdict.step}: {told}"
        steps, committed = live_on(config, life.model.steps, seed=seed + 1)
        assert reopen(config, steps).step == committed
    return f"{place}: {said}; reopened at step {verdict.step}, {acknowledged} was acknowledged last, {started} started"


def growing_extra(step: int) -> bytes:
    """Makes a commit's `extra`, longer each time, so that the catalog needs pages it never had."""
    return (b"extra %d " % step * (EXTRA_WORDS * step))[:EXTRA_BYTES_MAX]


@contextmanager
def thin_files(root: Path, thin: int) -> Iterator[tuple[list[Path], Path]]:
    """Makes a sparse file for each disk, each in a tmpfs of its own; and the file that takes the room of disk `thin`."""
    with ExitStack() as stack:
        files = []
        for index in range(2):
            place = root / f"tmpfs{index}"
            place.mkdir()
            mount("tmpfs", place, "tmpfs", f"size={TMPFS_BYTES}")
            stack.callback(detach, place)
            files.append(place / "disk")
            with files[-1].open("wb") as file:
                file.truncate(DISK_BYTES[KIND])
        yield files, files[thin].parent / "hog"


async def _live_until_full(life: DiskLife, hog: Path) -> str:
    """Commits until one fails, then checks that no other is acknowledged either."""
    await begin(life)
    await life.live_through(("train", "commit", "train few", "commit"))
    take_all(hog)
    said = ""
    for _ in range(FILLING_COMMITS_MAX):
        said = await _refusal_of(life)
        if said:
            break
    assert said, "there was room for everything"
    assert await _refusal_of(life), "a commit was acknowledged after one that failed, although nothing has changed"
    with suppress(ParamStoreError):  # there may be no room for the catalog's last row either
        await life.end()
    return said


async def _refusal_of(life: DiskLife) -> str:
    """Updates and commits everything; gives the store's error, or an empty text if it takes them."""
    try:
        await life.train(KEYS)
        await life.commit()
    except ParamStoreError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def take_all(hog: Path) -> None:
    """Takes every free byte of the tmpfs that `hog` lies in."""
    with hog.open("wb", buffering=0) as file:
        for piece_bytes in (HOG_BYTES, os.sysconf("SC_PAGE_SIZE")):
            try:
                while True:
                    file.write(bytes(piece_bytes))
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
