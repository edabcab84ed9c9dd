"""Which directory has which volume: found by what is there, added on purpose alone, and nothing made where that is wrong."""

from __future__ import annotations

import itertools
import logging
import mmap
import shutil
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from paramstore.config import Config
from paramstore.core.schema import Schema
from paramstore.daemon import volume_places
from paramstore.engine.store import Store
from paramstore.errors import CatalogError, ConfigError, VolumeError
from paramstore.fsck import check
from paramstore.storage.catalog.base import Change
from paramstore.storage.catalog.lmdb_catalog import LmdbCatalog
from paramstore.storage.volume.backing_file import volume_path
from paramstore.storage.volume.file_volume import FileVolume
from paramstore_testkit.stores.assembled import MIB, config, with_store

pytestmark = pytest.mark.slow

SCHEMA = Schema.adamw({"w": (8, 8)}, param_dtype="float32")


async def steps(store: Store) -> list[int]:
    """The steps of the namespace, each proven by every volume, else the store would not have opened."""
    return store.namespaces["moe"].steps.ledger.steps() if store.namespaces else []


def opened(settings: Config, use: Callable[[Store], Coroutine[Any, Any, Any]] = steps) -> Any:
    return with_store(settings, use)


async def commit(store: Store) -> None:
    view = await store.admission.create("moe", SCHEMA.describe(), layers=[0], experts=2, host_bytes=None)
    await store.initializer.begin(view)
    for expert in range(2):
        await store.initializer.put(view, (0, expert), memoryview(mmap.mmap(-1, SCHEMA.initial_bytes)))
    await store.initializer.end(view)
    await store.committer.commit(view, 1, b"")


async def places(store: Store) -> dict[int, str]:
    """The directory that each volume was opened in."""
    volumes = store._volumes.volumes
    return {index: str(Path(str(volume.describe()["path"])).parent) for index, volume in volumes.items()}


@pytest.fixture
def three(tmp_path: Path) -> tuple[Path, ...]:
    """The directories of a store of three volumes, with a step."""
    given = tmp_path / "a", tmp_path / "b", tmp_path / "c"
    opened(config(tmp_path / "store", volumes=given), commit)
    return given


def everything(directory: Path) -> set[Path]:
    return set(directory.rglob("*"))


# --- what is there


def test_volumes_lie_where_they_are_told_to_and_have_the_size_given(tmp_path: Path) -> None:
    given = (tmp_path / "a", tmp_path / "b")
    opened(config(tmp_path / "store", volumes=given, volume_size_bytes=16 * MIB))
    for index, place in enumerate(given):
        assert volume_path(place, index).stat().st_size == 16 * MIB


def test_a_volume_size_that_holds_no_record_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="volume_size=1048576: a volume takes"):
        opened(config(tmp_path / "store", volume_size_bytes=MIB))
    assert everything(tmp_path) == set()


def test_a_volume_size_that_an_existing_volume_does_not_take_is_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    opened(config(tmp_path, volume_size_bytes=16 * MIB))
    opened(config(tmp_path, volume_size_bytes=16 * MIB))
    assert "keeps them" not in caplog.text
    opened(config(tmp_path, volume_size_bytes=32 * MIB))
    assert f"volume 0 has {16 * MIB} bytes already and keeps them: volume_size_bytes={32 * MIB}" in caplog.text


def test_the_order_of_the_directories_does_not_matter(tmp_path: Path, three: tuple[Path, ...]) -> None:
    for order in itertools.permutations(three):
        assert opened(config(tmp_path / "store", volumes=order)) == [1]
        assert opened(config(tmp_path / "store", volumes=order), places) == dict(enumerate(map(str, three)))


def test_volumes_that_were_moved_together_are_found_in_one_directory(tmp_path: Path, three: tuple[Path, ...]) -> None:
    for index in (1, 2):
        volume_path(three[index], index).rename(volume_path(three[0], index))
    assert opened(config(tmp_path / "store", volumes=three[:1])) == [1]


def test_two_files_of_one_volume_s_name_are_told_and_none_is_taken(tmp_path: Path, three: tuple[Path, ...]) -> None:
    """As left by an adding that a crash ended, before the volume of that number was added elsewhere."""
    left = tmp_path / "left"
    opened(config(tmp_path / "other", volumes=[tmp_path / "x", left]))
    for order in itertools.permutations((three[1], left)):
        with pytest.raises(VolumeError, match=rf"volume 1 .* is in .* and in .*: leave out or remove .* last in {three[1]}$"):
            opened(config(tmp_path / "store", volumes=(three[0], *order, three[2])))
    assert opened(config(tmp_path / "store", volumes=three)) == [1]


