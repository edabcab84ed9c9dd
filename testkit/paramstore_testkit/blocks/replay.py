"""Records a run block by block, and plays every crash of it: makes an image, mounts, opens and reads it, and takes it back.

`record` lets a trainer live on file systems over devices that log everything. `Replay` steps through the log; at each
event it draws states of every kind (`crash_disk` lists them), puts each into images, mounts them, so that the file
systems recover their journals, has the store opened and checked, and unmounts. The changes by file system and opening are then
found by comparison and undone. Equal images are checked once; a disk that is the same in the next state stays mounted.
"""

from __future__ import annotations

import errno
import mmap
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import numpy

from paramstore.config import Config
from paramstore_testkit.blocks.check import reopen
from paramstore_testkit.blocks.device import BlockDevices
from paramstore_testkit.blocks.life import FIRST_VOLUME_DISK, config_of, live, live_on
from paramstore_testkit.blocks.log import read_log
from paramstore_testkit.blocks.mounts import DISK_BYTES, LoopDevice, detach, disk_at, make_image, mount, mounted_loops, unmount
from paramstore_testkit.crash.check import Verdict
from paramstore_testkit.crash.life import Act
from paramstore_testkit.crash.states import Promise
from paramstore_testkit.disks.crash_disk import FULL, CrashDisk
from paramstore_testkit.disks.crash_disk import State as Crash
from paramstore_testkit.disks.journal import Event, Flushed, Noted
from paramstore_testkit.oracles.experts import State

PAGE_BYTES = mmap.PAGESIZE
GARBAGE = "garbage"
"""Kinds of state that are left out: file systems, and LMDB's meta page, rely on sectors that are written whole or not at all."""
TEARING = ("one torn", "last torn at 512", "random sectors")
"""Kinds of state in which a block of the file system may be half written."""
NOT_WHOLE = (errno.EBADMSG, errno.EUCLEAN, errno.EINVAL, errno.EIO)
"""Errors by which a file system says that a structure of its own is damaged: ext4 has superblocks larger than a sector."""
MADE = "made"
"""Note that the file systems are there: crashes begin after it."""


@dataclass(frozen=True, slots=True)
class Recording:
    """A run's log, and what every step that was started must hold. kind: the kind of file systems."""

    kind: str
    events: Sequence[Event]
    steps: Mapping[int, State]
    acts: Sequence[Act]


@dataclass(slots=True)
class Figures:
    """Counts by kind of state. mounted: the distinct states, which were checked."""

    states: Counter[str] = field(default_factory=Counter)
    mounted: Counter[str] = field(default_factory=Counter)
    events: Counter[str] = field(default_factory=Counter)
    acts: Counter[str] = field(default_factory=Counter)
    refused: int = 0
    """States with torn blocks that the file system itself refused to mount; they count as mounted, too."""
    resumed: int = 0
    """Number of states on which a daemon was really started, and went on."""


def record(root: Path, acts: Sequence[Act], *, seed: int, volume_count: int, owner: int, kind: str = "ext4") -> Recording:
    """Lives `acts` on new file systems. On return nothing is mounted any more. owner: a process that outlives the devices."""
    count = FIRST_VOLUME_DISK + volume_count
    images = [make_image(DISK_BYTES[kind], owner=owner) for _ in range(count)]
    with BlockDevices(root / "fuse", images) as devices:
        with mounted_loops(root, [devices.path(index) for index in range(count)], kind=kind):
            devices.note(MADE)
            life = live(config_of(root, volume_count=volume_count), acts, seed=seed, tell=devices.note)
            steps, lived = life.model.steps, life.acts
        log = devices.log
    for image in images:
        os.close(image)
    events = list(read_log(log))
    os.close(log)
    return Recording(kind, events, steps, lived)


