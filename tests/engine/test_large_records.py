"""Records above 4 GiB through the whole engine: made, committed, reopened, leased, read, verified, convicted.

Nearly all of such a record is zeros, its volume keeps none of them and its memory takes no room for them: a test of 4.5 GiB costs
megabytes. The one thing replaced is the copy of initial values, which would touch every page of a slot.
"""

from __future__ import annotations

import os
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace

import pytest

from paramstore.bench.process import resident_bytes
from paramstore.core.key import ExpertKey
from paramstore.core.location import Extent
from paramstore.core.schema import CHUNK_BYTES, PAGE_BYTES, Schema
from paramstore.engine.records import update as update_module
from paramstore.engine.store import Store
from paramstore.engine.tables.arena import Arena
from paramstore.engine.tables.namespace import View
from paramstore.errors import CapacityError, CorruptRecord
from paramstore.fsck.check import examine
from paramstore.fsck.rebuild import new_contents
from paramstore.fsck.scan import read_record
from paramstore.fsck.survey import survey
from paramstore.optim.tensors import field_tensor
from paramstore.policy.lru import Lru
from paramstore_testkit.disks import machine as machine_module
from paramstore_testkit.disks.machine import Machine
from paramstore_testkit.disks.sparse_volume import HoleSegment, SparseVolume, copy
from paramstore_testkit.stores.memory_disk import MemoryDisk
from paramstore_testkit.stores.small_store import lease, run

GIB = 1 << 30
BORDER = 4 * GIB
WEIGHTS = BORDER + 9 * CHUNK_BYTES + 12_345
SCHEMA = Schema.param({"w": ((WEIGHTS,), "uint8"), "b": ((1000,), "float32")})
"""`w` crosses the border of 32 bits, `b` lies beyond it."""
MARKS = (0, 1, BORDER - 20_000, BORDER - 1, BORDER, BORDER + 1, WEIGHTS - 1)
"""Elements of `w` that are not zero: their number among the marks, plus one, plus ten times the expert's."""
KEYS: list[ExpertKey] = [(0, 0), (0, 1)]
VOLUME_BYTES = 64 * GIB
MEMORY_BYTES_MAX = 512 << 20


def fill_holes(schema: Schema, initial: memoryview, image: memoryview) -> None:
    """As `optim.initial.fill_initial` of a param schema, into a slot of zeros."""
    for source, target in zip(schema.initial_fields(), schema.stored.fields, strict=True):
        end = source.offset_bytes + source.length_bytes
        copy(initial[source.offset_bytes : end], image[target.offset_bytes : target.offset_bytes + target.length_bytes])


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    monkeypatch.setattr(machine_module, "PlainSegment", HoleSegment)
    monkeypatch.setattr(update_module, "fill_initial", fill_holes)
    before_bytes = resident_bytes(os.getpid())
    machine = Machine(volume_count=0, volume_size_bytes=VOLUME_BYTES, host_budget_bytes=16 * GIB, wait_timeout_s=60.0)
    machine.volumes = {0: SparseVolume(VOLUME_BYTES)}
    yield machine
    assert resident_bytes(os.getpid()) - before_bytes < MEMORY_BYTES_MAX


def expected(mark: int, key: ExpertKey) -> int:
    return MARKS.index(mark) + 1 + 10 * key[1]


async def make(store: Store, *, step: int = 7) -> View:
    """A committed namespace of two records."""
    view = await store.admission.create("large", SCHEMA.describe(), layers=[0], experts=len(KEYS), host_bytes=None)
    await store.initializer.begin(view)
    initial = HoleSegment(SCHEMA.initial_bytes).view(0, SCHEMA.initial_bytes)
    weights, biases = SCHEMA.initial_fields()
    for key in KEYS:
        for mark in MARKS:
            initial[weights.offset_bytes + mark] = expected(mark, key)
        field_tensor(initial, biases).fill_(key[1] + 0.5)
        await store.initializer.put(view, key, initial)
    await store.initializer.end(view)
    await store.committer.commit(view, step, b"large")
    return view


def extent_of(view: View, key: ExpertKey) -> Extent:
    located = view.namespace.steps.ledger.at(key, 7)
    assert located is not None
    return located.extent


def disk_of(machine: Machine, view: View) -> MemoryDisk:
    """The volume as fsck reads it, up to the last record: it would read 40 GiB of zeros behind it."""
    whole = machine.volumes[0]
    assert isinstance(whole, SparseVolume)
    short = SparseVolume(max(extent.offset_bytes + extent.length_bytes for extent in (extent_of(view, key) for key in KEYS)))
    short.pages = whole.pages
    return MemoryDisk(short)


async def check_lease(store: Store, view: View) -> None:
    """What a client would map: the fields of each record in its slot."""
    arena, (weights, biases) = view.namespace.memory.param, SCHEMA.stored.fields
    assert arena is not None
    for key in KEYS:
        request = await lease(store, view, [key], timeout_s=60.0)
        slot = request.copies[0].slot
        image = arena.view(slot)
        segment_id, offset_bytes = arena.place(slot)
        assert offset_bytes + len(image) <= {found: memory.length_bytes for found, memory, _ in arena.segments}[segment_id]
        tensor = field_tensor(image, weights)
        assert tensor.numel() == WEIGHTS
        assert [tensor[mark].item() for mark in MARKS] == [expected(mark, key) for mark in MARKS]
        assert tensor[BORDER - 2].item() == tensor[BORDER + 2].item() == 0
        assert field_tensor(image, biases).tolist() == [key[1] + 0.5] * 1000
        store.access.release(view, request.lease_id)


