"""Simulates persistent memory: the real PmemVolume over simulated stores, and every image that a power cut may leave of them.

What a mapping holds in the processor's caches reaches the media in any order of 64-byte lines, and of a line any 8-byte
words, until it was written back *and* that was waited for (granularity `byte`, `cache_line`), or the file was flushed (`page`).
`Pmem` is one such module: it journals stores, persists and flushes. `LineDisk` derives the crash states, `PmemEnumeration` lets
the real recovery open each of them, as `states` does for disks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from random import Random

from paramstore.core.schema import round_up
from paramstore.fsck.proof import prove
from paramstore.fsck.survey import survey
from paramstore.storage.volume.backing_file import BackingFile
from paramstore.storage.volume.base import ALIGNMENT_BYTES, check_range
from paramstore.storage.volume.pmem_volume import PmemVolume
from paramstore_native import libpmem2
from paramstore_native.libpmem2 import NO_DRAIN, NO_FLUSH
from paramstore_testkit.crash.check import Checker, Figures, ReadVolume, Verdict
from paramstore_testkit.crash.life import NAME, SCHEMA, VOLUME_BYTES, Life, image_of, new_machine
from paramstore_testkit.crash.states import AFTER_RECOVERY, Enumeration, Plan
from paramstore_testkit.disks.crash_disk import (
    CrashDisk,
    Depth,
    Edit,
    Edits,
    Effect,
    NumberedCatalog,
    Pending,
    State,
    overlaps,
    without,
)
from paramstore_testkit.disks.journal import Event, Flushed, Journal, JournaledCatalog, Persisted, Wrote
from paramstore_testkit.disks.machine import Machine
from paramstore_testkit.oracles.experts import State as Records
from paramstore_testkit.oracles.trained_model import extra_of
from paramstore_testkit.stores.memory_disk import disks_of
from paramstore_testkit.trial import telling

LINE_BYTES = 64
WORD_BYTES = 8
"""Bytes that a processor stores as a whole: the only thing that anybody could rely on, and nobody does."""
NEWEST_LINES = 128
"""Most lines of the newest store that are lost, kept and torn one by one: every line of 8 KiB. For older ones: OLDER_LINES."""
OLDER_LINES = 8


class Pmem:
    """The media of one volume and what is stored there, as every processor sees it. granularity: that of a mapping of it.

    It is the file and the mapping's stores at once; the volume makes both anew.
    """

    def __init__(
        self, index: int, journal: Journal, *, granularity: str, size_bytes: int, thread: Callable[[], int] = threading.get_ident
    ) -> None:
        """thread: tells which thread calls."""
        self.index = index
        self.granularity = granularity
        self.image = bytearray(size_bytes)
        self._journal = journal
        self._thread = thread
        self._flushed: dict[int, list[Persisted]] = {}
        """Lines that each thread flushed and has not waited for, by thread."""

    def volume(self) -> PmemVolume:
        """Makes the product's own volume over it."""
        make_mapping = partial(libpmem2.Mapping, make_stores=lambda *_, **__: self)
        return PmemVolume(PmemFile(self), index=self.index, granularity="page", make_mapping=make_mapping)

    # --- the library's calls

    def copy(self, offset_bytes: int, source: memoryview) -> None:
        data = bytes(source)
        self.image[offset_bytes : offset_bytes + len(data)] = data
        self._journal.events.append(Wrote(self.index, offset_bytes, data))

    def copy_and_persist(self, offset_bytes: int, source: memoryview, flags: int) -> None:
        self.copy(offset_bytes, source)
        if flags & NO_FLUSH:
            return
        self.flush_lines(offset_bytes, source.nbytes)
        if not flags & NO_DRAIN:
            self.drain()

    def flush_lines(self, offset_bytes: int, length_bytes: int) -> None:
        """Sends the lines on their way to the media."""
        start = offset_bytes // LINE_BYTES * LINE_BYTES
        lines = Persisted(self.index, start, round_up(offset_bytes + length_bytes, LINE_BYTES) - start)
        self._flushed.setdefault(self._thread(), []).append(lines)

    def drain(self) -> None:
        """Makes durable what this thread flushed."""
        self._journal.events.extend(self._flushed.pop(self._thread(), ()))

    def sync(self) -> None:
        """Does what fdatasync does: makes durable every page that was stored to."""
        self._journal.events.append(Flushed(self.index))


