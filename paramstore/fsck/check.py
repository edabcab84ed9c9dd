"""One run of fsck over a store's directory: lock, look, compare, and on request rebuild.

Without a rebuild nothing is written, not even a lock file: the store's lock is taken on the lock file that is there, and the
catalog is read from a copy elsewhere.
"""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from paramstore.core.schema import Part, Schema
from paramstore.directories import check_directory, is_missing
from paramstore.errors import CatalogError, ConfigError, SchemaMismatch, StoreLocked, VolumeError
from paramstore.fsck.compare import compare
from paramstore.fsck.disks import FileDisk, volume_file, volume_index
from paramstore.fsck.findings import Finding
from paramstore.fsck.proof import Proof, prove, settle_slots
from paramstore.fsck.rebuild import check_rebuildable, is_blank, new_contents, restore_notes, restore_superblocks
from paramstore.fsck.scan import Progress
from paramstore.fsck.survey import Survey, survey
from paramstore.fsck.swap import CATALOG_NAME, replace_catalog
from paramstore.holder import LOCK_NAME, OTHER_BYTE, holder
from paramstore.storage.catalog.base import Contents
from paramstore.storage.catalog.copied import read_catalog
from paramstore.storage.lock import StoreLock

PMEM_PREFIX = "pmem:"


@dataclass(slots=True)
class Report:
    """Result of a run. contents: the catalog's, None if it cannot be read. proofs: by namespace.

    lost: what a rebuild cannot bring back; without a catalog, what nothing could bring back. refusal: why a rebuild is impossible,
    or None. restored_superblocks: (volume, copy). restored_notes: (volume, namespace, step).
    """

    found: Survey
    contents: Contents | None
    proofs: dict[str, Proof]
    findings: list[Finding]
    lost: list[Finding] = field(default_factory=list)
    refusal: str | None = None
    is_rebuilt: bool = False
    old_catalog: Path | None = None
    restored_superblocks: list[tuple[int, int]] = field(default_factory=list)
    restored_notes: list[tuple[int, str, int]] = field(default_factory=list)


def examine(found: Survey, contents: Contents | None, catalog_problem: str | None = None) -> Report:
    """Makes the report on what was found. catalog_problem: why there is no `contents`."""
    proofs = {name: prove(name, found.notes, found.records) for name in found.namespaces()}
    settle_slots(proofs)
    lost = _lost(proofs, contents)
    findings = list(found.findings)
    if contents is not None:
        findings += compare(contents, found)
    else:
        findings += [Finding(what=catalog_problem or "there is no catalog"), *lost]
    return Report(found, contents, proofs, findings, lost, _refusal(found, proofs, contents))


def _refusal(found: Survey, proofs: Mapping[str, Proof], contents: Contents | None) -> str | None:
    try:
        check_rebuildable(found, proofs, contents)
    except CatalogError as error:
        return str(error)
    return None


def _lost(proofs: Mapping[str, Proof], contents: Contents | None) -> list[Finding]:
    """Finds what the volumes do not prove, of all that they or the catalog name."""
    lost: list[Finding] = []
    for name, proof in sorted(proofs.items()):
        for step in sorted(proof.lost):
            lost.extend(proof.lost[step])
        if proof.newest is None and not (contents is not None and name in contents.namespaces):
            lost.append(Finding(namespace=name, what="there are records of it, but no commit note: no step of it is known"))
        elif proof.newest is not None and not proof.steps:
            what = "no step of it is proven: after a rebuild it has no commit, and the room of its records is free"
            lost.append(Finding(namespace=name, what=what))
    for name, namespace in sorted(contents.namespaces.items() if contents is not None else ()):
        own = proofs.get(name)
        known = own.steps.keys() | own.lost.keys() if own is not None else set()
        for step in sorted(namespace.steps.keys() - known):
            lost.append(Finding(namespace=name, step=step, what="no commit note that counts names it"))
    return lost


def check(directory: Path, volumes: Sequence[str], progress: Progress = lambda _: None) -> Report:
    """Checks the store in `directory` and writes nothing. Raises StoreLocked, ConfigError, VolumeError."""
    _check_store(directory, volumes)
    with _locked(directory), opened(volumes) as disks:
        return _examined(directory, disks, progress)


