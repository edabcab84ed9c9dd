"""A check sees every byte that it should, and answers from memory only what it would find again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from paramstore.errors import ParamStoreError
from paramstore_testkit.crash.check import Checker, Verdict
from paramstore_testkit.crash.initialization import begin
from paramstore_testkit.crash.life import KEYS, NAME, SCHEMA, VOLUME_BYTES, Life, new_machine
from paramstore_testkit.crash.states import Promise
from paramstore_testkit.disks.crash_disk import CrashDisk, Edit
from paramstore_testkit.disks.journal import Noted


@pytest.fixture(scope="module")
def lived() -> tuple[Life, CrashDisk]:
    """A life with two committed steps, and the disks at its end."""

    async def live() -> Life:
        life = Life(new_machine(1, volume_count=1), seed=1)
        await begin(life)
        await life.live_through(("train few", "commit"))
        return life

    life = asyncio.run(live())
    disk = CrashDisk.blank(volume_count=1, volume_bytes=VOLUME_BYTES)
    for event in life.journal.events:
        disk.advance(event)
    return life, disk


Lived = tuple[Life, CrashDisk]
Check = Callable[..., Verdict]


@pytest.fixture
def check(lived: tuple[Life, CrashDisk]) -> Check:
    life, disk = lived
    checker = Checker()

    def run(*edits: Edit) -> Verdict:
        effect = disk.edit(edits)
        try:
            return checker.check(disk, disk.catalog, "some", effect, life.model.steps)
        finally:
            disk.restore(edits)

    run.figures = checker.figures  # type: ignore[attr-defined]
    return run


def flipped(disk: CrashDisk, offset_bytes: int) -> Edit:
    return Edit(0, offset_bytes, bytes([disk.durable[0][offset_bytes] ^ 1]))


def test_the_end_of_a_life_is_right_and_read_once(lived: tuple[Life, CrashDisk], check: Check) -> None:
    life, _ = lived
    first, second = sorted(life.model.steps)
    assert check() == check() == Verdict(True, second, (first, second))
    assert check.figures.states == {"some": 2}  # type: ignore[attr-defined]
    assert check.figures.distinct == {"some": 1}  # type: ignore[attr-defined]
    assert check.figures.read == 1  # type: ignore[attr-defined]


def test_an_image_that_differs_where_nobody_looks_is_distinct_and_not_read_again(lived: Lived, check: Check) -> None:
    _, disk = lived
    before = check()
    assert check(flipped(disk, VOLUME_BYTES - 1)) == before
    assert check.figures.total_distinct == 2  # type: ignore[attr-defined]
    assert check.figures.read == 1  # type: ignore[attr-defined]


@pytest.mark.parametrize("key", KEYS)
def test_a_flipped_bit_in_any_record_of_any_step_is_found(lived: Lived, check: Check, key: tuple[int, int]) -> None:
    _, disk = lived
    check()
    found = disk.catalog.contents.namespaces[NAME]
    for row in found.rows[key]:
        for place in (0, *(field.offset_bytes + field.length_bytes - 1 for field in SCHEMA.stored.fields)):
            with pytest.raises(ParamStoreError):
                check(flipped(disk, row.located.extent.offset_bytes + place))


def test_a_model_that_says_otherwise_is_contradicted(lived: tuple[Life, CrashDisk]) -> None:
    life, disk = lived
    newest, oldest = max(life.model.steps), min(life.model.steps)
    wrong = {**life.model.steps, newest: life.model.steps[oldest]}
    with pytest.raises(AssertionError, match="another step"):
        Checker().check(disk, disk.catalog, "some", disk.edit(()), wrong)


def test_a_reopened_step_must_be_one_that_was_promised() -> None:
    promise = Promise()
    for event in (Noted("created"), Noted("started", 3), Noted("acknowledged", 3), Noted("started", 5)):
        promise.hear(event)
    promise.check(Verdict(True, 3, (3,)))
    promise.check(Verdict(True, 5, (3, 5)))
    too_old, too_new, alone = Verdict(True, 2, (2,)), Verdict(True, 6, (5, 6)), Verdict(True, 5, (5,))
    for wrong in (too_old, too_new, alone, Verdict(True, None, ()), Verdict(False, None, ())):
        with pytest.raises(AssertionError):
            promise.check(wrong)


def test_a_rollback_may_be_there_before_it_is_acknowledged() -> None:
    promise = Promise(is_created=True, started=5, acknowledged=(3, 5))
    promise.hear(Noted("rolling back", 3))
    promise.check(Verdict(True, 5, (3, 5)))
    promise.check(Verdict(True, 3, (3,)))
    promise.hear(Noted("rolled back", 3))
    with pytest.raises(AssertionError):
        promise.check(Verdict(True, 5, (3, 5)))