class PmemFile(BackingFile):
    """The file of a `Pmem`, without a file."""

    def __init__(self, pmem: Pmem) -> None:
        super().__init__(Path(f"/nowhere/volume-{pmem.index}"), pmem.index, descriptor=-1)
        self._pmem = pmem
        self.size_bytes = len(pmem.image)

    def read(self, offset_bytes: int, into: Sequence[memoryview]) -> None:
        check_range(offset_bytes, into, size_bytes=self.size_bytes, place=self.place)
        for buffer in into:
            buffer.cast("B")[:] = self._pmem.image[offset_bytes : offset_bytes + buffer.nbytes]
            offset_bytes += buffer.nbytes

    def sync(self) -> None:
        self._pmem.sync()

    def check_length(self, offset_bytes: int, length_bytes: int) -> None:
        """Checks nothing: the file is never truncated."""

    def allocate(self, size_bytes: int) -> None:
        self._pmem.image.extend(bytes(max(0, round_up(size_bytes, ALIGNMENT_BYTES) - self.size_bytes)))
        self.size_bytes = len(self._pmem.image)

    def close(self) -> None:
        """Does nothing: the bytes stay."""


class PmemJournal(Journal):
    """A journal of a machine whose volumes are persistent memory. It takes each call of a worker as a thread of its own."""

    def __init__(self, *, granularity: str) -> None:
        super().__init__()
        self._granularity = granularity

    def watch(self, machine: Machine) -> None:
        for index, volume in machine.volumes.items():
            pmem = Pmem(
                index, self, granularity=self._granularity, size_bytes=volume.size_bytes,
                thread=lambda: machine.workers.ran if machine.workers is not None else 0,
            )  # fmt: skip
            machine.volumes[index] = pmem.volume()
        machine.catalog = JournaledCatalog(machine.catalog, self)


class LineDisk(CrashDisk):
    """Crash states at the grain of cache lines."""

    def advance(self, event: Event) -> None:
        super().advance(event)
        if isinstance(event, Persisted):
            self._persist(event)

    def _persist(self, lines: Persisted) -> None:
        """Makes what processors see in these lines durable: the newest store to each byte."""
        data = bytearray(self.durable[lines.volume][lines.offset_bytes : lines.offset_bytes + lines.length_bytes])
        around = Edit(lines.volume, lines.offset_bytes, bytes(data))
        touched = [pending.edit for pending in self.pending if overlaps(pending.edit, around)]
        if not touched:
            return  # nothing was stored there since
        for edit in touched:
            start, end = max(edit.offset_bytes, around.offset_bytes), min(_end(edit), _end(around))
            data[start - around.offset_bytes : end - around.offset_bytes] = edit.data[
                start - edit.offset_bytes : end - edit.offset_bytes
            ]
        rest = [left for pending in self.pending for left in without(pending, around)]
        self.pending = [Pending(around._replace(data=bytes(data)))]
        self._flush(lines.volume)
        self.pending = rest

    def partly_kept(self, edits: list[Edit], event: Event | None, source: Random, depth: Depth) -> Iterator[State]:
        is_new = isinstance(event, Wrote) and edits[-1].data is event.data
        for number, at in self._chosen(edits, source, is_new=is_new):
            line = _piece(edits[number], at, LINE_BYTES)
            others = [*edits[:number], *_around(edits[number], at), *edits[number + 1 :]]
            yield State("one line lost", others)
            yield State("one line kept", [line])
            words = list(_words(line, source))
            yield State("one line torn, others kept", [*others, *words])
            yield State("one line torn, others lost", words)
        for _ in range(depth.random_subsets):
            yield State("random lines", [piece for edit in edits for piece in _some(edit, LINE_BYTES, source)])
        newest = edits[-1]
        yield State("random words", [*edits[:-1], *_some(newest, WORD_BYTES, source)])

    @staticmethod
    def _chosen(edits: Edits, source: Random, *, is_new: bool) -> list[tuple[int, int]]:
        """Chooses the lines that are tried one by one, as (number of an edit, offset in it). is_new: the newest was stored just
        now; else its lines were tried then."""
        newest = [(len(edits) - 1, at) for at in range(0, len(edits[-1].data), LINE_BYTES)] if is_new else []
        older = [(number, at) for number, edit in enumerate(edits[:-1]) for at in range(0, len(edit.data), LINE_BYTES)]
        chosen = newest if len(newest) <= NEWEST_LINES else source.sample(newest, NEWEST_LINES)
        return chosen + (older if len(older) <= OLDER_LINES else source.sample(older, OLDER_LINES))


