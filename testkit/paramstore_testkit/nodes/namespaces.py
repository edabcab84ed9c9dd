"""Makes a topology real: each node a network namespace, each link a pair of veth devices shaped by `tbf`.

- A namespace has no name: it lives as long as the one process that holds it, which the kernel kills with its parent, however
  that ends. So nothing is left, even of a run that is killed, and two runs never meet. (The kernel counts the thread that
  opened the network as the parent: it must live as long as the network.)
- Both ends of every link are made inside of nodes: no packet can leave them, and no setting of the machine changes.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from paramstore_testkit.nodes.links import Link, Topology

TOOLS = ("ip", "nsenter", "setpriv", "tc", "unshare")
ENDING_WITH_PARENT = ("setpriv", "--pdeathsig", "KILL")
BURST = "48k"
"""Most that passes a link at once. It must be less than a message, or the link is as fast as the kernel for that message."""
QUEUE = "400ms"
"""Longest wait in a link's queue, after which packets are dropped."""
PROBE = f"ip link add near type veth peer name far && tc qdisc add dev near root tbf rate 1mbit burst {BURST} latency {QUEUE}"
"""What a kernel must be able to do. It shares no code with `open_network`, whose bugs are no reason to skip tests."""
CALL_S = 10.0
"""Longest wait for a tool, and for a namespace to begin or end."""


@dataclass(frozen=True, slots=True)
class Network:
    """A topology while it is real."""

    topology: Topology
    holders: tuple[int, ...]
    """Number of the process that holds each node."""

    def entering(self, node: int) -> tuple[str, ...]:
        """Words before a command that runs it on a node, in a process that ends with this one."""
        return (*ENDING_WITH_PARENT, "nsenter", f"--net=/proc/{self.holders[node]}/ns/net")

    def run(self, node: int, *command: str, lines: str = "") -> str:
        """Runs a command on a node, with `lines` as its input; gives its output. Raises OSError with what it said."""
        words = [*self.entering(node), *command]
        result = subprocess.run(words, input=lines, capture_output=True, text=True, timeout=CALL_S, check=False)
        if result.returncode:
            raise OSError(f"{' '.join(command)} on node {node}: {result.stderr.strip()}")
        return result.stdout

    def sent_bytes(self, node: int, link: Link) -> int:
        """Bytes that have left a node through a link, headers among them."""
        (device,) = json.loads(self.run(node, "ip", "-s", "-j", "link", "show", "dev", link.interface))
        return int(device["stats64"]["tx"]["bytes"])


@contextmanager
def open_network(topology: Topology) -> Iterator[Network]:
    """Makes nodes and links; at the end they are gone. Raises OSError that says what the machine refused."""
    with ExitStack() as stack:
        network = Network(topology, tuple(stack.enter_context(_namespace()) for _ in topology.machines))
        for link in topology.links:
            (near, far), name = link.ends, link.interface
            peer = str(network.holders[far])
            network.run(near, "ip", "link", "add", name, "type", "veth", "peer", "name", name, "netns", peer)
        for node in range(len(topology.machines)):
            network.run(node, "ip", "-batch", "-", lines=_addressing(topology, node))
            network.run(node, "tc", "-batch", "-", lines=_shaping(topology, node))
        yield network


def missing_reason() -> str | None:
    """Says why there can be no nodes on this machine; None where there can."""
    if os.geteuid() != 0:
        return "only root makes network namespaces"
    absent = [tool for tool in TOOLS if shutil.which(tool) is None]
    if absent:
        return f"not installed: {', '.join(absent)}"
    result = subprocess.run(["unshare", "--net", "sh", "-c", PROBE], capture_output=True, text=True, timeout=CALL_S, check=False)
    return result.stderr.strip() if result.returncode else None


@contextmanager
def _namespace() -> Iterator[int]:
    """Gives the number of a process that holds a new network namespace, and ends it."""
    words = [*ENDING_WITH_PARENT, "unshare", "--net", "sh", "-c", "echo; exec sleep infinity"]
    with subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as holder:
        try:
            assert holder.stdout is not None
            is_told = bool(select.select([holder.stdout], [], [], CALL_S)[0])
            if is_told and holder.stdout.readline():
                yield holder.pid
                return
        finally:
            holder.kill()
            _, said = holder.communicate(timeout=CALL_S)
    raise OSError(f"unshare --net: {said.decode(errors='replace').strip() or 'no answer'}")


def _addressing(topology: Topology, node: int) -> str:
    """Commands for `ip`, on a node that has its links."""
    own = topology.address(node)
    links = topology.links_of(node)
    lines = ["link set lo up"]
    for link in links:
        lines += [f"link set {link.interface} addrgenmode none", f"link set {link.interface} up"]  # without talk of IPv6
    lines.append(f"addr add {own}/32 dev {topology.interface(node)}")
    for link in links:
        lines.append(f"route add {topology.address(link.other_end(node))}/32 dev {link.interface} src {own}")
    return "\n".join(lines)


def _shaping(topology: Topology, node: int) -> str:
    """Commands for `tc`: each node shapes what it sends."""
    return "\n".join(
        f"qdisc add dev {link.interface} root tbf rate {link.rate_mbit_s}mbit burst {BURST} latency {QUEUE}"
        for link in topology.links_of(node) if link.rate_mbit_s is not None
    )  # fmt: skip
