"""Decides by measured times how rows travel, and says why: arithmetic, without a collective.

Whatever is chosen must take clearly less time than the flat exchange, by what was measured: where it is not known to, the flat one
stays.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from paramstore_client.moe.hops.nodes import Nodes

WAYS = ("auto", "flat", "two_hops", "row_per_node")
"""How a user may have rows travel. Those after "flat" as they are told, "auto" where they win."""
MARGIN = 1.25
"""How many times less its time must be before another exchange is taken in place of the flat one."""
BEYOND = 64
"""Times the largest size that was measured, above which a size at which another exchange would win is not believed in."""
SLOW = 2.0
ROUND_TRIPS = 3
"""Exchanges by which tokens cross once: what goes where, how much of it, and the tokens."""


@dataclass(frozen=True, slots=True)
class Line:
    """Seconds of an exchange, by the bytes of the rank that sends most."""

    latency_s: float
    s_per_byte: float
    measured_bytes: int

    @classmethod
    def through(cls, seconds_by_bytes: Mapping[int, float]) -> Line:
        """Through the smallest and the largest of the sizes measured."""
        least, most = min(seconds_by_bytes), max(seconds_by_bytes)
        slope = max(0.0, (seconds_by_bytes[most] - seconds_by_bytes[least]) / max(1, most - least))
        return cls(max(0.0, seconds_by_bytes[least] - slope * least), slope, most)

    def at(self, sent_bytes: float) -> float:
        return self.latency_s + self.s_per_byte * sent_bytes

    def __str__(self) -> str:
        return f"{1e3 * self.latency_s:.1f} ms + {1e3 * self.s_per_byte * 2**20:.1f} ms/MiB"


@dataclass(frozen=True, slots=True)
class Speeds:
    """What was measured: rows to all ranks alike in one exchange and in two hops, and to those of a node alone."""

    flat: Line
    two_hops: Line
    inside: Line

    @property
    def two_hops_from_bytes(self) -> int | None:
        """From how many bytes on two hops win; None where they never do."""
        gain = self.flat.s_per_byte - MARGIN * self.two_hops.s_per_byte
        missing_s = MARGIN * self.two_hops.latency_s - self.flat.latency_s
        if gain <= 0 or missing_s > gain * BEYOND * self.flat.measured_bytes:
            return None
        return math.ceil(max(0.0, missing_s / gain))

    @property
    def are_links_slow(self) -> bool:
        """Whether what crosses between nodes is what rows wait for, so that sending less of it can pay."""
        return self.flat.s_per_byte > SLOW * self.inside.s_per_byte


@dataclass(frozen=True, slots=True)
class Crossing:
    """What a call sends to other nodes, of the rank that sends most: row_bytes in the flat exchange, token_bytes with each token
    once. spread_bytes: what a rank then gives to those of its node where tokens come
    from all nodes alike; more where they do not."""

    row_bytes: int
    token_bytes: int
    spread_bytes: int


@dataclass(frozen=True, slots=True)
class ExchangeChoice:
    """How rows travel, and why. ways: those that stand open beside the flat exchange, of WAYS. speeds: by which each call takes
    one; None where nothing was measured, and what was asked for is done."""

    ways: tuple[str, ...]
    why: str
    nodes: Nodes
    speeds: Speeds | None = None

    @classmethod
    def measured(cls, nodes: Nodes, speeds: Speeds) -> ExchangeChoice:
        least = speeds.two_hops_from_bytes
        hops = "two hops win nowhere" if least is None else f"two hops win from {least} bytes of a rank on"
        links = "links between nodes are" + ("" if speeds.are_links_slow else " not") + f" {SLOW:g} times slower than inside"
        ways = ("two_hops",) * (least is not None) + ("row_per_node",) * speeds.are_links_slow
        told = f"flat {speeds.flat}, two hops {speeds.two_hops}, inside {speeds.inside}"
        return cls(ways, f"ranks {nodes}: {hops}, {links}: {told}", nodes, speeds)

    def hops(self, sent_bytes: int) -> bool:
        """Whether a call goes in two hops. sent_bytes: of the rank that sends most."""
        least = 0 if self.speeds is None else self.speeds.two_hops_from_bytes
        return "two_hops" in self.ways and least is not None and sent_bytes >= least

    def sends_once(self, crossing: Crossing) -> bool:
        """Whether each token of a call goes to each node once."""
        if self.speeds is None or "row_per_node" not in self.ways:
            return "row_per_node" in self.ways
        away = 1 - self.nodes.width / self.nodes.world_size  # the part of what was measured that left its node
        flat, inside = self.speeds.flat, self.speeds.inside
        once_s = ROUND_TRIPS * flat.latency_s + flat.s_per_byte * crossing.token_bytes / away + inside.at(crossing.spread_bytes)
        return flat.at(crossing.row_bytes / away) >= MARGIN * once_s
