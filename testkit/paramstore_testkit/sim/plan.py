"""Draws a seed's plan: sizes, budgets, disks, fault rates, clients and how often each does what. Swarm testing: every seed is
another store under other pressure, and most leave most things out.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random


@dataclass(frozen=True, slots=True)
class Faults:
    """Chances of faults, per call."""

    read: float = 0.0
    write: float = 0.0
    flush: float = 0.0
    transaction: float = 0.0
    """Chance that a transaction raises; half of those took effect."""
    catalog_lost: float = 0.0
    """Chance that the catalog then cannot be read back."""
    stall: float = 0.0
    """Chance that a call of a volume takes longer than anybody waits for it."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The store and the clients of one seed."""

    seed: int
    fields: dict[str, tuple[int, ...]]
    layers: int
    experts: int
    param_slots: int
    working_slots: int
    volume_count: int
    spare_records: int | None
    """Records of room beyond what the namespaces are entitled to, on volumes of a fixed size; None: volumes grow."""
    namespaces: int
    policy: str
    prefill: bool
    retained_steps: int
    held_steps: int
    io_workers: int
    update_workers: int
    wait_timeout_s: float
    shuffles: bool
    trainers: int
    readers: int
    strangers: int
    """Number of clients that are hostile, though legal."""
    think_s: float
    """Mean time between two acts of a client."""
    burst: float
    """Chance that an act is several requests."""
    io_s: float
    """Mean time of a volume's call."""
    faults: Faults
    life_requests: int
    """Mean number of requests between two ends of the daemon."""
    weights: dict[str, float] = field(default_factory=dict)
    """Factors of the usual shares, by kind of request."""


FIELDS: tuple[dict[str, tuple[int, ...]], ...] = ({"w": (2, 2)}, {"w": (2, 2)}, {"w": (2, 2), "v": (3,)})
RARE = (0.0, 0.0, 0.0, 0.002, 0.01)
OPERATIONS = (
    "acquire", "release", "prefetch", "push", "apply", "commit", "rollback", "evict", "write_back", "read", "refresh", "snapshot",
    "protect", "close", "verify", "cancel", "die", "norm", "abort",
)  # fmt: skip
"""Kinds of requests whose share a seed draws."""


def plan_of(seed: int) -> Plan:
    """Draws the plan of a seed: the same in every process."""
    random = Random(seed * 2 + 1)
    choice = random.choice
    weights = {name: choice((0.0, 0.3, 1.0, 1.0, 1.0, 3.0)) for name in OPERATIONS}
    for needed in ("acquire", "release", "push", "apply", "commit"):
        weights[needed] = max(weights[needed], 0.3)
    is_faulty = random.random() < 0.6
    faults = Faults(
        read=choice(RARE), write=choice((0.0, 0.0, 0.01, 0.04)), flush=choice((0.0, 0.0, 0.01, 0.05)),
        transaction=choice((0.0, 0.0, 0.03, 0.1)), catalog_lost=choice((0.0, 0.0, 0.5)), stall=choice((0.0, 0.0, 0.001, 0.004)),
    )  # fmt: skip
    return Plan(
        seed=seed,
        fields=choice(FIELDS),
        layers=random.randint(1, 3), experts=random.randint(2, 4),
        param_slots=random.randint(2, 14), working_slots=random.randint(2, 6),
        volume_count=choice((1, 1, 2)), spare_records=choice((None, 0, 0, 3)), namespaces=choice((1, 1, 1, 2)),
        policy=choice(("lru", "decayed_lfu")), prefill=random.random() < 0.15,
        retained_steps=choice((2, 2, 3)), held_steps=choice((0, 1, 2)),
        io_workers=random.randint(1, 3), update_workers=random.randint(1, 3),
        wait_timeout_s=choice((2.0, 10.0, 60.0)), shuffles=random.random() < 0.5,
        trainers=random.randint(1, 2), readers=random.randint(0, 10), strangers=random.randint(0, 4),
        think_s=choice((0.0005, 0.01, 2.0, 100.0)), burst=choice((0.0, 0.2, 0.5)), io_s=choice((0.00005, 0.0005, 0.005, 0.02)),
        faults=faults if is_faulty else Faults(), life_requests=choice((250, 600, 1500)), weights=weights,
    )  # fmt: skip
