"""Checks invariants of a running daemon from outside: extents, slots, leases, and that nothing is left when all have gone."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from paramstore.core.location import Extent
from paramstore.core.residency import Copy
from paramstore.engine.store import Store
from paramstore.engine.tables.namespace import NamespaceState
from paramstore.storage.format.structures import check_checksums, check_header, chunk_checksums
from paramstore_testkit.sim.model import Broken, Image, NamespaceModel

if TYPE_CHECKING:
    from paramstore_testkit.sim.machine import SimMachine


def check_tables(store: Store) -> None:
    """Checks what holds at any moment between two callbacks."""
    _check_space(store)
    for namespace in store.namespaces.values():
        _check_copies(namespace)


def _check_space(store: Store) -> None:
    space = store.transfers._planner.space
    claimed = [*space._taken, *space._leaving, *space._quarantined]
    claimed += [extent for volume in space._volumes.values() for extent in volume.prefilling]
    claimed.sort()
    end = Extent(-1, 0, 0)
    for extent in claimed:
        if extent.volume == end.volume and extent.offset_bytes < end.offset_bytes + end.length_bytes:
            raise Broken(f"{end} and {extent} overlap")
        end = extent
    used = Counter(dict.fromkeys(space._volumes, 0))
    for extent in claimed:
        used[extent.volume] += extent.length_bytes
    for index, volume in space._volumes.items():
        total = volume.size_bytes - volume.start_bytes
        if used[index] + volume.free_bytes != total:
            raise Broken(f"volume {index}: {used[index]} bytes are claimed and {volume.free_bytes} free, of {total}")
    for namespace in store.namespaces.values():
        for extent in _needed(namespace):
            if extent not in space._taken and extent not in space._quarantined:
                raise Broken(f"{extent} of {namespace.name} is needed and not held")


def _needed(namespace: NamespaceState) -> list[Extent]:
    needed = list(namespace.steps.ledger.extents())
    for working in namespace.residency.working.values():
        if working.uncommitted is not None:
            needed.append(working.uncommitted.extent)
        if working.reserved is not None:
            needed.append(working.reserved)
    return needed


def _check_copies(namespace: NamespaceState) -> None:
    arenas = namespace.memory if namespace.has_memory else None
    copies = [copy for found in namespace.residency.copies.values() for copy in found]
    if arenas is not None:
        slots = {copy.slot for copy in copies}
        taken = arenas.param.slots.count - arenas.param.slots.free_count
        if len(slots) != len(copies) or taken != len(copies):
            raise Broken(f"{namespace.name}: {len(copies)} param copies in {len(slots)} slots, {taken} are taken")
    leased: Counter[int] = Counter()
    for view in namespace.views:
        for copy, count in view.leased.items():
            leased[id(copy)] += count
    for copy in copies:
        if copy.leases != leased[id(copy)]:
            raise Broken(f"{namespace.name}: {copy.key} counts {copy.leases} leases, views have {leased[id(copy)]}")
    if arenas is not None:
        working = arenas.working
        slots = {found.slot for found in namespace.residency.resident.values() if found.slot is not None}
        taken = working.slots.count - working.slots.free_count
        if len(slots) != len(namespace.residency.resident) or taken < len(slots):
            raise Broken(
                f"{namespace.name}: {len(namespace.residency.resident)} working copies in {len(slots)} slots, {taken} are taken"
            )


def check_baseline(machine: SimMachine) -> None:
    """Checks that nothing is left of clients when all have gone and nothing moves."""
    store, server = machine.store, machine.server
    planner, host = store.transfers._planner, store.host
    left = {
        "sessions": len(server._sessions), "transfers": len(store.transfers.runner.under_way), "running": machine.workers.running,
        "pins": len(planner.space.pins), "leaving": len(planner.space._leaving), "upload bytes": store.uploads.used_bytes,
        "orphan writes": planner.working.orphan_writes, "sockets": len(machine.network.sockets) - 1,
        "outbox": int(not planner.outbox.is_empty), "segments": len(machine.memory.segments) - len(host._segments),
    }  # fmt: skip
    for namespace in store.namespaces.values():
        left |= {f"{name} of {namespace.name}": count for name, count in _left_in(namespace).items()}
        needed = _needed(namespace)
        needed_bytes = sum(extent.length_bytes for extent in needed if extent not in planner.space._quarantined)
        left[f"bytes of {namespace.name} nobody needs"] = planner.space.held_bytes(namespace.name) - needed_bytes
    found = {name: count for name, count in left.items() if count}
    if found:
        raise Broken(f"left when all clients have gone: {found}")


def _left_in(namespace: NamespaceState) -> dict[str, int]:
    residency, writing = namespace.residency, namespace.writing
    copies = [copy for found in residency.copies.values() for copy in found]
    left = {
        "views": len(namespace.views), "writer": int(writing.writer is not None), "cut": int(namespace.steps.cut is not None),
        "leased copies": sum(copy.leases > 0 for copy in copies),
        "retired copies": sum(copy.state is Copy.RETIRED for copy in copies),
        "unsettled copies": sum(copy.is_moving or bool(copy.waiters) for copy in copies),
        "held working copies": sum(working.holders for working in residency.working.values()),
        "moves": sum(working.is_moving for working in residency.working.values()),
        "requests": sum(len(working.requests) for working in residency.working.values()),
        "pending": len(writing.pending), "turn": int(writing.turn.locked()), "stop requests": writing.stop_requests,
        "waiting": sum(len(arena.waiting) for arena in namespace.arenas()),
        "prefetched copies that are gone": len(residency.prefetched - set(copies)),
    }  # fmt: skip
    if namespace.has_memory:
        arena = namespace.memory.working
        left["working slots"] = arena.slots.count - arena.slots.free_count - len(residency.resident)
    return left


def check_disks(machine: SimMachine, namespace: NamespaceState, model: NamespaceModel) -> int:
    """Checks after a start that every record of every step that can be opened lies on the disks, whole, with the model's bytes.

    Gives the number of records that it looked at."""
    part, ledger = machine.schema.stored, namespace.steps.ledger
    record = Image(part.fields, part.image_bytes)
    seen: set[Extent] = set()
    for step in ledger.steps():
        for key in model.keys:
            located = ledger.at(key, step)
            value = model.states[step][key]
            if located is None or tuple(located.identity) != (value.epoch, value.version):
                raise Broken(f"{model.name}: {key} of step {step} is {located}, not {value}")
            if located.extent in seen:
                continue
            seen.add(located.extent)
            image = memoryview(bytearray(located.extent.length_bytes))
            machine.disks[located.extent.volume].read(located.extent.offset_bytes, (image,))
            header = check_header(
                image[: part.header_bytes], part=part, root=located.root, store_uuid=machine.store.store_uuid,
                namespace=namespace.name, key=key, identity=located.identity, place=str(located.extent),
            )  # fmt: skip
            check_checksums(header, part, 0, chunk_checksums(image, part.chunks(), 0), place=str(located.extent))
            if wrong := record.wrong_field(image, value.numbers):
                raise Broken(f"{model.name}: {key} of step {step}: {wrong.name} is not that of {value}")
        if ledger.step(step).extra != str(step).encode():
            raise Broken(f"{model.name}: extra of step {step} is {ledger.step(step).extra!r}")
    return len(seen)