# --- what is missing


def test_a_missing_volume_is_named_with_the_place_where_it_was_last(tmp_path: Path, three: tuple[Path, ...]) -> None:
    with pytest.raises(VolumeError, match=rf"volume 1 .* is missing: give its path as --volume: it was last in {three[1]}$"):
        opened(config(tmp_path / "store", volumes=(three[0], three[2])))
    assert opened(config(tmp_path / "store", volumes=three)) == [1]


def test_the_place_of_a_volume_that_was_moved_is_the_new_one(tmp_path: Path, three: tuple[Path, ...]) -> None:
    three[1].rename(tmp_path / "moved")
    opened(config(tmp_path / "store", volumes=(three[0], three[2], tmp_path / "moved")))
    with pytest.raises(VolumeError, match=f"it was last in {tmp_path / 'moved'}$"):
        opened(config(tmp_path / "store", volumes=(three[0], three[2])))


def test_all_that_is_missing_is_told_with_the_directories_that_have_nothing_and_nothing_is_made(
    tmp_path: Path, three: tuple[Path, ...]
) -> None:
    before = everything(tmp_path)
    told = rf"volume 0 .*; volume 2 .*; no volume of the store is in {tmp_path / 'typo'}$"
    for name in ("volumes", "add_volumes"):
        given = {"volumes": (three[1],), name: (three[1], tmp_path / "typo")}
        with pytest.raises(VolumeError, match=told):
            opened(config(tmp_path / "store", **given))
    assert everything(tmp_path) == before


def test_a_lost_volume_file_is_named_and_not_made_anew(tmp_path: Path) -> None:
    opened(config(tmp_path))
    file = volume_path(tmp_path / "volume", 0)
    file.unlink()
    with pytest.raises(VolumeError, match=f"volume 0 .* is missing: .*; no volume of the store is in {tmp_path / 'volume'}"):
        opened(config(tmp_path))
    assert not file.exists()


def test_a_volume_of_another_store_is_refused_and_left_as_it_was(tmp_path: Path) -> None:
    place = (tmp_path / "volume",)
    opened(config(tmp_path / "first", volumes=place))
    before = volume_path(place[0], 0).read_bytes()
    with pytest.raises(VolumeError, match=r"belongs to store .* its catalog is not in this directory"):
        opened(config(tmp_path / "second", volumes=place))
    assert volume_path(place[0], 0).read_bytes() == before


def test_without_a_catalog_volumes_in_any_order_are_refused_and_nothing_is_made(tmp_path: Path, three: tuple[Path, ...]) -> None:
    shutil.rmtree(tmp_path / "store" / "catalog")
    before = everything(tmp_path)
    for order in itertools.permutations(three):
        with pytest.raises(VolumeError, match="if its catalog was lost: paramstore fsck --dir DIR --rebuild"):
            opened(config(tmp_path / "store", volumes=order))
    assert everything(tmp_path) == before


# --- what is new


def test_a_volume_that_the_store_does_not_know_is_refused_and_nothing_is_made(tmp_path: Path) -> None:
    opened(config(tmp_path / "store", volumes=[tmp_path / "a"]))
    before = everything(tmp_path)
    told = (
        rf"no volume of this store is in {tmp_path}/typo/dir; it has volume 0 in {tmp_path}/a\. If a new volume is meant, which "
        "the store keeps for ever, give it as --add-volume"
    )
    with pytest.raises(ConfigError, match=told):
        opened(config(tmp_path / "store", volumes=(tmp_path / "a", tmp_path / "typo" / "dir")))
    assert everything(tmp_path) == before
    opened(config(tmp_path / "store", volumes=[tmp_path / "a"]))


def test_a_volume_is_added_on_purpose_and_the_log_says_so_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    old, new = tmp_path / "a", tmp_path / "b"
    opened(config(tmp_path / "store", volumes=[old]), commit)
    assert "was added" not in caplog.text, "a store that is being made has its volumes"
    settings = config(tmp_path / "store", volumes=[old], add_volumes=[new])
    assert opened(settings) == [1]
    warned = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert f"volume 1 in {new} was added: it is the store's for ever, give it at every start" in warned
    caplog.clear()
    with caplog.at_level(logging.INFO):
        assert opened(settings, places) == {0: str(old), 1: str(new)}, "the same command starts it again"
    assert "was added" not in caplog.text
    assert f"volume 1 in {new} is the store's already: nothing is added" in caplog.text
    assert opened(config(tmp_path / "store", volumes=[old, new])) == [1]


