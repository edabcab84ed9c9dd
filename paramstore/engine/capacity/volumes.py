"""The set of volumes: room for namespaces, also in the catalog, growth, figures, bytes written over the store's life.

Without a fixed size, volumes grow when a namespace is created or a snapshot taken, to what `entitlements` says.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from paramstore.config import Retention
from paramstore.core.location import Tier
from paramstore.core.schema import round_up
from paramstore.engine.capacity.entitlements import (
    DEFAULT_RETENTION,
    GROWTH_ALIGNMENT_BYTES,
    entitled_bytes,
    in_words,
    kept_steps,
    shares,
    slack_bytes,
)
from paramstore.engine.capacity.prefill import Prefill
from paramstore.engine.capacity.speeds import Measure, Speeds
from paramstore.engine.tables.namespace import NamespaceState
from paramstore.engine.transfers.record_reads import VolumeTraffic
from paramstore.engine.transfers.runner import CATALOG_LANE, Runner, volume_lane
from paramstore.errors import CapacityError, CatalogError, ParamStoreError, VolumeError
from paramstore.sizes import format_size
from paramstore.storage.catalog.base import STEP_ROWS_BOUND, Catalog, Change, VolumeRow
from paramstore.storage.format.structures import Superblock, extents_start_bytes
from paramstore.storage.mounts import DISK_FULL
from paramstore.storage.space.extents import Space
from paramstore.storage.volume.base import Volume, directory_of

logger = logging.getLogger(__name__)

GiveBack = Callable[[NamespaceState], Awaitable[object]]

RECORDED_BYTES = 16 << 30
"""A crash loses at most so much of the count of bytes written to a volume: a 35,000th of an endurance of 600 TB."""
WAY_TO_ROOM = "add a volume (--add-volume), or restart without --volume-size: volumes grow then"
"""Advice where volumes of a fixed size have no room for a namespace or snapshot. (A larger fixed size is for new volumes.)"""

class VolumeSet:
    """All volumes of the store, by index; owns their sizes."""

    def __init__(
        self, volumes: Mapping[int, Volume], *, superblocks: Mapping[int, Superblock], rows: Mapping[int, VolumeRow], space: Space,
        catalog: Catalog, runner: Runner, may_grow: bool, prefill: Prefill,
        retention: Retention = DEFAULT_RETENTION, traffic: Mapping[int, VolumeTraffic] | None = None,
        endurance_bytes: int | None = None, measure: Measure | None = None,
    ) -> None:  # fmt: skip
        """traffic: bytes moved since the store was opened. measure: see `Speeds`.
        endurance_bytes: how much may be written to the drive under each volume over its life."""
        self.volumes = volumes
        self.space = space
        self._superblocks = superblocks
        self._rows = dict(rows)
        self._catalog = catalog
        self._runner = runner
        self._may_grow = may_grow
        self._retention = retention
        self._traffic = traffic or {}
        self._endurance_bytes = endurance_bytes
        self._written_before = {index: row.bytes_written for index, row in rows.items()}
        self._recording: asyncio.Task[None] | None = None
        self._prefill = prefill
        self.speeds = Speeds(volumes, space, runner, measure)

    def entitle(self, namespace: NamespaceState) -> None:
        """Entitles an existing namespace to what it may take now, with the snapshots that it has."""
        self.space.entitle(namespace.name, self._entitled(namespace, snapshots=len(namespace.steps.ledger.snapshots())))

    def _entitled(self, namespace: NamespaceState, *, snapshots: int) -> int:
        return entitled_bytes(namespace.schema, len(namespace.keys), self._retention, snapshots=snapshots)

    async def make_room(
        self, namespace: NamespaceState, *, beside: Iterable[NamespaceState], snapshots: int = 0, give_back: GiveBack | None = None
    ) -> None:
        """Entitles `namespace` to room for itself and so many snapshots, and makes that room, beside the namespaces that exist.
        give_back: has a namespace give back what its older steps have borrowed, where room lacks; None: nothing is given back.

        Raises CapacityError naming what is missing, CatalogError; then it is entitled to what it was before. `entitle` and
        `give_up` take an entitlement back.
        """
        others = [other for other in beside if other is not namespace]
        await self._make_catalog_room(self._kept_rows(namespace, snapshots=snapshots) + self.kept_rows(others))
        before_bytes = self.space.entitled_bytes(namespace.name)
        needed_bytes = self._entitled(namespace, snapshots=snapshots)
        await self._make_room(others, namespace, needed_bytes, snapshots)
        self.space.entitle(namespace.name, needed_bytes)
        try:
            await self._find_room(namespace, others, give_back)
        except BaseException:
            self.space.entitle(namespace.name, before_bytes)
            raise
        await self.speeds.measure()  # where a volume had no room before
        logger.info("%s", self._needs(namespace, snapshots))

    async def _find_room(
        self, namespace: NamespaceState, others: Sequence[NamespaceState], give_back: GiveBack | None
    ) -> None:
        """Sees to it that what `namespace` is entitled to is free, or borrowed by itself: others hold more than their share at
        times."""
        slack_bytes = self.slack_bytes((namespace, *others))
        for other in others:
            if give_back is not None and self._missing_bytes(namespace, slack_bytes) and self.space.borrowed_bytes(other.name):
                await give_back(other)
        missing_bytes = self._missing_bytes(namespace, slack_bytes)
        if missing_bytes and not self._may_grow:
            raise CapacityError(
                self.space.fences.first(
                    f"other namespaces hold {missing_bytes} bytes that namespace {namespace.name!r} needs, until their commits are "
                    f"published: try again then, or {WAY_TO_ROOM}"
                )
            )
        if missing_bytes:
            await self._grow(missing_bytes)

    def _missing_bytes(self, namespace: NamespaceState, slack_bytes: int) -> int:
        """Bytes missing of what a namespace is entitled to, but for those that it has borrowed and gives back when it must."""
        shortage_bytes = self.space.shortage_bytes(namespace.name, slack_bytes=slack_bytes)
        return max(0, shortage_bytes - self.space.borrowed_bytes(namespace.name))

    async def keep_catalog_room(self, namespaces: Iterable[NamespaceState]) -> None:
        """Makes room in the catalog when a store is opened: it may not have any yet, or more steps may be kept from now on. Where
        there is no room, the log says so; each commit looks again."""
        try:
            await self._make_catalog_room(self.kept_rows(namespaces))
        except (CapacityError, CatalogError) as error:
            logger.warning("a commit may fail for want of room in the catalog: %s", error)

    async def _make_catalog_room(self, kept_rows: int) -> None:
        """Makes the catalog large enough for all rows that its namespaces may ever have at once, so that commits find room whoever
        fills its disk. Raises CapacityError where the disk is full, CatalogError."""
        try:
            await self._runner.call(CATALOG_LANE, partial(self._catalog.reserve, 1, kept_rows=kept_rows))
        except CatalogError as error:
            if isinstance(error.__cause__, OSError) and error.__cause__.errno in DISK_FULL:
                raise CapacityError(str(error)) from error
            raise

    def kept_rows(self, namespaces: Iterable[NamespaceState]) -> int:
        """How many rows of the catalog these namespaces are entitled to, or have borrowed."""
        return sum(map(self._kept_rows, namespaces))

    def slack_bytes(self, namespaces: Iterable[NamespaceState]) -> int:
        """Bytes that these namespaces may leave unused."""
        return slack_bytes((namespace.schema for namespace in namespaces), len(self.volumes))

    def _kept_rows(self, namespace: NamespaceState, *, snapshots: int | None = None) -> int:
        """How many rows of the catalog a namespace may have: one for each record that it may have on the volumes, and its steps;
        with those of older steps that have borrowed their room."""
        ledger = namespace.steps.ledger
        count = len(ledger.snapshots()) if snapshots is None else snapshots
        records = self._entitled(namespace, snapshots=count) // namespace.schema.record_bytes
        steps = kept_steps(self._retention, count) + len(ledger.borrowing_steps)
        return records + ledger.borrowed_rows + steps * STEP_ROWS_BOUND

    def give_up(self, name: str) -> None:
        """Takes back the entitlement of a namespace that was not created after all. Volumes stay as large as they have become."""
        self.space.entitle(name, 0)

    async def _make_room(
        self, others: Sequence[NamespaceState], namespace: NamespaceState, needed_bytes: int, snapshots: int
    ) -> None:
        needed = needed_bytes + sum(self.space.entitled_bytes(other.name) for other in others)
        usable = sum(self.space.size_bytes_of(index) - self._start_bytes(index) for index in self.volumes)
        usable -= self.space.lost_bytes()
        needed += self.slack_bytes((namespace, *others))
        missing = needed - usable
        if missing <= 0:
            return
        if not self._may_grow:
            raise CapacityError(
                self.space.fences.first(
                    f"the volumes have {format_size(usable)} for records, namespace {namespace.name!r} and the others need "
                    f"{format_size(needed)}: {missing} bytes are missing; {WAY_TO_ROOM}. {self._needs(namespace, snapshots)}"
                )
            )
        await self._grow(missing)

    def _needs(self, namespace: NamespaceState, snapshots: int) -> str:
        """What a namespace with so many snapshots is entitled to and why, for people."""
        parts = shares(namespace.schema, len(namespace.keys), self._retention, snapshots=snapshots)
        return f"{namespace.name!r} may take {format_size(self._entitled(namespace, snapshots=snapshots))}, {in_words(parts)}"

    def describe_namespace(self, namespace: NamespaceState) -> dict[str, object]:
        """Figures of what a namespace may take, has and has borrowed of the volumes."""
        name, snapshots = namespace.name, len(namespace.steps.ledger.snapshots())
        return {
            "volume_bytes": self.space.held_bytes(name), "entitled_bytes": self.space.entitled_bytes(name),
            "borrowed_bytes": self.space.borrowed_bytes(name),
            "volume_shares": shares(namespace.schema, len(namespace.keys), self._retention, snapshots=snapshots),
        }  # fmt: skip

    def _start_bytes(self, index: int) -> int:
        return extents_start_bytes(self._superblocks[index])

    async def _grow(self, missing_bytes: int) -> None:
        growing = {index: volume for index, volume in self.volumes.items() if not self.space.fences.is_fenced(index)}
        if not growing:
            raise CapacityError(self.space.fences.first(f"{missing_bytes} bytes are missing on the volumes, and none may grow"))
        each = round_up(-(-missing_bytes // len(growing)), GROWTH_ALIGNMENT_BYTES)
        for index, volume in growing.items():
            size_bytes = self.space.size_bytes_of(index) + each
            try:
                await self._runner.call(volume_lane(index), partial(volume.grow, size_bytes))
            except VolumeError as error:
                raise CapacityError(f"volume {index} cannot grow by {each} bytes: {error}") from error
            row = replace(self._rows[index], size_bytes=volume.size_bytes, bytes_written=self.bytes_written_total(index))
            await self._record(row)
            self.space.grow_volume(index, volume.size_bytes)
        self._prefill.go_on()

    async def _record(self, row: VolumeRow) -> None:
        """Writes a volume's row to the catalog. Raises CatalogError; then either row is true of the volume, and the catalog is
        ready for the next transaction. Where it cannot be opened again, the next transaction is refused, and read back as a failed
        one.
        """

        def apply() -> None:
            try:
                self._catalog.apply(Change(put_volumes=(row,)))
            except CatalogError:
                self._catalog.reopen()
                self._catalog.load()
                raise

        await self._runner.call(CATALOG_LANE, apply)
        self._rows[row.index] = row

    # --- bytes written over the store's life

    def bytes_written_total(self, index: int) -> int:
        """Bytes of records, notes and zeros written over the store's life, without failed writes and what a crash lost."""
        moved = self._traffic[index].bytes_written if index in self._traffic else 0
        return self._written_before[index] + moved + self._prefill.filled_bytes[index]

    def record_written(self) -> None:
        """Begins to record the bytes written in the catalog, if a crash would leave many uncounted. To be called now and then."""
        is_due = any(self.bytes_written_total(index) - row.bytes_written >= RECORDED_BYTES for index, row in self._rows.items())
        if is_due and (self._recording is None or self._recording.done()):
            self._recording = asyncio.get_running_loop().create_task(self._record_all(), name="record what was written")

    async def _record_all(self) -> None:
        """Records each volume that was written to since the last record, one transaction each."""
        try:
            for index, volume in self.volumes.items():
                written, total = self.space.written_bytes(index), self.bytes_written_total(index)
                place = directory_of(volume)
                row = replace(self._rows[index], written_bytes=written, bytes_written=total, place=place)
                if row != self._rows[index]:
                    await self._record(row)
        except ParamStoreError:
            logger.exception("how much was written to the volumes was not recorded")

    # --- figures

    def tier_stats(self, traffic: Mapping[int, VolumeTraffic]) -> dict[str, dict[str, object]]:
        """Figures of each tier, summed over its volumes."""
        tiers: dict[str, dict[str, object]] = {}
        for tier in (Tier.NVME, Tier.PMEM):
            indices = [index for index, volume in self.volumes.items() if volume.tier is tier]
            if indices:
                tiers[tier.value] = {
                    "size_bytes": sum(self.volumes[index].size_bytes for index in indices),
                    "free_bytes": sum(self.space.free_bytes_of(index) for index in indices),
                    "bytes_read": sum(traffic[index].bytes_read for index in indices),
                    "bytes_written": sum(traffic[index].bytes_written for index in indices),
                }
        return tiers

    def describe(self, index: int) -> dict[str, object]:
        total = self.bytes_written_total(index)
        return {
            **self.volumes[index].describe(), "free_bytes": self.space.free_bytes_of(index),
            "written_bytes": self.space.written_bytes(index), "write_failures": self.space.fences.write_failures(index),
            "fenced": self.space.fences.reason(index), "bytes_written_total": total,
            "zero_filled_bytes": self._prefill.filled_bytes[index], "endurance_bytes": self._endurance_bytes,
            "endurance_used": total / self._endurance_bytes if self._endurance_bytes else None, **self.speeds.describe(index),
        }  # fmt: skip

    async def close(self) -> None:
        """Ends the zero-fill, records how far it came, then closes the volumes, the catalog and the workers."""
        await self._prefill.stop()
        if self._recording is not None:
            await self._recording
        await self._record_all()
        for index, volume in self.volumes.items():
            await self._runner.call(volume_lane(index), volume.close)
        await self._runner.call(CATALOG_LANE, self._catalog.close)
        self._runner.close()
