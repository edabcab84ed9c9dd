"""Opens a store: what the catalog says and what the volumes say must agree, else nothing is opened.

When `open_store` returns, every volume of the catalog is there, is ours and is long enough; there is no other volume; no two
rows share a byte; and the newest step of every namespace is proven by a commit note on every volume, so that no volume is
an old copy. Nothing is written: whoever opens next as writer makes a new epoch.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from operator import attrgetter

from paramstore.core.location import Extent
from paramstore.errors import CorruptCatalog, CorruptRecord, VolumeError
from paramstore.limits import HELD_STEPS, RETAINED_STEPS
from paramstore.storage.catalog.base import Contents, StepRow, VolumeRow
from paramstore.storage.catalog.ledger import Ledger
from paramstore.storage.format.apply_log import unpack_log
from paramstore.storage.format.notes import read_note, read_superblock
from paramstore.storage.format.structures import Superblock, extents_start_bytes
from paramstore.storage.space.extents import Space, describe
from paramstore.storage.space.note_slots import NoteSlots
from paramstore.storage.volume.base import Granularity, Volume, granularity_of

_first_step = attrgetter("first_step")


@dataclass(frozen=True, slots=True)
class Recovered:
    """An opened store as it was committed last. ledgers: by namespace. superblocks: by volume."""

    space: Space
    ledgers: dict[str, Ledger]
    note_slots: NoteSlots
    superblocks: dict[int, Superblock]


def open_store(
    contents: Contents, volumes: Mapping[int, Volume], *, retained_steps: int = RETAINED_STEPS, held_steps: int = HELD_STEPS
) -> Recovered:
    """Opens the store that `contents` describes, on `volumes` (by index). `contents` belongs to the result from then on.

    Raises VolumeError listing every volume that is missing, foreign, misplaced, truncated or an old copy: CorruptRecord where
    one of them is damaged or truncated. CorruptCatalog if rows contradict each other.
    """
    superblocks, problems = _check_superblocks(contents, volumes)
    _raise_if(problems)
    ledgers = {
        name: Ledger(found, retained_steps=retained_steps, held_steps=held_steps) for name, found in contents.namespaces.items()
    }
    extents = sorted((extent, name) for name, ledger in ledgers.items() for extent in ledger.extents())
    _raise_if([*_truncated(contents, volumes), *_beyond_the_end([extent for extent, _ in extents], volumes)])
    _check_logs(contents)
    note_slots = _occupy_notes(superblocks, ledgers)
    _raise_if(list(_unproven(ledgers, volumes, superblocks)))
    space = _occupy_extents(contents, volumes, superblocks, extents)
    return Recovered(space=space, ledgers=ledgers, note_slots=note_slots, superblocks=superblocks)


def _raise_if(problems: list[VolumeError]) -> None:
    if problems:
        kind = CorruptRecord if any(isinstance(problem, CorruptRecord) for problem in problems) else VolumeError
        raise kind("the store cannot be opened: " + "; ".join(map(str, problems)))


def _check_superblocks(contents: Contents, volumes: Mapping[int, Volume]) -> tuple[dict[int, Superblock], list[VolumeError]]:
    """Reads the superblocks of all volumes; returns those that could be read, and every problem found."""
    superblocks: dict[int, Superblock] = {}
    unknown = sorted(volumes.keys() - contents.volumes)
    problems = [VolumeError(f"volume {index} is not in the catalog of this store") for index in unknown]
    for index, row in sorted(contents.volumes.items()):
        if index not in volumes:
            problems.append(VolumeError(missing_text(row)))
            continue
        try:
            superblock = read_superblock(volumes[index])
        except VolumeError as error:
            problems.append(error)
            continue
        problem = _misplaced(superblock, row, contents.store_uuid) or _mapped_weaker(superblock, volumes[index])
        if problem:
            problems.append(VolumeError(problem))
        superblocks[index] = superblock
    return superblocks, problems


def missing_text(row: VolumeRow) -> str:
    """The message that says what to do where the volume of `row` was not given."""
    last = f": it was last in {row.place}" if row.place else ""
    return f"volume {row.index} ({row.uuid.hex()}) is missing: give its path as --volume{last}"


def _misplaced(superblock: Superblock, row: VolumeRow, store_uuid: bytes) -> str | None:
    """Says why a volume with this superblock is not the one of `row`; None if it is."""
    if superblock.store_uuid != store_uuid:
        return f"volume {row.index} belongs to store {superblock.store_uuid.hex()}, this is {store_uuid.hex()}"
    if superblock.volume_uuid != row.uuid:
        return f"volume {row.index} is {superblock.volume_uuid.hex()}, the catalog has {row.uuid.hex()} there"
    if superblock.index != row.index:
        return f"volume {row.index} says that it is volume {superblock.index}: its file was renamed"
    return None


def _mapped_weaker(superblock: Superblock, volume: Volume) -> str | None:
    """Says why a volume that was made where writes persist at once may not be used through a mapping where they do not; None if it
    may be used. It always may as an ordinary file: whoever named it without `pmem:` expects no more than a flush.
    """
    if not superblock.granularity.persists_writes:
        return None  # nothing more than a flush was promised
    now = granularity_of(volume)
    if now is not Granularity.PAGE:
        return None
    return (
        f"volume {volume.index} ({volume.describe()['path']}) was made on persistent memory, with granularity "
        f"{superblock.granularity.label}, and has granularity {now.label} now: mount its file system with dax, or give its "
        "directory without 'pmem:' to use it as an ordinary file"
    )


def _truncated(contents: Contents, volumes: Mapping[int, Volume]) -> Iterator[CorruptRecord]:
    for index, row in sorted(contents.volumes.items()):
        if volumes[index].size_bytes < row.size_bytes:
            found_bytes = volumes[index].size_bytes
            yield CorruptRecord(f"volume {index} was truncated: {found_bytes} bytes, expected {row.size_bytes}")


def _beyond_the_end(extents: list[Extent], volumes: Mapping[int, Volume]) -> Iterator[CorruptRecord]:
    """Yields at most one problem per volume. extents: sorted, so that a volume's last one reaches farthest."""
    last = {extent.volume: extent for extent in extents}
    for index, extent in last.items():
        end_bytes = extent.offset_bytes + extent.length_bytes
        if index in volumes and end_bytes > volumes[index].size_bytes:
            found_bytes = volumes[index].size_bytes
            yield CorruptRecord(f"volume {index} was truncated: {found_bytes} bytes, {describe(extent)} ends at {end_bytes}")


