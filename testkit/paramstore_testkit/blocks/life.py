"""A trainer's life on real file systems: the real engine over a `FileVolume` on each volume's disk and an `LmdbCatalog` on its own.

Every volume and the catalog lie on a device of their own: on a shared one the catalog's flush would cover a forgotten flush of
a volume. Pieces are small, so that one record is many writes. `tell` gets what the trainer begins and what it is told.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from random import Random

from paramstore.config import Config, PolicyConfig
from paramstore.daemon import assembly
from paramstore.storage.lock import StoreLock
from paramstore_testkit.blocks.mounts import disk_at
from paramstore_testkit.crash.initialization import begin
from paramstore_testkit.crash.life import HOST_BYTES, NAME, PIECE_BYTES, Act, Life
from paramstore_testkit.disks.machine import Machine
from paramstore_testkit.oracles.experts import State

CATALOG_DISK, FIRST_VOLUME_DISK = 0, 1
HELD_STEPS = {1: 4, 2: 13}
"""Steps held for readers, by the number of volumes: so many that the first snapshot makes the volumes grow."""
WAIT_S = 20.0
HEIR_ACTS = ("train few", "commit")
Tell = Callable[[str, int], None]

ACTS: tuple[Act, ...] = (
    "train", "commit", "reader", "train few", "commit", "snapshot", "train few", "write back", "commit beside training",
    "refresh", "train", "commit", "rollback further", "train few", "commit", "reopen", "train few", "commit", "restart",
    "train few", "evict", "commit beside training", "rollback", "train", "commit", "drop snapshot", "train few", "commit",
)  # fmt: skip
"""A life with everything that changes what is durable, and with readers who keep steps alive."""

DRAWN_ACTS = 8
SHORT_ACTS: tuple[Act, ...] = ("train", "commit", "train few", "snapshot", "train few", "commit", "train", "commit")
"""A short life in which a planted bug has its chance."""


def full_acts(seed: int) -> tuple[Act, ...]:
    """Gives all of `ACTS`, and some more that the seed draws."""
    return (*ACTS, *Random(seed).choices(ACTS, k=DRAWN_ACTS))


def config_of(root: Path, *, volume_count: int) -> Config:
    """Settings of a store whose catalog lies on the file system mounted at `disk_at(root, 0)`, its volumes on those that follow."""
    volumes = tuple(disk_at(root, FIRST_VOLUME_DISK + index) / "volume" for index in range(volume_count))
    return Config(
        dir=disk_at(root, CATALOG_DISK) / "store", volumes=volumes, host_budget_bytes=HOST_BYTES, io_workers=2, update_workers=1,
        piece_bytes=PIECE_BYTES, wait_timeout_s=WAIT_S, prefill=False, policy=PolicyConfig(name="lru"),
        held_steps=HELD_STEPS[volume_count],
    )  # fmt: skip


class DiskLife(Life):
    """A life whose store is opened as a daemon opens it, with threads and files."""

    def __init__(self, config: Config, *, seed: int, tell: Tell, steps: Mapping[int, State] | None = None) -> None:
        super().__init__(Machine(volume_count=0), seed=seed, steps=steps)
        self.config = config
        self._tell = tell
        self._lock: StoreLock | None = None

    def note(self, what: str, step: int = 0) -> None:
        self._tell(what, step)

    async def act(self, name: Act) -> None:
        if name != "restart":
            await super().act(name)
            return
        await self.end()
        self.readers.clear()
        await self.resume()

    @property
    def modes(self) -> set[object]:
        """The ways in which transfers reach the volumes."""
        return {volume.describe()["mode"] for volume in self.store._volumes.volumes.values()}

    @property
    def smallest_bytes(self) -> int:
        """Size of the smallest volume."""
        return min(volume.size_bytes for volume in self.store._volumes.volumes.values())

    async def end(self) -> None:
        """Stops the daemon, as SIGTERM does."""
        await self.service.close()
        assert self._lock is not None
        self._lock.release()

    async def start(self) -> None:
        self._lock = assembly.take_lock(self.config)
        try:
            self.service = await assembly.assemble(self.config)
            self.store = self.service.store
        except BaseException:
            self._lock.release()
            raise


def live(config: Config, acts: Sequence[Act], *, seed: int, tell: Tell) -> Life:
    """Runs the whole life, from an empty disk to a daemon that stopped. Raises whatever went wrong."""

    life = DiskLife(config, seed=seed, tell=tell)

    async def whole() -> None:
        await begin(life)
        assert life.modes == {"direct"}, f"the file systems take no O_DIRECT: {life.modes}"
        smallest = life.smallest_bytes
        await life.live_through(acts)
        assert "snapshot" not in acts or life.smallest_bytes > smallest, f"no volume has grown: {smallest} bytes"
        await life.end()

    life.run(whole())
    return life


def live_on(config: Config, steps: Mapping[int, State], *, seed: int) -> tuple[dict[int, State], int | None]:
    """Goes on after a crash: starts a daemon, opens what it finds as a writer, trains and commits, stops the daemon.

    Returns the steps of both lives, and the newest committed one (None: there was nothing to open).
    """

    heir = DiskLife(config, seed=seed, tell=lambda what, step: None, steps=steps)

    async def whole() -> tuple[dict[int, State], int | None]:
        await heir.resume()
        if heir.can_train:
            await heir.live_through(HEIR_ACTS)
        committed = heir.committed if NAME in heir.store.namespaces else None
        await heir.end()
        return heir.model.steps, committed

    return heir.run(whole())
