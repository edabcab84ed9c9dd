"""The life that is recorded, on plain directories: what it did is what a check finds, and the next daemon goes on from there."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from paramstore.errors import CorruptRecord
from paramstore_testkit.blocks.check import reopen
from paramstore_testkit.blocks.life import (
    ACTS,
    CATALOG_DISK,
    FIRST_VOLUME_DISK,
    SHORT_ACTS,
    DiskLife,
    config_of,
    full_acts,
    live_on,
)
from paramstore_testkit.blocks.mounts import disk_at
from paramstore_testkit.crash.initialization import begin

pytestmark = pytest.mark.slow


def lived(root: Path, *acts: str) -> tuple[DiskLife, list[tuple[str, int]]]:
    """A life of these acts, and what it told."""
    for disk in (CATALOG_DISK, FIRST_VOLUME_DISK):
        disk_at(root, disk).mkdir(parents=True)
    told: list[tuple[str, int]] = []

    async def run() -> DiskLife:
        life = DiskLife(config_of(root, volume_count=1), seed=1, tell=lambda what, step: told.append((what, step)))
        await begin(life)
        await life.live_through(acts)
        await life.end()
        return life

    return asyncio.run(run()), told


def test_a_store_reopens_at_the_last_step_that_was_told_to_be_acknowledged(tmp_path: Path) -> None:
    life, told = lived(tmp_path, "train", "commit", "restart", "train few", "commit")
    acknowledged = [step for what, step in told if what == "acknowledged"]
    verdict = reopen(life.config, life.model.steps)
    assert len(acknowledged) == 3
    assert verdict.step == acknowledged[-1]
    assert set(acknowledged[-2:]) <= set(verdict.steps)


def test_a_byte_that_no_step_has_is_found(tmp_path: Path) -> None:
    life, _ = lived(tmp_path, "train", "commit")
    first = next(iter(life.view.namespace.steps.ledger.extents()))
    path = tmp_path / "mounted1" / "volume" / "volume-000.data"
    with path.open("r+b") as file:
        file.seek(first.offset_bytes + first.length_bytes - 4096)
        byte = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte[0] ^ 1]))
    with pytest.raises(CorruptRecord):
        reopen(life.config, life.model.steps)


def test_a_model_of_another_step_is_not_what_the_store_holds(tmp_path: Path) -> None:
    life, _ = lived(tmp_path, "train", "commit")
    steps = dict(life.model.steps)
    newest, oldest = max(steps), min(steps)
    steps[newest] = steps[oldest]
    with pytest.raises(AssertionError, match="are of another step"):
        reopen(life.config, steps)


def test_whoever_comes_next_trains_and_commits(tmp_path: Path) -> None:
    life, _ = lived(tmp_path, "train", "commit")
    steps, committed = live_on(life.config, life.model.steps, seed=2)
    assert committed is not None
    assert committed > max(life.model.steps)
    assert reopen(life.config, steps).step == committed


def test_a_snapshot_makes_the_volume_grow(tmp_path: Path) -> None:
    before, _ = lived(tmp_path / "before", "train", "commit")
    after, _ = lived(tmp_path / "after", "train", "commit", "snapshot")
    assert after.smallest_bytes > before.smallest_bytes


def test_seeds_differ_in_what_they_draw_and_all_do_everything() -> None:
    assert full_acts(1) != full_acts(2)
    assert full_acts(1) == full_acts(1)
    assert full_acts(1)[: len(ACTS)] == ACTS
    assert set(SHORT_ACTS) <= set(ACTS)
