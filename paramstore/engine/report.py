"""Figures for people: counters of a namespace, where its experts are, what the volumes did. Reads tables, changes none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from paramstore.core.residency import Copy, Working
from paramstore.engine.capacity.volumes import VolumeSet
from paramstore.engine.tables.arena import Arena
from paramstore.engine.tables.counters import PartStats
from paramstore.engine.tables.namespace import NamespaceState, WriterGroup
from paramstore.engine.transfers.record_reads import VolumeTraffic
from paramstore.storage.mounts import free_bytes, shown


def namespace_stats(namespace: NamespaceState, now_s: float) -> dict[str, object]:
    """Counters since the daemon started, and what is resident, leased and dirty now. now_s: by the store's clock.

    dirty_bytes: records that a commit now would have to write, or wait for while they are written. write_amplification: bytes of
    records and commit notes written, for each byte of a record that a commit has published; None before the first commit.
    """
    stats, residency, steps, writing = namespace.stats, namespace.residency, namespace.steps, namespace.writing
    states = {state.value: len(copies) for state, copies in residency.in_state.items() if copies}
    dirty_copies = len(residency.in_state[Working.DIRTY]) + len(residency.in_state[Working.WRITING])
    copies = [copy for copies in residency.copies.values() for copy in copies]
    param, working = (namespace.memory.param, namespace.memory.working) if namespace.has_memory else (None, None)
    written_bytes = stats.bytes_written + stats.note_bytes
    return {
        "epoch": namespace.epoch, "committed_step": steps.committed_step,
        "prepared_step": steps.ledger.prepared_step, "sequence": steps.sequence,
        "steps": steps.ledger.steps(), "broken": writing.broken, "views": len(namespace.views),
        "has_writer": writing.writer is not None, "ranks": _ranks(namespace), "pending_gradients": len(writing.pending),
        "changed": len(steps.changed), "keys": len(namespace.keys), "record_bytes": namespace.schema.record_bytes,
        "state_bytes": len(namespace.keys) * namespace.schema.record_bytes,
        "optimizer": namespace.schema.kind if namespace.is_trainable() else None,
        "state_dtype": namespace.schema.state_dtype if namespace.is_trainable() else None,
        "bytes_per_parameter": namespace.schema.bytes_per_parameter,
        "bytes_read": stats.bytes_read, "bytes_written": stats.bytes_written, "records_updated": stats.records_updated,
        "records_caught_up": stats.records_caught_up, "records_advanced": stats.records_advanced,
        "missed_steps_made": stats.missed_steps_made, "logged_applies": len(writing.log.entries),
        "updates": namespace.schema.updates,
        "records_read_for_sums": stats.records_read_for_sums,
        "records_written": stats.records_written, "commits": stats.commits, "applies": stats.applies,
        "bytes_committed": stats.bytes_committed, "note_bytes": stats.note_bytes,
        "write_amplification": written_bytes / stats.bytes_committed if stats.bytes_committed else None,
        "dirty_bytes": dirty_copies * namespace.schema.record_bytes,
        "dirty_limit_bytes": working.dirty_limit_bytes if working is not None else None, "snapshots": steps.ledger.snapshots(),
        "commit": commit_progress(namespace, now_s),
        "leased_slots": sum(copy.leases > 0 for copy in copies),
        "lent_slots": sum(view.loan.count for view in namespace.views if not view.is_fenced),
        "hbm_bytes": sum(view.device_bytes for view in namespace.views),
        "param": {**_part(stats.param, param), "resident": len(copies),
                  "retired": sum(copy.state is Copy.RETIRED for copy in copies)},
        "optim": {**_part(stats.optim, working), "resident": len(residency.resident), **states},
    }  # fmt: skip


def _ranks(namespace: NamespaceState) -> dict[str, object]:
    """Figures of the group that writes now: how many ranks it has, which are open, and whose call waits for the others."""
    group = namespace.writing.group or WriterGroup(world_size=0)
    return {"group": group.name, "world_size": group.world_size, "open": sorted(group.members), "waiting": list(group.waiting)}


def commit_progress(namespace: NamespaceState, now_s: float) -> dict[str, object] | None:
    """Progress of the commit under way, and how long the rest of its records will take at the rate so far; None without one.

    eta_s is None before the first record has landed. Notes, flushes and the transaction come after that time.
    """
    cut = namespace.steps.cut
    if cut is None or cut.progress is None:
        return None
    seconds = now_s - cut.progress.started_s
    bytes_left = cut.unwritten * namespace.schema.record_bytes
    written = namespace.stats.bytes_written - cut.progress.bytes_written
    return {
        "step": cut.progress.step, "records": len(cut.records), "records_left": cut.unwritten, "bytes_left": bytes_left,
        "seconds": seconds, "eta_s": bytes_left * seconds / written if written else None,
    }  # fmt: skip


def _part(stats: PartStats, arena: Arena | None) -> dict[str, object]:
    slots = {"slots": 0, "planned_slots": 0, "slot_bytes": 0, "free": 0, "waiting": 0}
    if arena is not None:
        slots = {
            "slots": arena.slots.count, "planned_slots": arena.planned_slots, "slot_bytes": arena.slot_bytes,
            "free": arena.slots.free_count, "waiting": len(arena.waiting),
        }  # fmt: skip
    return {**asdict(stats), **slots}


def residency(namespace: NamespaceState) -> dict[str, object]:
    """For each key, in key order: the state of its working copy, that of its best `param` copy, its heat, whether it is in HBM."""
    heat = namespace.memory.param.policy.heat if namespace.has_memory else lambda _: 0.0
    in_hbm = frozenset().union(*(view.device_resident for view in namespace.views)) if namespace.views else frozenset()
    keys = list(namespace.keys)
    return {
        "layers": list(namespace.keys.layers), "experts": namespace.keys.experts,
        "optim": [namespace.residency.working[key].state.value if namespace.is_trainable() else "absent" for key in keys],
        "param": [_param_state(namespace, key) for key in keys],
        "heat": [heat(key) for key in keys],
        "hbm": [key in in_hbm for key in keys],
    }  # fmt: skip


def _param_state(namespace: NamespaceState, key: tuple[int, int]) -> str:
    states = {copy.state for copy in namespace.residency.copies.get(key, ())}
    return next((state.value for state in (Copy.READY, Copy.LOADING, Copy.RETIRED) if state in states), Copy.ABSENT.value)


def volume_stats(volumes: VolumeSet, traffic: Mapping[int, VolumeTraffic]) -> dict[str, dict[str, object]]:
    return {str(index): {**volumes.describe(index), **asdict(traffic[index])} for index in volumes.volumes}


def disk_stats(directory: Path) -> dict[str, object]:
    """Free space on the disk of a store's catalog; None where it cannot be told."""
    return {"dir": shown(directory), "free_bytes": free_bytes(directory) if directory.is_dir() else None}