def _occupy_notes(superblocks: Mapping[int, Superblock], ledgers: Mapping[str, Ledger]) -> NoteSlots:
    note_slots = NoteSlots(min((superblock.note_slots for superblock in superblocks.values()), default=0))
    for ledger in ledgers.values():
        for slot in ledger.note_slots():
            note_slots.occupy(slot)
    return note_slots


def _unproven(
    ledgers: Mapping[str, Ledger], volumes: Mapping[int, Volume], superblocks: Mapping[int, Superblock]
) -> Iterator[VolumeError]:
    """Yields a problem for every volume without the note of a namespace's newest step."""
    for name, ledger in ledgers.items():
        row = ledger.newest
        if row is None:
            continue
        for index, superblock in superblocks.items():
            try:
                note = read_note(volumes[index], superblock, row.note_slot)
            except VolumeError as error:
                yield type(error)(f"step {row.step} of namespace {name!r} cannot be proven: {error}")
                continue
            found = (note.namespace, note.step, note.sequence, note.record_count)
            if found != (name, row.step, row.sequence, row.record_count):
                found_step = f"step {note.step} of namespace {note.namespace!r}, sequence {note.sequence}"
                yield VolumeError(_old_copy(index, name, row, found_step))


def _old_copy(index: int, name: str, row: StepRow, found: str) -> str:
    return (
        f"volume {index} is an old copy or was replaced: commit note slot {row.note_slot} has {found}; the catalog has step "
        f"{row.step} of namespace {name!r}, sequence {row.sequence}"
    )


def _check_logs(contents: Contents) -> None:
    """Checks that every step of an exact namespace has the log of all applies that its records missed. Raises CorruptCatalog."""
    for name, found in contents.namespaces.items():
        if found.namespace.schema.get("updates") != "exact":
            continue
        for step, row in found.steps.items():
            log = unpack_log(row.log)
            in_force = [rows[at - 1].located for rows in found.rows.values() if (at := bisect_right(rows, step, key=_first_step))]
            oldest = min((located.identity.version for located in in_force), default=row.applies)
            if log.last != row.applies or oldest < log.first - 1:
                raise CorruptCatalog(
                    f"step {step} of namespace {name!r} has an apply log of {log.first} to {log.last}; its records stand at apply "
                    f"{oldest} and later, the step at {row.applies}"
                )


def _occupy_extents(
    contents: Contents, volumes: Mapping[int, Volume], superblocks: Mapping[int, Superblock], extents: list[tuple[Extent, str]]
) -> Space:
    """Makes the free space: all but `extents`, given with their namespaces and sorted, so that each is cut off a range's front."""
    space = Space()
    for index, row in sorted(contents.volumes.items()):
        start_bytes = extents_start_bytes(superblocks[index])
        if row.size_bytes <= start_bytes:
            raise CorruptCatalog(f"volume {index} has {row.size_bytes} bytes, but its extents start at {start_bytes}")
        space.add_volume(
            index, start_bytes=start_bytes, size_bytes=volumes[index].size_bytes, written_bytes=row.written_bytes
        )
    for extent, name in extents:
        space.occupy(extent, owner=name)
    return space
