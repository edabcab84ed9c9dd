"""Which nodes there are, which links join them, and how fast each link is. Nothing here touches the machine.

A node is an index, from 0. Each has one address, and reaches every other over the link that joins the two.
"""

from __future__ import annotations

from dataclasses import dataclass

SUBNET = "192.0.2"
"""Addresses kept for documentation (RFC 5737): they lead nowhere outside."""


@dataclass(frozen=True, slots=True)
class Link:
    """A cable between two nodes, with the same rate in each direction at once."""

    ends: tuple[int, int]
    rate_mbit_s: float | None
    """None where the link is as fast as the kernel."""

    @property
    def interface(self) -> str:
        """Name that the link has in both of its nodes."""
        return f"link{self.ends[0]}-{self.ends[1]}"

    def other_end(self, node: int) -> int:
        return sum(self.ends) - node


@dataclass(frozen=True, slots=True)
class Topology:
    machines: tuple[int, ...]
    """Machine that each node plays a part of: LOCAL_RANK counts within it. Nodes of one machine follow each other."""
    links: tuple[Link, ...]

    def address(self, node: int) -> str:
        return f"{SUBNET}.{node + 1}"

    def links_of(self, node: int) -> tuple[Link, ...]:
        return tuple(link for link in self.links if node in link.ends)

    def interface(self, node: int) -> str:
        """Interface that has the node's address."""
        return self.links_of(node)[0].interface


def shared_link(rate_mbit_s: float | None) -> Topology:
    """Two nodes, and one link that all their ranks share."""
    return Topology(machines=(0, 1), links=(Link((0, 1), rate_mbit_s),))


def rails(rate_mbit_s: float | None, *, spine_rate_mbit_s: float | None) -> Topology:
    """Four nodes, each a device with a network card of its own, two in each of two machines.

    Within a machine the link is unshaped. Devices with the same number in both machines are on one rail, of `rate_mbit_s`; to
    the other device there, the way is across the spine.
    """
    inside = (Link((0, 1), None), Link((2, 3), None))
    along = (Link((0, 2), rate_mbit_s), Link((1, 3), rate_mbit_s))
    across = (Link((0, 3), spine_rate_mbit_s), Link((1, 2), spine_rate_mbit_s))
    return Topology(machines=(0, 0, 1, 1), links=inside + along + across)