def test_a_volume_that_is_named_twice_is_one(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "b")
    opened(config(tmp_path / "store", volumes=[tmp_path / "a"]))
    settings = config(tmp_path / "store", volumes=(tmp_path / "a", tmp_path / "b"), add_volumes=[tmp_path / "link"])
    for _ in range(2):
        assert opened(settings, places) == {0: str(tmp_path / "a"), 1: str(tmp_path / "b")}


@pytest.mark.parametrize("volumes", [(), ("a",)])
def test_a_volume_more_for_a_store_that_is_not_there_is_refused_and_nothing_is_made(
    volumes: tuple[str, ...], tmp_path: Path
) -> None:
    settings = config(tmp_path / "typo", volumes=[tmp_path / name for name in volumes], add_volumes=[tmp_path / "b"])
    told = f"^add_volumes: there is no store in {tmp_path}/typo that could take {tmp_path}/b: mend the --dir, or give"
    with pytest.raises(ConfigError, match=told):
        opened(settings)
    assert everything(tmp_path) == set()
    (tmp_path / "typo").mkdir()
    LmdbCatalog(tmp_path / "typo" / "catalog", store_uuid=bytes(16)).close()  # as a start leaves it that is refused later
    with pytest.raises(ConfigError, match=told):
        opened(settings)
    assert list(tmp_path.iterdir()) == [tmp_path / "typo"]


def crash(*_: object, **__: object) -> None:
    raise CatalogError("the power failed")


def crash_afterwards(act: Callable[..., Any]) -> Callable[..., None]:
    def acted(*arguments: Any, **named: Any) -> None:
        made = act(*arguments, **named)
        if isinstance(made, FileVolume):
            made.close()
        crash()

    return acted


CRASHES: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "before the file": lambda patch: patch.setattr(FileVolume, "create", crash),
    "after the file": lambda patch: patch.setattr(FileVolume, "create", crash_afterwards(FileVolume.create)),
    "before the superblock": lambda patch: patch.setattr(volume_places, "format_volume", crash),
    "after the superblock": lambda patch: patch.setattr(volume_places, "copy_notes", crash),
    "after the notes": lambda patch: patch.setattr(LmdbCatalog, "apply", crash),
    "after the transaction": lambda patch: patch.setattr(LmdbCatalog, "apply", crash_afterwards(LmdbCatalog.apply)),
}


@pytest.mark.parametrize("when", CRASHES)
def test_an_adding_that_a_crash_ends_leaves_the_store_and_is_done_by_the_next(
    when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = tmp_path / "a", tmp_path / "b"
    without = config(tmp_path / "store", volumes=[old])
    adding = config(tmp_path / "store", volumes=[old], add_volumes=[new])
    opened(without, commit)
    with monkeypatch.context() as patch:
        CRASHES[when](patch)
        with pytest.raises(CatalogError, match="power"):
            opened(adding)
    if when != "after the transaction":
        assert opened(without) == [1]
        with pytest.raises(ConfigError, match=f"no volume of this store is in {new}"):
            opened(config(tmp_path / "store", volumes=[old, new]))
    assert opened(adding) == [1]
    assert check.check(tmp_path / "store", [str(old), str(new)]).findings == []


def test_a_volume_left_by_a_crash_before_the_first_transaction_is_taken(tmp_path: Path) -> None:
    FileVolume.create(tmp_path / "volume", index=0, size_bytes=16 * MIB).close()
    opened(config(tmp_path), commit)
    assert opened(config(tmp_path)) == [1]


def test_a_volume_file_left_empty_by_a_crash_is_made_anew(tmp_path: Path) -> None:
    (tmp_path / "volume").mkdir()
    volume_path(tmp_path / "volume", 0).touch()
    opened(config(tmp_path), commit)
    assert opened(config(tmp_path)) == [1]


def test_a_volume_formatted_just_before_a_crash_is_formatted_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(catalog: LmdbCatalog, change: Change) -> None:
        raise CatalogError("the power failed")

    with monkeypatch.context() as patch:
        patch.setattr(LmdbCatalog, "apply", fail)
        with pytest.raises(CatalogError, match="power"):
            opened(config(tmp_path))
    opened(config(tmp_path), commit)
    assert opened(config(tmp_path)) == [1]