class ProvingChecker(Checker):
    """A checker that asks fsck too, which has no catalog and believes only whole structures: no torn note must count."""

    prove_every = 64
    """Number of states of which fsck is asked about one."""

    def __init__(self) -> None:
        super().__init__()
        self.proven_steps = 0

    def check(self, disk: CrashDisk, catalog: NumberedCatalog, kind: str, effect: Effect, steps: Mapping[int, Records]) -> Verdict:
        verdict = super().check(disk, catalog, kind, effect, steps)
        if verdict.step is not None and self.figures.total % self.prove_every == 0:
            volumes = {index: ReadVolume(disk, index, set()) for index in disk.image}
            found = survey(list(disks_of(volumes).values()))
            proof = prove(NAME, found.notes, found.records)
            assert verdict.step in proof.steps, f"the volumes do not prove step {verdict.step}: {proof.lost}"
            for step, proven in proof.steps.items():
                if step not in verdict.steps and kind.startswith(AFTER_RECOVERY):
                    continue  # a commit that the crash before has cut off: who recovered gives its number again
                self.proven_steps += 1
                assert proven.found.note.extra == extra_of(step), f"fsck takes another `extra` for step {step}"
                for key, record in proven.state.items():
                    start = record.offset + SCHEMA.stored.header_bytes
                    data = disk.image[record.volume][start : record.offset + record.record_bytes]
                    assert data == image_of(steps[step][key]), f"fsck takes other bytes for {key} at step {step}"
        return verdict


class PmemEnumeration(Enumeration):
    """Tries all crashes of one life on persistent memory. What follows a crash lives on ordinary disks."""

    granularity = "cache_line"

    def __init__(self, seed: int, plan: Plan) -> None:
        super().__init__(seed, plan)
        self.checker: ProvingChecker = ProvingChecker()

    async def run(self) -> Figures:
        life = Life(new_machine(self.seed, volume_count=self.plan.volume_count), seed=self.seed)
        life.journal = PmemJournal(granularity=self.granularity)
        disk = LineDisk.blank(volume_count=self.plan.volume_count, volume_bytes=VOLUME_BYTES)
        assert isinstance(self.plan.acts, tuple), "a life on persistent memory says what it does: no device fails there"
        with telling(lambda: f"granularity {self.granularity}"):
            return await self._run(life, disk)


class PageEnumeration(PmemEnumeration):
    """Tries crashes on a mapping of an ordinary file, where nothing is durable before the file is flushed."""

    granularity = "page"


def _end(edit: Edit) -> int:
    return edit.offset_bytes + len(edit.data)


def _piece(edit: Edit, at: int, length_bytes: int) -> Edit:
    return Edit(edit.volume, edit.offset_bytes + at, edit.data[at : at + length_bytes])


def _around(edit: Edit, at: int) -> list[Edit]:
    """Gives the store without the line at `at`."""
    parts = (_piece(edit, 0, at), _piece(edit, at + LINE_BYTES, len(edit.data)))
    return [part for part in parts if part.data]


def _words(line: Edit, source: Random) -> Iterator[Edit]:
    """Chooses some words of a line, neither none nor all."""
    mask = source.randrange(1, (1 << LINE_BYTES // WORD_BYTES) - 1)
    for number in range(LINE_BYTES // WORD_BYTES):
        if mask >> number & 1:
            yield _piece(line, number * WORD_BYTES, WORD_BYTES)


def _some(edit: Edit, grain_bytes: int, source: Random) -> Iterator[Edit]:
    """Chooses any lines or words of a store, in runs."""
    count = len(edit.data) // grain_bytes
    mask, number = source.getrandbits(count), 0
    while number < count:
        first = number
        while number < count and mask >> number & 1:
            number += 1
        if number > first:
            yield _piece(edit, first * grain_bytes, (number - first) * grain_bytes)
        number += 1
