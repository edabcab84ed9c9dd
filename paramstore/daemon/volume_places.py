"""Finds which volume of the store lies in which of the given directories, and makes new ones.

A volume is known by its file's name and its superblock, not by the order of the directories. One that the store does not know is
made only with `add_volumes`, and a new store takes `volumes` alone: a slip in a path must not bind a store to a place for ever.
Whatever is wrong is found before anything is made.
"""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Mapping
from pathlib import Path

from paramstore.config import PMEM_PREFIX, Config, volume_directory
from paramstore.directories import check_parent, is_missing
from paramstore.engine.capacity.entitlements import GROWTH_ALIGNMENT_BYTES, SMALLEST_BYTES
from paramstore.errors import ConfigError, CorruptRecord, VolumeError
from paramstore.storage.catalog.base import Catalog, Change, Contents, VolumeRow
from paramstore.storage.format.notes import copy_notes, format_volume, read_superblock
from paramstore.storage.format.structures import Superblock, extents_start_bytes
from paramstore.storage.recovery import missing_text
from paramstore.storage.volume.backing_file import volume_indices, volume_path
from paramstore.storage.volume.base import Volume, directory_of, granularity_of
from paramstore.storage.volume.file_volume import FileVolume
from paramstore.storage.volume.pmem_volume import PmemVolume

logger = logging.getLogger(__name__)

PAGE_BYTES = 4096
"""Unit to which a volume's size is rounded up."""


def check_volume_size(config: Config) -> None:
    """Checks that new volumes would hold a record. Raises ConfigError."""
    if config.volume_size_bytes is not None and config.volume_size_bytes <= SMALLEST_BYTES:
        raise ConfigError(f"volume_size={config.volume_size_bytes}: a volume takes {SMALLEST_BYTES} bytes before its first record")


def check_adds_nothing(config: Config) -> None:
    """Checks, where there is no store, that none was meant to take a volume more. Raises ConfigError."""
    if config.add_volumes:
        added = ", ".join(map(str, config.add_volumes))
        raise ConfigError(
            f"add_volumes: there is no store in {config.dir} that could take {added}: mend the --dir, or give the volumes "
            "of a new store as --volume; if its catalog was lost: paramstore fsck --dir DIR --rebuild"
        )


def check_new_places(config: Config) -> None:
    """Checks, where there is no store, that its volumes can be made where they are to lie. Raises ConfigError, VolumeError."""
    for index, path in enumerate(config.volume_paths):
        if os.path.realpath(volume_directory(path).parent) != os.path.realpath(config.dir):  # that is made first
            _check_place(index, path)


def open_volumes(config: Config, contents: Contents) -> dict[int, Volume]:
    """Opens the volumes, by index, and makes the new ones, for `adopt_new_volumes`. Raises VolumeError, ConfigError."""
    places = _places(config, contents)
    for index in places.keys() - contents.volumes.keys():
        _check_place(index, places[index])
    volumes: dict[int, Volume] = {}
    try:
        for index, path in sorted(places.items()):
            volumes[index] = _open(config, index, path) if index in contents.volumes else _make(config, index, path)
            size_bytes = volumes[index].size_bytes
            if config.volume_size_bytes is not None and abs(size_bytes - config.volume_size_bytes) >= PAGE_BYTES:
                logger.warning(
                    "volume %d has %d bytes already and keeps them: volume_size_bytes=%d sizes new volumes only",
                    index, size_bytes, config.volume_size_bytes,
                )  # fmt: skip
    except BaseException:
        for volume in volumes.values():
            volume.close()
        raise
    return volumes


def _places(config: Config, contents: Contents) -> dict[int, Path]:
    """Finds the directory of each volume, also of those to be made. Raises VolumeError if a volume of the store is in none of the
    directories, ConfigError if one of them would get a new volume by mistake; then nothing was made."""
    if not contents.volumes:
        check_adds_nothing(config)
        return dict(enumerate(config.volume_paths))
    found = {index: path for index, row in contents.volumes.items() if (path := _place_of(row, config)) is not None}
    missing = [missing_text(row) for index, row in sorted(contents.volumes.items()) if index not in found]
    others = [path for path in config.volume_paths if path not in found.values()]
    if missing:
        missing += [f"no volume of the store is in {path}" for path in others]
        raise VolumeError("the store cannot be opened: " + "; ".join(missing))
    if unknown := [str(path) for path in others if not config.adds(path)]:
        known = ", ".join(f"volume {index} in {path}" for index, path in sorted(found.items()))
        raise ConfigError(
            f"volumes: no volume of this store is in {', '.join(unknown)}; it has {known}. If a new volume is meant, which the "
            "store keeps for ever, give it as --add-volume"
        )
    for index, path in found.items():
        if config.adds(path):
            logger.info("volume %d in %s is the store's already: nothing is added", index, path)
    return found | dict(enumerate(others, start=1 + max(found)))


