"""Simulates disks and a catalog after some events of a run, and derives every image that a power cut just then may leave.

Any sector written since a volume's last flush may be there or not, independent of the others. What was written before a flush
that *failed* stays in doubt for ever, whatever later flushes say, until something else is durably written there.

An image is known by its digest: the exclusive-or of the hashes of its pages, each seeded by its place. Equal images of one
run have equal digests, however they came about, so that each is checked once and counted once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from random import Random
from typing import NamedTuple

from xxhash import xxh3_64_intdigest

from paramstore.core.schema import PAGE_BYTES
from paramstore.storage.catalog.base import Contents
from paramstore.testing.catalogs import MemoryCatalog
from paramstore.testing.volumes import SECTOR_BYTES
from paramstore_testkit.disks.journal import Applied, Event, Flushed, FlushFailed, Wrote

PAGE_SHIFT = PAGE_BYTES.bit_length() - 1
VOLUME_SHIFT = 40
"""Shift in a page's number, which is volume << VOLUME_SHIFT | position."""
BORDERS_MAX = 128
"""Most sector borders at which one long write is torn; others are drawn at random."""
BLOCK_BYTES = 64 << 10
_catalog_numbers = count(1)


class Edit(NamedTuple):
    """Bytes that a crash leaves at a place, over what was durable there."""

    volume: int
    offset_bytes: int
    data: bytes | memoryview


Edits = Sequence[Edit]


@dataclass(slots=True)
class Pending:
    """A write that a crash may undo. is_doubtful: a flush has failed since, so no later one settles it."""

    edit: Edit
    is_doubtful: bool = False


class NumberedCatalog(NamedTuple):
    """Contents with a number that no other contents have."""

    number: int
    contents: Contents


class State(NamedTuple):
    """One state after a crash. kind: which pending writes were kept. is_applied: whether the newest transaction is there."""

    kind: str
    edits: Edits
    is_applied: bool = True


class Effect(NamedTuple):
    """Effect of edits on the durable image. delta: the change of the digest, for each page that differs."""

    digest: int
    delta: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class Depth:
    """Number of states derived at each event. random_subsets: of writes, and as many of sectors."""

    random_subsets: int = 6
    tears_everywhere: bool = True
    """Whether writes are torn at every sector border, with and without garbage in the torn sector; else at one border each."""


FULL, SMALL = Depth(), Depth(random_subsets=2, tears_everywhere=False)


