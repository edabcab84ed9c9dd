"""Decides how much is measured: record sizes, sizes of the sets, rounds. Both plans are bounded in time and in disk space."""

from __future__ import annotations

import random
from dataclasses import dataclass

from paramstore.limits import HELD_STEPS, RETAINED_STEPS

MIB = 1 << 20
HIDDEN = 2048
"""Model width of the experts that the records stand for: that of Qwen3-30B-A3B."""
ADAMW_BYTES_PER_PARAMETER = 12
BF16_BYTES = 2
SPARE_BYTES = 512 * MIB


@dataclass(frozen=True, slots=True)
class RecordSize:
    """A nominal record size; real records come as near to it as whole rows of the expert's matrices allow."""

    nominal_bytes: int

    def fields(self, bytes_per_parameter: int) -> dict[str, tuple[int, int]]:
        """Shapes of an expert that takes about `nominal_bytes` at so many bytes a parameter."""
        inner = max(1, round(self.nominal_bytes / bytes_per_parameter / (3 * HIDDEN)))
        return {"gate_up": (2 * inner, HIDDEN), "down": (HIDDEN, inner)}


LARGE = RecordSize(57 * MIB)
SMALL = RecordSize(int(12.6 * MIB))


@dataclass(frozen=True, slots=True)
class Plan:
    """Amounts of one run.

    expert_size: record size in the rows about updates and streams. set_bytes: bytes of records per case.
    rounds: pairs per row. latency_calls: calls per percentile.
    """

    record_sizes: tuple[RecordSize, ...] = (LARGE, SMALL)
    expert_size: RecordSize = LARGE
    set_bytes: int = 640 * MIB
    rounds: int = 9
    write_rounds: int = 7
    peer_rounds: int = 5
    apply_rounds: int = 7
    commit_rounds: int = 9
    commit_sizes: tuple[int, ...] = (1, 64, 1000)
    reopen_records: int = 100_000
    training_steps: int = 8
    apply_records: int = 12
    latency_calls: int = 3000
    latency_key_count: int = 64
    latency_record_bytes: tuple[int, ...] = (64 << 10, 4 * MIB)
    stream_records: int = 12
    loaded_latency_s: float = 5.0

    @classmethod
    def quick(cls) -> Plan:
        """A plan of about a minute: figures to see that all is well, not to quote."""
        return cls(
            set_bytes=240 * MIB, rounds=5, write_rounds=5, apply_rounds=5, apply_records=3, latency_calls=500,
            latency_record_bytes=(64 << 10, 1 * MIB), stream_records=4, loaded_latency_s=1.5,
        )  # fmt: skip

    def record_count(self, record_bytes: int) -> int:
        return max(2, self.set_bytes // record_bytes)

    @property
    def disk_bytes(self) -> int:
        """Most bytes on disk at a time: the raw file, one store with all the steps it may keep, and some spare."""
        largest = max(size.nominal_bytes for size in self.record_sizes)
        set_bytes = max(self.set_bytes, 2 * largest, self.apply_records * self.expert_size.nominal_bytes)
        return (2 + RETAINED_STEPS + HELD_STEPS) * set_bytes + SPARE_BYTES


def shuffled(count: int, *, seed: int) -> list[int]:
    """The numbers 0 .. count-1, in an order that equal seeds repeat."""
    order = list(range(count))
    random.Random(seed).shuffle(order)
    return order