def rebuild(directory: Path, volumes: Sequence[str], progress: Progress = lambda _: None) -> Report:
    """Checks the store and gives it a new catalog. If that is impossible, `Report.is_rebuilt` is False, the last finding says why,
    and nothing was written. Raises StoreLocked, ConfigError; VolumeError, CatalogError, CapacityError where a disk refuses
    what must be written."""
    _check_store(directory, volumes)
    lock = StoreLock.take(directory, OTHER_BYTE)
    try:
        with opened(volumes, is_writable=True) as disks:
            report = _examined(directory, disks, progress)
            if report.refusal is not None:
                report.findings.append(Finding(what=report.refusal))
                return report
            assert report.found.store is not None
            by_index = {disk.index: disk for disk in disks}
            report.restored_superblocks = restore_superblocks(report.found, by_index)
            report.restored_notes = restore_notes(report.found, report.proofs, by_index)
            change = new_contents(report.found, report.proofs, report.contents)
            report.old_catalog = replace_catalog(directory, report.found.store, change)
            report.is_rebuilt = True
            return report
    finally:
        lock.release()


def _examined(directory: Path, disks: Sequence[FileDisk], progress: Progress) -> Report:
    contents: Contents | None = None
    problem: str | None = None
    try:
        contents = read_catalog(directory / CATALOG_NAME)
        if is_blank(contents):
            contents, problem = None, f"catalog {directory / CATALOG_NAME}: it is blank, and knows no volume and no namespace"
    except CatalogError as error:
        problem = str(error)
    return examine(survey(disks, progress, layouts=layouts_of(contents)), contents, problem)


def layouts_of(contents: Contents | None) -> dict[str, Part]:
    """The stored part of each namespace that a catalog describes; none of those whose description cannot be read."""
    layouts = {}
    for name, namespace in contents.namespaces.items() if contents is not None else ():
        with suppress(SchemaMismatch):
            layouts[name] = Schema.from_description(namespace.namespace.schema).stored
    return layouts


@contextmanager
def opened(volumes: Sequence[str], *, is_writable: bool = False) -> Iterator[list[FileDisk]]:
    """Opens the volumes' files. Raises VolumeError, also where one volume is in two of the directories."""
    disks: list[FileDisk] = []
    try:
        for directory, index in _placed(volumes):
            disks.append(FileDisk(directory, index, is_writable=is_writable))
            if same := [disk.place for disk in disks[:-1] if disk.index == index]:
                raise VolumeError(f"{disks[-1].place} and {same[0]} are one volume: give the one that is the store's")
        yield disks
    finally:
        for disk in disks:
            disk.close()


def total_bytes(volumes: Sequence[str]) -> int:
    """Bytes to read, for a progress bar; volumes that are missing, or may not be looked at, count for nothing."""
    total = 0
    for directory, index in _placed(volumes):
        with suppress(OSError):
            status = volume_file(directory, index).stat()
            total += status.st_size if stat.S_ISREG(status.st_mode) else 0
    return total


def _placed(volumes: Sequence[str]) -> Iterator[tuple[Path, int]]:
    """The directory and the index of each volume."""
    for position, volume in enumerate(volumes):
        directory = Path(volume.removeprefix(PMEM_PREFIX))
        yield directory, volume_index(directory, position)


def _check_store(directory: Path, volumes: Sequence[str]) -> None:
    """Checks that something of a store is there: a catalog in `directory`, or a volume. Raises ConfigError."""
    check_directory("--dir", directory)
    files = [volume_file(place, index) for place, index in _placed(volumes)]
    if all(map(is_missing, (directory / CATALOG_NAME, *files))):
        raise ConfigError(f"--dir {directory}: there is no store: it has no catalog, and no volume is in {', '.join(volumes)}")


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Keeps daemons off the store meanwhile. A store that was never served has no lock file, and none is made."""
    path = directory / LOCK_NAME
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        yield
        return
    except OSError as error:
        raise ConfigError(f"store directory {directory}: cannot open its lock file: {error}") from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise StoreLocked(
                f"store directory {directory} is in use by process {holder(descriptor) or 'unknown'}: first `paramstore stop "
                f"{directory}`; to check a store that is served, use `paramstore verify`"
            ) from error
        yield
    finally:
        os.close(descriptor)