async def find_damage(machine: Machine, store: Store, view: View) -> None:
    """One bit, beyond 4 GiB of a record that begins beyond 4 GiB: named by scrub, by a read and by fsck."""
    key, extent = KEYS[1], extent_of(view, KEYS[1])
    at = SCHEMA.stored.fields[0].offset_bytes + BORDER + 5
    volume = machine.volumes[0]
    assert isinstance(volume, SparseVolume)
    volume.corrupt(extent.offset_bytes + at)
    result = await machine.service.scrubber.wait(machine.service.scrubber.start("large", [key], None))
    (finding,) = result["findings"]  # type: ignore[misc]
    assert (finding["key"], finding["offset_bytes"]) == (key, extent.offset_bytes)
    chunk_at = at - (at - SCHEMA.stored.fields[0].offset_bytes) % CHUNK_BYTES
    assert f"chunk 4096 (field 'w', 1048576 bytes at byte {chunk_at} of the record)" in finding["reason"]
    with pytest.raises(CorruptRecord, match=rf"chunk 4096 .* at byte {chunk_at} "):
        await store.reading.read(view, key, HoleSegment(SCHEMA.record_bytes).view(0, SCHEMA.record_bytes))
    found = read_record(disk_of(machine, view), extent.offset_bytes, {"large": SCHEMA.stored}, store=store.store_uuid)
    assert found is not None
    assert f"chunk 4096, at byte {chunk_at} of it" in (found.damage or "")
    volume.corrupt(extent.offset_bytes + at)


@pytest.mark.slow
def test_records_above_4_gib_live_through_commit_crash_lease_verify_and_fsck(machine: Machine) -> None:
    async def live() -> None:
        store = machine.start()
        view = await make(store)
        extents = [extent_of(view, key) for key in KEYS]
        assert all(extent.length_bytes == SCHEMA.record_bytes > BORDER for extent in extents)
        assert max(extent.offset_bytes for extent in extents) > BORDER
        volumes = dict(machine.volumes)
        await machine.crash()
        machine.volumes = volumes  # a sparse volume loses nothing
        store = machine.start()
        view = await store.admission.open("large", mode="read", at=None, host_bytes=None)
        assert view.namespace.steps.ledger.step(7).extra == b"large"
        await check_lease(store, view)
        result = await machine.service.scrubber.wait(machine.service.scrubber.start("large", None, None))
        assert (result["records"], result["found"], result["bytes_read"]) == (2, 0, 2 * SCHEMA.record_bytes)
        report = examine(survey([disk_of(machine, view)]), None)
        rebuilt = {key: row.located for _, key, row in new_contents(report.found, report.proofs).put_rows}
        assert rebuilt == {key: view.namespace.steps.ledger.at(key, 7) for key in KEYS}
        await find_damage(machine, store, view)

    run(live())


def test_a_schema_of_a_pebibyte_costs_nothing_to_look_at() -> None:
    """Sizes are arithmetic: nothing is allocated for what is only described."""
    schema = Schema.param({"w": ((1 << 50,), "uint8")})
    assert schema.record_bytes == (1 << 50) + schema.stored.header_bytes
    assert schema.stored.header_bytes == (1 << 33) + PAGE_BYTES
    assert replace(schema) == Schema.from_description(schema.describe())


@pytest.mark.parametrize("shape", [(1 << 33,), (1 << 50,), (1 << 62,), (1 << 62,) * 8])
@pytest.mark.parametrize("kind", ["param", "adamw"])
def test_a_namespace_of_records_that_no_machine_holds_is_refused_by_arithmetic(kind: str, shape: tuple[int, ...]) -> None:
    """Before anything as long as a record, or as its table of checksums, is made."""

    async def live() -> None:
        store = Machine().start()
        schema = Schema.param({"w": (shape, "uint8")}) if kind == "param" else Schema.adamw({"w": shape})
        tracemalloc.start()
        try:
            with pytest.raises(CapacityError, match=r"needs at least .* of host memory"):
                await store.admission.create("large", schema.describe(), layers=[0], experts=1, host_bytes=None)
            assert tracemalloc.get_traced_memory()[1] < 1 << 20
        finally:
            tracemalloc.stop()

    run(live())


def test_slots_beyond_4_gib_of_a_segment_are_found_where_they_lie() -> None:
    arena = Arena(slot_bytes=GIB, planned_slots=6, policy=Lru())
    segment = HoleSegment(6 * GIB)
    arena.add_segment(9, segment, slots=6)
    arena.view(5)[:3] = b"abc"
    assert arena.place(5) == (9, 5 * GIB)
    assert bytes(segment.view(5 * GIB, 4)) == b"abc\0"
