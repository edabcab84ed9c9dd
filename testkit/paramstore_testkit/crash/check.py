"""Checks a store that comes back from a crash, with the real recovery code.

A check reads superblocks, the newest commit note and every record that the catalog names, and nothing else. Two images
that agree on all pages a check has read, under the same catalog, have the same verdict. So a check runs again only if one
of those pages differs, and now and then if none does, to see that the verdict is the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from paramstore.core.key import ExpertKey
from paramstore.core.location import Extent, Located, Tier
from paramstore.core.schema import PAGE_BYTES, round_up
from paramstore.daemon.volume_places import adopt_new_volumes
from paramstore.engine.transfers.advance import advance
from paramstore.storage.catalog.base import DRAFT_STEP, Contents, StepRow
from paramstore.storage.catalog.ledger import Ledger
from paramstore.storage.format.notes import read_note
from paramstore.storage.format.structures import check_checksums, check_header, chunk_checksums, combine_roots, extents_start_bytes
from paramstore.storage.recovery import Recovered, open_store
from paramstore.storage.volume.base import Volume, check_range
from paramstore.testing.catalogs import MemoryCatalog
from paramstore.testing.volumes import MemoryVolume, ReadOnly
from paramstore_testkit.crash.initialization import draft_number
from paramstore_testkit.crash.life import KEYS, NAME, SCHEMA, image_of
from paramstore_testkit.disks.crash_disk import PAGE_SHIFT, VOLUME_SHIFT, CrashDisk, Effect, NumberedCatalog, copied
from paramstore_testkit.oracles.experts import State
from paramstore_testkit.oracles.trained_model import extra_of

RECHECK_EVERY = 16
"""Number of states with an identical reading of which one is checked all the same."""


class Verdict(NamedTuple):
    """Result of reopening a store. step: the newest committed one."""

    has_namespace: bool
    step: int | None
    steps: tuple[int, ...]
    prepared: int | None = None
    draft: int = 0
    """The number of the draft; 0 without one."""


class ReadVolume(ReadOnly):
    """A crash disk's image of one volume, read-only, that remembers which pages were read."""

    def __init__(self, disk: CrashDisk, index: int, pages: set[int]) -> None:
        self.index = index
        self.tier = Tier.NVME
        self._image = disk.image[index]
        self._pages = pages

    @property
    def size_bytes(self) -> int:
        return len(self._image)

    def read(self, offset_bytes: int, into: Sequence[memoryview]) -> None:
        length_bytes = check_range(offset_bytes, into, size_bytes=self.size_bytes, place=f"volume {self.index}")
        first = self.index << VOLUME_SHIFT | offset_bytes >> PAGE_SHIFT
        self._pages.update(range(first, first + (length_bytes >> PAGE_SHIFT)))
        for buffer in into:
            buffer.cast("B")[:] = self._image[offset_bytes : offset_bytes + buffer.nbytes]
            offset_bytes += buffer.nbytes

    def describe(self) -> dict[str, object]:
        return {"index": self.index}

    def close(self) -> None:
        """Does nothing: there is nothing to give back."""


@dataclass(slots=True)
class Reading:
    """Pages that a check read, and its verdicts by their content. base: digest of the durable content at `version`."""

    pages: frozenset[int]
    verdicts: dict[int, Verdict] = field(default_factory=dict)
    base: int = 0
    version: tuple[int, int] = (-1, -1)


@dataclass(slots=True)
class Figures:
    """Counts by kind of state. distinct: (image, catalog) pairs; read: checks that really ran."""

    states: Counter[str] = field(default_factory=Counter)
    distinct: Counter[str] = field(default_factory=Counter)
    acts: Counter[str] = field(default_factory=Counter)
    """Acts of the lives, by name."""
    read: int = 0
    crashes_during_recovery: int = 0
    resumed: int = 0
    events: int = 0

    def add(self, other: Figures) -> None:
        self.states.update(other.states)
        self.distinct.update(other.distinct)
        self.acts.update(other.acts)
        self.read += other.read
        self.crashes_during_recovery += other.crashes_during_recovery
        self.resumed += other.resumed
        self.events += other.events

    @property
    def total(self) -> int:
        return sum(self.states.values())

    @property
    def total_distinct(self) -> int:
        return sum(self.distinct.values())