class Images:
    """Owner of the memory that crash states are made in, one image per disk, each under a loop device. A context manager."""

    def __init__(self, root: Path, count: int, *, kind: str, owner: int) -> None:
        self._kind = kind
        self._size_bytes = DISK_BYTES[kind]
        self._targets = [disk_at(root, index) for index in range(count)]
        self._files = [make_image(self._size_bytes, owner=owner) for _ in range(count)]
        self._maps = [mmap.mmap(file, self._size_bytes) for file in self._files]
        self.views = {index: memoryview(memory) for index, memory in enumerate(self._maps)}
        self._loops: list[LoopDevice] = []
        self._mounted: set[int] = set()

    def __enter__(self) -> Images:
        self._loops = [LoopDevice(file) for file in self._files]
        for target in self._targets:
            target.mkdir(exist_ok=True)
        return self

    def __exit__(self, *_: object) -> None:
        for target, loop, file in zip(self._targets, self._loops, self._files, strict=True):
            detach(target)
            loop.close()
            os.close(file)

    def mount(self) -> None:
        """Mounts the images as they are now; their file systems first recover and write to them. Images that are mounted already
        stay so. Raises OSError."""
        for index, loop in enumerate(self._loops):
            if index not in self._mounted:
                loop.forget_cache()
                mount(loop.path, self._targets[index], self._kind)
                self._mounted.add(index)

    def release(self, indices: Iterable[int], durable: Mapping[int, bytearray]) -> None:
        """Unmounts these images and makes them equal to `durable` again."""
        for index in indices:
            if index in self._mounted:
                unmount(self._targets[index])
                self._mounted.remove(index)
            self._restore(index, durable[index])

    def _restore(self, index: int, durable: bytearray) -> None:
        """Restores one image; looks only where it has memory, since elsewhere both are zero."""
        image = numpy.frombuffer(self._maps[index], dtype=numpy.uint64)
        wanted = numpy.frombuffer(durable, dtype=numpy.uint64)
        for start, end in data_ranges(self._files[index], self._size_bytes):
            words = slice(start // 8, end // 8)
            found, right = image[words].reshape(-1, PAGE_BYTES // 8), wanted[words].reshape(-1, PAGE_BYTES // 8)
            wrong = numpy.flatnonzero((found != right).any(axis=1))
            if len(wrong):
                found[wrong] = right[wrong]


def data_ranges(file: int, size_bytes: int) -> Iterator[tuple[int, int]]:
    """Ranges in which a sparse file has memory, in whole pages."""
    end = 0
    while True:
        try:
            start = os.lseek(file, end, os.SEEK_DATA)
        except OSError:  # ENXIO: no data follows
            return
        end = os.lseek(file, start, os.SEEK_HOLE)
        yield start, min(end, size_bytes)


class Replay:
    """Plays all crashes of one recording.

    states_per_event: how many states are drawn at each event, beside those that lose everything and nothing. resume_every: a
    daemon is really started on one of so many distinct states.
    """

    def __init__(
        self, root: Path, recording: Recording, *, seed: int, volume_count: int, states_per_event: float, resume_every: int,
        owner: int,
    ) -> None:  # fmt: skip
        self.figures = Figures()
        self._config: Config = config_of(root, volume_count=volume_count)
        self._recording = recording
        self._seed = seed
        self._random = Random(seed)
        self._per_event = states_per_event
        self._resume_every = resume_every
        count = FIRST_VOLUME_DISK + volume_count
        self._disk = CrashDisk.blank(volume_count=count, volume_bytes=DISK_BYTES[recording.kind])
        self._images = Images(root, count, kind=recording.kind, owner=owner)
        self._verdicts: dict[int, Verdict | None] = {}
        self._promise = Promise()

    def run(self) -> Figures:
        """Plays all crashes. Raises AssertionError, or what the opening raised, with a note that says which crash it was."""
        self._disk.image = self._images.views
        with self._images:
            is_made = False
            for position, event in enumerate(self._recording.events):
                if isinstance(event, Flushed):  # the writes that it settles go into the image
                    self._images.release([event.volume], self._disk.durable)
                self._disk.advance(event)
                self._promise.hear(event)
                is_made |= event == Noted(MADE)
                self.figures.events[type(event).__name__] += 1
                for crash in self._chosen(event) if is_made else ():
                    self._try(crash, f"after event {position} ({str(event)[:60]})")
        self.figures.acts.update(self._recording.acts)
        return self.figures

    def _chosen(self, event: Event) -> list[Crash]:
        """Chooses the states with nothing kept and all kept, and some of the others: each kind as likely as any other."""
        by_kind: dict[str, list[Crash]] = {}
        for crash in self._disk.states(event, self._random, FULL):
            if not crash.kind.startswith(GARBAGE):
                by_kind.setdefault(crash.kind, []).append(crash)
        chosen = [by_kind.pop(kind)[0] for kind in ("none kept", "all kept") if kind in by_kind]
        kinds = sorted(by_kind)
        count = int(self._per_event + self._random.random())
        return chosen + [self._random.choice(by_kind[self._random.choice(kinds)]) for _ in range(count if kinds else 0)]

    def _try(self, crash: Crash, where: str) -> None:
        self.figures.states[crash.kind] += 1
        edited = {edit.volume for edit in crash.edits}
        try:
            self._images.release(edited, self._disk.durable)
            digest = self._disk.edit(crash.edits).digest
            if digest in self._verdicts:
                self._disk.restore(crash.edits)
            else:
                self.figures.mounted[crash.kind] += 1
                self._verdicts[digest] = self._check(edited, may_refuse=crash.kind in TEARING)
            verdict = self._verdicts[digest]
            if verdict is not None:
                self._promise.check(verdict)
        except BaseException as error:
            writes = len(self._disk.pending)
            error.add_note(f"crash {where}, {crash.kind}, {writes} writes unflushed; {self._promise}; seed {self._seed}")
            raise

    def _check(self, edited: Iterable[int], *, may_refuse: bool) -> Verdict | None:
        """Mounts and opens the state; gives what the store reopens with; None if `may_refuse` and it cannot be mounted.

        Disks that are not edited stay mounted for the next state: opening an existing store writes nothing to them.
        """
        resumed = self.figures.resumed
        try:
            self._images.mount()
        except OSError as error:
            if not may_refuse or error.errno not in NOT_WHOLE:
                raise
            self.figures.refused += 1
            return None
        else:
            return self._open()
        finally:
            is_changed = not self._promise.is_created or self.figures.resumed > resumed
            self._images.release(self._disk.durable if is_changed else edited, self._disk.durable)

    def _open(self) -> Verdict:
        verdict = reopen(self._config, self._recording.steps)
        if self._resume_every and len(self._verdicts) % self._resume_every == 0:
            self.figures.resumed += 1
            steps, committed = live_on(self._config, self._recording.steps, seed=self._random.randrange(1 << 30))
            after = reopen(self._config, steps)
            assert after.step == committed, f"a daemon committed {committed} after the crash; reopened at {after.step}"
        return verdict
