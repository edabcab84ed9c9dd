"""Reads the daemon's counters for the demo: the one place that knows the names in `store.stats()`.

Counters start at zero with each daemon, so a difference is taken only within one daemon's life.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True, slots=True)
class Traffic:
    """Counters of one namespace and of the tiers below it: since the daemon started, or between two moments.

    hits: weights that a lease found in host memory or on their way there; misses: all others. prefetched: weights loaded ahead;
    wasted: those of them evicted unused. optim_*: the same for optimizer states, at updates. host_bytes: weights leased out of
    host memory. nvme_*_bytes: read and written on volumes.
    """

    hits: int = 0
    misses: int = 0
    prefetched: int = 0
    wasted: int = 0
    optim_hits: int = 0
    optim_misses: int = 0
    host_bytes: int = 0
    nvme_read_bytes: int = 0
    nvme_written_bytes: int = 0

    @classmethod
    def of(cls, stats: Mapping[str, Any], namespace: str) -> Traffic:
        """Counters since the daemon started, out of what `store.stats()` returned."""
        entry = stats["namespaces"][namespace]
        param, optim = entry["param"], entry["optim"]
        volumes = [tier for name, tier in stats["tiers"].items() if name != "host"]
        return cls(
            hits=param["hits"],
            misses=param["misses"],
            prefetched=param["prefetched"],
            wasted=param["wasted"],
            optim_hits=optim["hits"] + optim["joins"],
            optim_misses=optim["misses"],
            host_bytes=(param["hits"] + param["misses"]) * param["slot_bytes"],
            nvme_read_bytes=sum(tier["bytes_read"] for tier in volumes),
            nvme_written_bytes=sum(tier["bytes_written"] for tier in volumes),
        )

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(*(getattr(self, field.name) + getattr(other, field.name) for field in fields(self)))

    def __sub__(self, earlier: Traffic) -> Traffic:
        return Traffic(*(getattr(self, field.name) - getattr(earlier, field.name) for field in fields(self)))

    @property
    def host_hit_rate(self) -> float:
        """Share of the weights asked for that were in host memory, or on their way there by a prefetch."""
        return _share(self.hits, self.hits + self.misses)

    @property
    def prefetch_rate(self) -> float:
        """Share of the weights asked for that a prefetch had brought: a part of the hits."""
        return _share(min(self.prefetched - self.wasted, self.hits), self.hits + self.misses)

    @property
    def nvme_rate(self) -> float:
        """Share of the weights asked for that had to come from a volume while the trainer waited."""
        return _share(self.misses, self.hits + self.misses)

    @property
    def optim_hit_rate(self) -> float:
        """Share of the optimizer states that an update found in host memory."""
        return _share(self.optim_hits, self.optim_hits + self.optim_misses)

    @property
    def nvme_bytes(self) -> int:
        return self.nvme_read_bytes + self.nvme_written_bytes


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes in the host tier at one moment. peak_bytes: the most that the kernel counted in the arenas."""

    budget_bytes: int
    peak_bytes: int

    @classmethod
    def of(cls, stats: Mapping[str, Any]) -> Memory:
        host = stats["tiers"]["host"]
        return cls(budget_bytes=host["budget_bytes"], peak_bytes=host["kernel_peak_bytes"])


def resident_param_bytes(stats: Mapping[str, Any], namespace: str) -> int:
    """Bytes of experts' weights in host memory now."""
    param = stats["namespaces"][namespace]["param"]
    resident_bytes: int = param["resident"] * param["slot_bytes"]
    return resident_bytes


ABSENT = "absent"
TIERS = ("host: weights, optimizer", "host: weights", "host: optimizer", "NVMe only")
"""Places where an expert can be, besides its record on the volume. The picture's legend."""


@dataclass(frozen=True, slots=True)
class ExpertTiers:
    """Place of every expert, by layer, then expert. tiers: one of TIERS. heat: how much the policy has seen it used of late."""

    tiers: tuple[tuple[str, ...], ...]
    heat: tuple[tuple[float, ...], ...]

    @classmethod
    def of(cls, residency: Mapping[str, Any]) -> ExpertTiers:
        """Reads what `namespace.residency()` returned."""
        experts = residency["experts"]
        layers = len(residency["layers"])
        flat = [_tier(param, optim) for param, optim in zip(residency["param"], residency["optim"], strict=True)]
        heat = residency["heat"]
        return cls(
            tiers=tuple(tuple(flat[row * experts : (row + 1) * experts]) for row in range(layers)),
            heat=tuple(tuple(heat[row * experts : (row + 1) * experts]) for row in range(layers)),
        )


def _tier(param: str, optim: str) -> str:
    if param != ABSENT:
        return TIERS[0] if optim != ABSENT else TIERS[1]
    return TIERS[2] if optim != ABSENT else TIERS[3]


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0