def _check_place(index: int, path: Path) -> None:
    """Checks that a volume can be made in a directory, or that directory first. Raises ConfigError, VolumeError."""
    directory = volume_directory(path)
    check_parent(f"volume {index}", directory)
    place = directory.absolute().parent if is_missing(directory) else directory
    if not place.is_dir():
        raise VolumeError(f"volume {index}: cannot create it in {directory}: {place} is no directory")
    if not os.access(place, os.W_OK | os.X_OK):
        raise VolumeError(f"volume {index}: cannot create it in {directory}: {place} cannot be written")


def _place_of(row: VolumeRow, config: Config) -> Path | None:
    """Finds the directory with a file of the volume's name; None if no given directory has it. Raises VolumeError if two have."""
    places = [path for path in config.volume_paths if row.index in volume_indices(volume_directory(path))]
    if len(places) > 1:  # one is a copy, another store's, or left from a start that crashed
        raise VolumeError(
            f"volume {row.index} ({row.uuid.hex()}) is in {' and in '.join(map(str, places))}: leave out or remove the one that is "
            f"not the store's; it was last in {row.place or 'nobody knows which'}"
        )
    return places[0] if places else None


def _open(config: Config, index: int, path: Path) -> Volume:
    directory = volume_directory(path)
    if str(path).startswith(PMEM_PREFIX):
        return PmemVolume.open(directory, index=index, granularity=config.pmem_granularity)
    return FileVolume.open(directory, index=index, allow_buffered=config.allow_buffered)


def _make(config: Config, index: int, path: Path) -> Volume:
    """Makes a volume. A file that the catalog does not know was left by a crash before the transaction that names it, or is
    foreign, which `adopt_new_volumes` finds out: it is opened. An empty file was left half made, and is made anew."""
    directory = volume_directory(path)
    file = volume_path(directory, index)
    try:
        if file.is_file() and not file.is_symlink() and file.stat().st_size == 0:
            file.unlink()
        is_left = file.exists()
    except OSError as error:
        raise VolumeError(f"volume {index}: {error}") from error
    if is_left:
        return _open(config, index, path)
    size_bytes = config.volume_size_bytes or SMALLEST_BYTES + GROWTH_ALIGNMENT_BYTES
    if str(path).startswith(PMEM_PREFIX):
        return PmemVolume.create(directory, index=index, size_bytes=size_bytes, granularity=config.pmem_granularity)
    return FileVolume.create(directory, index=index, size_bytes=size_bytes, allow_buffered=config.allow_buffered)


def adopt_new_volumes(catalog: Catalog, contents: Contents, volumes: Mapping[int, Volume]) -> None:
    """Formats volumes that are not in the catalog, then enters them there. A crash in between makes them anew."""
    rows = []
    for index, volume in volumes.items():
        if index in contents.volumes:
            continue
        _check_unclaimed(volume, contents.store_uuid)
        superblock = Superblock(
            store_uuid=contents.store_uuid, volume_uuid=uuid.uuid4().bytes, index=index, granularity=granularity_of(volume)
        )
        format_volume(volume, superblock)
        if contents.volumes:  # so that every volume can prove every step that can be opened
            copy_notes(volumes[min(contents.volumes)], volume, superblock, note_slots=contents.note_slots())
        start_bytes = extents_start_bytes(superblock)
        rows.append(VolumeRow(index, superblock.volume_uuid, volume.size_bytes, start_bytes, place=directory_of(volume)))
    if not rows:
        return
    catalog.apply(Change(put_volumes=tuple(rows)))
    for row in rows if contents.volumes else ():
        logger.warning("volume %d in %s was added: it is the store's for ever, give it at every start", row.index, row.place)
    contents.volumes.update({row.index: row for row in rows})


def check_all_unclaimed(config: Config) -> None:
    """Checks, where there is no catalog, that no volume in the directories belongs to a store. Raises VolumeError."""
    for path in config.volume_paths:
        for index in volume_indices(volume_directory(path)):
            file = volume_path(volume_directory(path), index)
            if not os.path.isfile(file) or os.path.getsize(file) == 0:  # an empty file was left half made
                continue
            volume = _open(config, index, path)
            try:
                _check_unclaimed(volume, None)
            finally:
                volume.close()


def _check_unclaimed(volume: Volume, store_uuid: bytes | None) -> None:
    """Checks that a new volume bears no superblock of another store (or of this one, if its catalog was lost). One with this
    store's superblock was being made when the store went down: nothing of it counts yet. Raises VolumeError."""
    try:
        found = read_superblock(volume)
    except CorruptRecord:
        return
    if found.store_uuid == store_uuid:
        return
    raise VolumeError(
        f"volume {volume.index} ({volume.describe().get('path')}) belongs to store {found.store_uuid.hex()}: its catalog is not in "
        "this directory. Give the directory that has it, or another path as --volume; or, if its catalog was lost: paramstore "
        "fsck --dir DIR --rebuild"
    )
