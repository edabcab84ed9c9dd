"""Says before a run begins whether its experts fit on the disk and in memory, and what of them stays there. Pure but for `plan_of`
and `budget_of`, which look at the machine."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paramstore.config import ENVIRONMENT_PREFIX, Config, load
from paramstore.core.schema import Schema
from paramstore.engine.capacity.estimate import Estimate, estimate
from paramstore.engine.planner.promises import share_of
from paramstore.errors import CapacityError
from paramstore.run.home import Home
from paramstore.run.store import RunStore
from paramstore.sizes import format_size, parse_size
from paramstore.storage.mounts import free_bytes
from paramstore_client.hf.import_checkpoint import packed_schema
from paramstore_client.hf.loading.expert_memory import ExpertMemory
from paramstore_client.hf.loading.served_place import packed_slots
from paramstore_client.hf.model.layout import ExpertLayout
from paramstore_client.host_memory import available_bytes

HOST_SHARE = 2
"""One of so many bytes of available memory is the daemon's, where nobody says how much."""
BUDGET_VARIABLE = f"{ENVIRONMENT_PREFIX}HOST_BUDGET"


@dataclass(frozen=True, slots=True)
class Plan:
    """What a run will take. Sizes in bytes: expert_bytes of an expert as it is stored, lacking_bytes of the volume of a store that
    is still to be made, free_bytes of its disk. standing: experts that can stay in memory; leasable: those of them that can be
    leased at once. unpacked_slots: of quantized ones, those
    that stay unpacked in this process, of unpacked_bytes each; None for others. leased: those that stay leased between tokens,
    where the caller said. is_running: whether a daemon serves the store, with its own budget."""

    name: str
    key_count: int
    expert_bytes: int
    budget_bytes: int
    least_budget_bytes: int
    standing: int
    leasable: int
    unpacked_slots: int | None
    unpacked_bytes: int
    leased: int | None
    lacking_bytes: int
    free_bytes: int
    directory: Path
    is_running: bool

    def check(self) -> None:
        """Raises CapacityError naming what is missing where disk or memory are too small."""
        if self.budget_bytes < self.least_budget_bytes:
            first = f"end the daemon that has it (`paramstore stop {self.directory}`), and " if self.is_running else ""
            raise CapacityError(
                f"{self.name}: a host budget of {format_size(self.budget_bytes)} is too small, the least is "
                f"{format_size(self.least_budget_bytes)}: {first}give --host-budget {-(-self.least_budget_bytes >> 20)}MiB"
            )
        if self.lacking_bytes and self.leased is not None and self.leased > self.leasable:
            raise CapacityError(
                f"{self.name}: with a host budget of {format_size(self.budget_bytes)} {self.leasable} experts can be at hand "
                f"between tokens, --expert-memory asks for {self.leased}: give that number, or more --host-budget"
            )
        if self.free_bytes < self.lacking_bytes:
            raise CapacityError(
                f"{self.name}: its experts take {self.lacking_bytes} bytes in {self.directory}, whose disk has "
                f"{self.free_bytes} left: {self.lacking_bytes - self.free_bytes} bytes are missing. Free them, and the same "
                "command goes on; or give a --dir on another disk"
            )

    def line(self) -> str:
        """What stays in memory and what streams, for people."""
        total = f"{self.name}: {self.key_count} experts, {format_size(self.key_count * self.expert_bytes)}"
        where = f"of {format_size(self.budget_bytes)} host budget"
        if self.standing >= self.key_count:
            kept = f"all stay in memory {where}"
        else:
            kept = f"{self.standing} stay in memory {where}, the others stream from {self.directory}"
        unpacked = ""
        if self.unpacked_slots is not None:
            size = format_size(self.unpacked_slots * self.unpacked_bytes)
            unpacked = f", {self.unpacked_slots} of them unpacked in {size} of this process"
        leased = "" if self.leased is None else f", {self.leased} of them at hand between tokens"
        imported = f"; up to {format_size(self.lacking_bytes)} are imported into {self.directory}" if self.lacking_bytes > 0 else ""
        return f"{total}: {kept}{unpacked}{leased}{imported}"


def budget_of(model: Any, layout: ExpertLayout, *, asked: str | None, running_bytes: int | None) -> int:
    """The host budget to plan with, in bytes: that of the daemon which runs, else the one asked for, else the variable's, else the
    daemon's share of what is available beside the dense part of `model`, a skeleton. Raises ConfigError for one that is none."""
    if running_bytes is not None:
        return running_bytes
    if asked is not None:
        return parse_size(asked)
    if BUDGET_VARIABLE in os.environ:
        return load().host_budget_bytes
    return max(0, available_bytes() - dense_bytes(model, layout)) // HOST_SHARE


def dense_bytes(model: Any, layout: ExpertLayout) -> int:
    """Bytes of all parameters but the experts'."""
    experts = tuple(f"{path}." for path in layout.modules.values())
    return sum(tensor.nbytes for name, tensor in model.named_parameters() if not name.startswith(experts))


def plan_of(
    home: Home, layout: ExpertLayout, model: object, *, is_quantized: bool, memory: ExpertMemory, budget_bytes: int,
    there: RunStore,
) -> Plan:  # fmt: skip
    """The plan of a run. layout: of `model`, a skeleton. memory: how many experts are to stand. there: what there is of
    the store. Room on the disk is asked for only where that is new: else its volumes may lie elsewhere, and be grown by now, which
    its daemon knows, and refuses an import for which it has no room. Raises what `packed_schema` raises."""
    computed = layout.schema(None)
    packed = packed_schema(home.checkpoint, layout, model) if is_quantized else None  # type: ignore[arg-type]
    schema, key_count = packed or computed, len(layout.layers) * layout.experts
    slots = memory.slots_for(computed, key_count)
    found = _estimate(schema, key_count, budget_bytes)
    standing = 0 if found.split is None else found.split.param_slots
    unpacked = None if packed is None else slots or packed_slots(computed, key_count)
    return Plan(
        name=home.model, key_count=key_count, expert_bytes=schema.record_bytes, budget_bytes=budget_bytes,
        least_budget_bytes=found.least_host_bytes, standing=min(standing, key_count),
        leasable=min(share_of(standing, is_writer=False, is_trainable=False), key_count), unpacked_slots=unpacked,
        unpacked_bytes=computed.part("param").image_bytes, leased=slots if packed is None else None,
        lacking_bytes=found.volume_bytes if there.is_new else 0, free_bytes=free_bytes(_nearest(home.directory)),
        directory=home.directory, is_running=there.budget_bytes is not None,
    )  # fmt: skip


def _estimate(schema: Schema, key_count: int, budget_bytes: int) -> Estimate:
    config = Config(host_budget_bytes=budget_bytes)
    return estimate(schema, key_count, config, volume_count=1, core_count=len(os.sched_getaffinity(0)))


def _nearest(directory: Path) -> Path:
    """`directory`, or the nearest one above it that is there."""
    return next(path for path in (directory.absolute(), *directory.absolute().parents) if path.is_dir())