@dataclass(slots=True)
class CrashDisk:
    """Owner of the images. `durable` is what no crash can undo; `image` differs from it only between `edit` and `restore`."""

    durable: dict[int, bytearray]
    catalog: NumberedCatalog
    digest: int = 0
    pending: list[Pending] = field(default_factory=list)
    version: int = 0
    """Number of changes of `durable`."""
    image: dict[int, memoryview] = field(init=False)
    before: NumberedCatalog = field(init=False)
    """The catalog before the newest event, if that was a transaction; else the same as `catalog`."""
    _memory: MemoryCatalog = field(init=False)
    _hashes: dict[int, int] = field(default_factory=dict)
    """Hashes of durable pages, as far as somebody asked for them."""

    def __post_init__(self) -> None:
        self.image = {index: memoryview(copied(data)) for index, data in self.durable.items()}
        self.before = self.catalog
        self._memory = MemoryCatalog(self.catalog.contents)
        self._memory.load()

    @classmethod
    def blank(cls, *, volume_count: int, volume_bytes: int) -> CrashDisk:
        durable = {index: bytearray(volume_bytes) for index in range(volume_count)}
        return cls(durable, numbered(MemoryCatalog().load()))

    # --- events

    def advance(self, event: Event) -> None:
        self.before = self.catalog
        match event:
            case Wrote(volume, offset_bytes, data):
                self._write(Edit(volume, offset_bytes, data))
            case Flushed(volume):
                self._flush(volume)
            case FlushFailed(volume):
                for pending in self.pending:
                    pending.is_doubtful |= pending.edit.volume == volume
            case Applied(change):
                self._memory.apply(change)
                self.catalog = numbered(self._memory.load())
            case _:
                pass  # a note: nothing reached a disk

    def _write(self, edit: Edit) -> None:
        """Adds a pending write. One that writes what is there already changes no image, and is forgotten."""
        start, end = edit.offset_bytes, edit.offset_bytes + len(edit.data)
        is_idle = bytes(self.durable[edit.volume][start:end]) == bytes(edit.data)
        if not is_idle or any(overlaps(pending.edit, edit) for pending in self.pending):
            self.pending.append(Pending(edit))

    def _flush(self, volume: int) -> None:
        settled = [pending.edit for pending in self.pending if pending.edit.volume == volume and not pending.is_doubtful]
        kept = [pending for pending in self.pending if pending.edit.volume != volume or pending.is_doubtful]
        for edit in settled:
            effect = self.edit([edit])
            self.digest = effect.digest
            for page, delta in effect.delta.items():
                self._hashes[page] ^= delta
            start, end = edit.offset_bytes, edit.offset_bytes + len(edit.data)
            self.durable[volume][start:end] = edit.data
            kept = [rest for pending in kept for rest in without(pending, edit)]
        self.pending = kept
        self.version += bool(settled)

    # --- images

    def edit(self, edits: Edits) -> Effect:
        """Puts `edits` over the durable image; `restore` takes them away again."""
        touched: set[int] = set()
        for volume, offset, data in edits:
            self.image[volume][offset : offset + len(data)] = data
            first = volume << VOLUME_SHIFT | offset >> PAGE_SHIFT
            touched.update(range(first, first + (((offset & (PAGE_BYTES - 1)) + len(data) - 1) >> PAGE_SHIFT) + 1))
        digest, deltas = self.digest, {}
        for page in touched:
            delta = self.durable_hash(page) ^ _page_hash(self.image, page)
            if delta:
                deltas[page] = delta
                digest ^= delta
        return Effect(digest, deltas)

    def restore(self, edits: Edits) -> None:
        for volume, offset, data in edits:
            end = offset + len(data)
            self.image[volume][offset:end] = self.durable[volume][offset:end]

    def durable_hash(self, page: int) -> int:
        found = self._hashes.get(page)
        if found is None:
            found = self._hashes[page] = _page_hash(self.durable, page)
        return found

    # --- crashes

    def states(self, event: Event | None, source: Random, depth: Depth) -> Iterator[State]:
        """Derives the states that a crash right after `event`, the newest, may leave; some may be equal."""
        edits = [pending.edit for pending in self.pending]
        yield State("none kept", ())
        if isinstance(event, Applied):
            yield State("transaction lost", (), is_applied=False)
            yield State("transaction lost, all kept", edits, is_applied=False)
        if edits:
            yield State("all kept", edits)
            yield from self.partly_kept(edits, event, source, depth)

    def partly_kept(self, edits: list[Edit], event: Event | None, source: Random, depth: Depth) -> Iterator[State]:
        """Derives states that keep some of `edits`, the writes in doubt; sectors are written whole or not at all."""
        for volume in {edit.volume for edit in edits} if len(self.durable) > 1 else ():
            yield State("one volume kept", [edit for edit in edits if edit.volume == volume])
        for number in range(len(edits)):
            yield State("one lost", [*edits[:number], *edits[number + 1 :]])
            yield State("one kept", [edits[number]])
            yield State("one torn", [*edits[:number], _head(edits[number], source), *edits[number + 1 :]])
        for _ in range(depth.random_subsets):
            yield State("random writes", [edit for edit in edits if source.random() < 0.5])
            yield State("random sectors", [run for edit in edits for run in _some_sectors(edit, source)])
        if depth.tears_everywhere and isinstance(event, Wrote) and edits[-1].data is event.data:
            yield from self._last_torn(edits, source)

    @staticmethod
    def _last_torn(edits: list[Edit], source: Random) -> Iterator[State]:
        """Stops the newest write at each border, with all or none of the others there; its next sector may hold garbage."""
        last, others = edits[-1], edits[:-1]
        for sector_bytes in (SECTOR_BYTES, PAGE_BYTES):
            borders = range(0, len(last.data), sector_bytes)
            for border in borders if len(borders) <= BORDERS_MAX else sorted(source.sample(borders, BORDERS_MAX)):
                head = [Edit(last.volume, last.offset_bytes, last.data[:border])] if border else []
                garbage = Edit(last.volume, last.offset_bytes + border, source.randbytes(sector_bytes))
                for rest in (others, ()) if others else ((),):
                    if border and sector_bytes == SECTOR_BYTES:  # borders of pages are borders of sectors, too
                        yield State(f"last torn at {sector_bytes}", [*rest, *head])
                    yield State(f"garbage in a torn {sector_bytes}", [*rest, *head, garbage])