class Checker:
    """Owner of the verdicts on one life and on the lives that follow its crashes.

    open_store: the recovery under test.
    """

    def __init__(self, *, open_store: Callable[[Contents, Mapping[int, Volume]], Recovered] = open_store) -> None:
        self._open_store = open_store
        self._seen: dict[tuple[int, int], Verdict] = {}
        self._readings: dict[int, list[Reading]] = {}
        self.figures = Figures()

    def check(self, disk: CrashDisk, catalog: NumberedCatalog, kind: str, effect: Effect, steps: Mapping[int, State]) -> Verdict:
        """Checks what `disk.image` holds now; gives the verdict. Raises AssertionError, ParamStoreError."""
        figures = self.figures
        figures.states[kind] += 1
        identity = (catalog.number, effect.digest)
        known = self._seen.get(identity)
        if known is not None:
            return known
        figures.distinct[kind] += 1
        answered = self._answered(disk, catalog, effect)
        if answered is None or len(self._seen) % RECHECK_EVERY == 0:
            found = self._read(disk, catalog, effect, steps)
            assert answered in (None, found), f"{found}, an identical reading gave {answered}"
            answered = found
        self._seen[identity] = answered
        return answered

    def _answered(self, disk: CrashDisk, catalog: NumberedCatalog, effect: Effect) -> Verdict | None:
        for reading in self._readings.get(catalog.number, ()):
            verdict = reading.verdicts.get(self._content(disk, reading, effect.delta))
            if verdict is not None:
                return verdict
        return None

    @staticmethod
    def _content(disk: CrashDisk, reading: Reading, delta: Mapping[int, int]) -> int:
        """Computes the digest of the pages of `reading`."""
        version = (id(disk), disk.version)
        if reading.version != version:
            reading.base, reading.version = 0, version
            for page in reading.pages:
                reading.base ^= disk.durable_hash(page)
        content = reading.base
        for page, change in delta.items():
            if page in reading.pages:
                content ^= change
        return content

    def _read(self, disk: CrashDisk, catalog: NumberedCatalog, effect: Effect, steps: Mapping[int, State]) -> Verdict:
        self.figures.read += 1
        if len(catalog.contents.volumes) < len(disk.image):
            return self._adopt(disk, catalog.contents, steps)
        pages: set[int] = set()
        volumes = {index: ReadVolume(disk, index, pages) for index in disk.image}
        verdict = self._verify(catalog.contents, volumes, steps)
        readings = self._readings.setdefault(catalog.number, [])
        reading = next((known for known in readings if known.pages == pages), None)
        if reading is None:
            reading = Reading(frozenset(pages))
            readings.append(reading)
        reading.verdicts[self._content(disk, reading, effect.delta)] = verdict
        return verdict

    def _adopt(self, disk: CrashDisk, contents: Contents, steps: Mapping[int, State]) -> Verdict:
        """Checks volumes that no transaction names yet: the next daemon makes them anew, on a copy."""
        copies: dict[int, Volume] = {index: MemoryVolume.of(copied(image), index=index) for index, image in disk.image.items()}
        catalog = MemoryCatalog(contents)
        found = catalog.load()
        adopt_new_volumes(catalog, found, copies)
        return self._verify(found, copies, steps)

    def _verify(self, contents: Contents, volumes: Mapping[int, Volume], steps: Mapping[int, State]) -> Verdict:
        recovered = self._open_store(contents, volumes)
        extents: list[Extent] = []
        for ledger in recovered.ledgers.values():
            verify_ledger(ledger, recovered, volumes, contents.store_uuid, steps)
            extents.extend(ledger.extents())
        verify_space(recovered, volumes, extents)
        found = recovered.ledgers.get(NAME)
        if found is None:
            return Verdict(False, None, ())
        draft = 0 if found.draft is None else draft_number(found.draft.extra)
        return Verdict(True, found.committed_step, tuple(found.steps()), found.prepared_step, draft)