def copied(image: bytearray | memoryview) -> bytearray:
    """Makes a copy that takes no memory where there are zeros, which is nearly everywhere."""
    copy, zeros = bytearray(len(image)), bytes(BLOCK_BYTES)
    with memoryview(image) as source:
        for start in range(0, len(image), BLOCK_BYTES):
            block = bytes(source[start : start + BLOCK_BYTES])  # two `bytes` are compared ten times as fast as views
            if block != zeros[: len(block)]:
                copy[start : start + BLOCK_BYTES] = block
    return copy


def numbered(contents: Contents) -> NumberedCatalog:
    return NumberedCatalog(next(_catalog_numbers), contents)


def _page_hash(images: Mapping[int, bytearray] | Mapping[int, memoryview], page: int) -> int:
    start = (page & ((1 << VOLUME_SHIFT) - 1)) << PAGE_SHIFT
    return int(xxh3_64_intdigest(memoryview(images[page >> VOLUME_SHIFT])[start : start + PAGE_BYTES], page))


def overlaps(left: Edit, right: Edit) -> bool:
    """Whether two edits share a byte."""
    return (
        left.volume == right.volume
        and left.offset_bytes < right.offset_bytes + len(right.data)
        and right.offset_bytes < left.offset_bytes + len(left.data)
    )


def without(pending: Pending, over: Edit) -> list[Pending]:
    """Gives what is left of a write in doubt once `over` is durable."""
    edit = pending.edit
    if not overlaps(edit, over):
        return [pending]
    rest = []
    cut_bytes = over.offset_bytes - edit.offset_bytes
    if cut_bytes > 0:
        rest.append(Pending(edit._replace(data=edit.data[:cut_bytes]), pending.is_doubtful))
    skip_bytes = over.offset_bytes + len(over.data) - edit.offset_bytes
    if skip_bytes < len(edit.data):
        tail = Edit(edit.volume, edit.offset_bytes + skip_bytes, edit.data[skip_bytes:])
        rest.append(Pending(tail, pending.is_doubtful))
    return rest


def _head(edit: Edit, source: Random) -> Edit:
    """Tears the write at some border."""
    sectors = len(edit.data) // SECTOR_BYTES
    return edit._replace(data=edit.data[: source.randrange(1, sectors) * SECTOR_BYTES])


def _some_sectors(edit: Edit, source: Random) -> Iterator[Edit]:
    """Chooses any sectors of the write, in runs."""
    share = source.choice((0.0, 0.5, 1.0))
    sectors = len(edit.data) // SECTOR_BYTES
    if share == 0.5:
        mask = source.getrandbits(sectors)
        for sector in range(sectors):
            if mask >> sector & 1:
                start = sector * SECTOR_BYTES
                yield Edit(edit.volume, edit.offset_bytes + start, edit.data[start : start + SECTOR_BYTES])
    elif share:
        yield edit