def verify_ledger(
    ledger: Ledger, recovered: Recovered, volumes: Mapping[int, Volume], store_uuid: bytes, steps: Mapping[int, State]
) -> None:
    """Checks that every step of the ledger, a prepared one too, can be read, whole, and is what the model says."""
    row = ledger.newest
    if row is None:
        assert not list(ledger.extents()), "rows without a step"
        return
    if row.step == DRAFT_STEP:
        verify_draft(ledger, row, recovered, volumes, store_uuid, steps[-draft_number(row.extra)])
        return
    newest = row.step
    for step in sorted({*ledger.steps(), newest}):
        extra = row.extra if step == newest else ledger.step(step).extra
        assert extra == extra_of(step), f"extra of step {step}"
        for key in KEYS:
            located = ledger.at(key, step)
            assert located is not None, f"{key} has no record at step {step}"
            verify_record(ledger, key, located, volumes, store_uuid, steps[step], step=step)
    changed = {key: found for key in KEYS if ledger.records_of(key)[1] == newest and (found := ledger.at(key, newest))}
    for index, volume in volumes.items():
        note = read_note(volume, recovered.superblocks[index], row.note_slot)
        root = combine_roots((key, located.root) for key, located in changed.items())
        assert (note.record_count, note.combined_root) == (len(changed), root), f"note of step {newest} on volume {index}"


def verify_draft(
    ledger: Ledger, row: StepRow, recovered: Recovered, volumes: Mapping[int, Volume], store_uuid: bytes, state: State
) -> None:
    """Checks that a draft has just the keys of the model and their bytes, and its note is on every volume."""
    located = {key: found for key in KEYS if (found := ledger.at(key, DRAFT_STEP)) is not None}
    assert located.keys() == state.keys(), f"the draft has {sorted(located)}, the model {sorted(state)}"
    for key, found in located.items():
        verify_record(ledger, key, found, volumes, store_uuid, state, step=DRAFT_STEP)
    root = combine_roots((key, found.root) for key, found in located.items())
    for index, volume in volumes.items():
        note = read_note(volume, recovered.superblocks[index], row.note_slot)
        assert (note.step, note.state_root) == (DRAFT_STEP, root), f"note of the draft on volume {index}"


def verify_record(
    ledger: Ledger, key: ExpertKey, located: Located, volumes: Mapping[int, Volume], store_uuid: bytes, state: State, *, step: int
) -> None:
    """Checks header, root, chunk checksums, and the model's bytes, once the record has made the steps that it missed."""
    extent, part, namespace = located.extent, SCHEMA.stored, ledger.namespace
    place = f"volume {extent.volume}, offset {extent.offset_bytes}"
    image = memoryview(bytearray(round_up(extent.length_bytes, PAGE_BYTES)))
    volumes[extent.volume].read(extent.offset_bytes, [image])
    header = check_header(
        image[: part.header_bytes], part=part, root=located.root, store_uuid=store_uuid, namespace=NAME, key=key,
        identity=located.identity, place=place,
    )  # fmt: skip
    check_checksums(header, part, 0, chunk_checksums(image, part.chunks()), place=place)
    optimizer_step, row = header.optimizer_step, ledger.find(step)
    if namespace.schema.get("updates") == "exact" and row is not None:
        missed = ledger.log_at(step).missed(after=located.identity.version, until=row.applies)
        advance(SCHEMA, image, key=key, missed=missed, optimizer_step=optimizer_step)
        optimizer_step += len(missed)
    assert image[part.header_bytes :] == image_of(state[key]), f"bytes of {key} at {place} are of another step"
    assert optimizer_step == state[key].updates, f"step of {key} at {place}"
    assert header.sequence <= namespace.sequence, f"sequence of {key} at {place}"
    assert header.last_apply <= namespace.applies, f"last apply of {key} at {place}"
    bounds = {**dict(namespace.epoch_bounds), namespace.epoch: namespace.sequence}
    epoch = located.identity.epoch
    assert header.sequence <= bounds.get(epoch, -1), f"{key} at {place} is of epoch {epoch}, which counts no more: {bounds}"


def verify_space(recovered: Recovered, volumes: Mapping[int, Volume], extents: Iterable[Extent]) -> None:
    """Checks that no two rows share a byte, and that what no row names is free."""
    ordered = sorted(extents)
    for left, right in pairwise(ordered):
        is_apart = left.volume != right.volume or left.offset_bytes + left.length_bytes <= right.offset_bytes
        assert is_apart, f"{left} and {right} overlap"
    for index, volume in volumes.items():
        start_bytes = extents_start_bytes(recovered.superblocks[index])
        held = [extent for extent in ordered if extent.volume == index]
        assert all(extent.offset_bytes >= start_bytes for extent in held), f"{held[:1]} lies among the notes"
        free_bytes = volume.size_bytes - start_bytes - sum(extent.length_bytes for extent in held)
        assert recovered.space.free_bytes_of(index) == free_bytes, f"free space of volume {index}"
