"""Nodes reach each other over their own links at the links' rates, reach nothing else, and are gone however their owner ends."""

from __future__ import annotations

import errno
import json
import os
import select
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from paramstore_testkit.nodes import namespaces
from paramstore_testkit.nodes.links import rails, shared_link
from paramstore_testkit.nodes.namespaces import Network, missing_reason, open_network

CONNECT = "import socket, sys; print([socket.socket().connect_ex((address, 9)) for address in sys.argv[1:]])"
RECEIVE = """
import socket, sys, time
with socket.create_server((sys.argv[1], 9)) as server:
    print(flush=True)
    connection, _ = server.accept()
    start_s, received = time.monotonic(), 0
    while part := connection.recv(1 << 16):
        received += len(part)
    print(received, time.monotonic() - start_s)
"""
SEND = "import socket, sys; socket.create_connection((sys.argv[1], 9)).sendall(bytes(int(sys.argv[2])))"
MESSAGE_BYTES = 1 << 20
RATE_MBIT_S = 100
HOLD = """
import json, signal, subprocess
from paramstore_testkit.nodes.links import shared_link
from paramstore_testkit.nodes.namespaces import open_network

with open_network(shared_link(100)) as network:
    words = [*network.entering(0), "sh", "-c", "echo; exec sleep infinity"]
    rank = subprocess.Popen(words, stdout=subprocess.PIPE, start_new_session=True)
    rank.stdout.readline()
    print(json.dumps([*network.holders, rank.pid]), flush=True)
    signal.pause()
"""
END_S = 30.0


@pytest.fixture
def possible() -> None:
    if reason := missing_reason():
        pytest.skip(reason)


def inode(holder: int | str) -> int:
    """The number of a process's network namespace."""
    return Path(f"/proc/{holder}/ns/net").stat().st_ino


def inodes() -> set[int]:
    """Those of all processes: no namespace of ours lives by anything else."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            found.add(inode(process.name))
        except OSError:  # it has ended
            continue
    return found


def connect(network: Network, node: int, *addresses: str) -> list[int]:
    """Error numbers of connections that nobody takes."""
    return list(json.loads(network.run(node, sys.executable, "-S", "-c", CONNECT, *addresses)))


def refuse(tool: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets a tool fail."""
    fake = tmp_path / tool
    fake.write_text(f"#!/bin/sh\necho {said} >&2\nexit 1\n")
    fake.chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")


@pytest.mark.slow
@pytest.mark.usefixtures("possible")
def test_every_node_reaches_every_other_and_nothing_else() -> None:
    with open_network(rails(100, spine_rate_mbit_s=25)) as network:
        addresses = [network.topology.address(node) for node in range(4)]
        for node in range(4):
            assert connect(network, node, *addresses, "198.51.100.1") == [errno.ECONNREFUSED] * 4 + [errno.ENETUNREACH]


@pytest.mark.slow
@pytest.mark.usefixtures("possible")
def test_two_nodes_talk_over_the_link_that_joins_them() -> None:
    with open_network(rails(100, spine_rate_mbit_s=25)) as network:
        connect(network, 0, network.topology.address(3))
        ends = [(node, link) for node in range(4) for link in network.topology.links_of(node)]
        busy = {(node, link.ends) for node, link in ends if network.sent_bytes(node, link)}
        assert busy == {(0, (0, 3)), (3, (0, 3))}


@pytest.mark.usefixtures("possible")
def test_the_kernel_shapes_each_end_of_a_link_to_its_rate() -> None:
    with open_network(rails(100, spine_rate_mbit_s=25)) as network:
        for node in range(4):
            shaped = json.loads(network.run(node, "tc", "-j", "qdisc", "show"))
            rates = {each["dev"]: each["options"]["rate"] * 8 / 1e6 for each in shaped if each["kind"] == "tbf"}
            assert rates == {link.interface: link.rate_mbit_s for link in network.topology.links_of(node) if link.rate_mbit_s}


@pytest.mark.slow
@pytest.mark.usefixtures("possible")
def test_a_message_takes_the_time_that_its_link_needs_and_is_counted() -> None:
    with open_network(shared_link(RATE_MBIT_S)) as network:
        address, (link,) = network.topology.address(1), network.topology.links
        words = [*network.entering(1), sys.executable, "-S", "-c", RECEIVE, address]
        with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as receiver:
            assert receiver.stdout is not None
            receiver.stdout.readline()
            network.run(0, sys.executable, "-S", "-c", SEND, address, str(MESSAGE_BYTES))
            received_bytes, taken_s = receiver.communicate(timeout=END_S)[0].split()
        assert int(received_bytes) == MESSAGE_BYTES
        assert network.sent_bytes(0, link) > MESSAGE_BYTES > 10 * network.sent_bytes(1, link)
    assert float(taken_s) > 0.8 * MESSAGE_BYTES * 8 / (RATE_MBIT_S * 1e6)


@pytest.mark.usefixtures("possible")
def test_nodes_are_gone_after_an_error() -> None:
    before = set(os.listdir("/sys/class/net"))
    with suppress(KeyError), open_network(shared_link(100)) as network:
        made = {inode(holder) for holder in network.holders}
        assert len(made) == 2
        assert made <= inodes()
        assert set(os.listdir("/sys/class/net")) == before
        raise KeyError
    assert not made & inodes()
    assert set(os.listdir("/sys/class/net")) == before


@pytest.mark.slow
@pytest.mark.usefixtures("possible")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_nodes_are_gone_when_a_signal_ends_their_owner(number: signal.Signals) -> None:
    with subprocess.Popen([sys.executable, "-c", HOLD], stdout=subprocess.PIPE, start_new_session=True) as owner:
        assert owner.stdout is not None
        inside = json.loads(owner.stdout.readline())
        made, pidfds = {inode(process) for process in inside}, [os.pidfd_open(process) for process in inside]
        assert len(made) == 2
        os.killpg(owner.pid, number)  # as Ctrl-C does
    for pidfd in pidfds:
        assert select.select([pidfd], [], [], END_S)[0]
        os.close(pidfd)
    assert not made & inodes()


@pytest.mark.usefixtures("possible")
def test_a_command_that_fails_on_a_node_says_what_was_wrong() -> None:
    with open_network(shared_link(None)) as network, pytest.raises(OSError, match=r"ip link show dev none on node 1: .*none"):
        network.run(1, "ip", "link", "show", "dev", "none")


@pytest.mark.parametrize(
    ("tool", "said"),
    [("ip", "Unknown device type"), ("tc", "Specified qdisc kind is unknown"), ("unshare", "Operation not permitted")],
)
@pytest.mark.usefixtures("possible")
def test_what_the_machine_refuses_is_the_reason(tool: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse(tool, said, tmp_path, monkeypatch)
    assert missing_reason() == said


@pytest.mark.usefixtures("possible")
def test_a_namespace_that_is_refused_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse("unshare", "Operation not permitted", tmp_path, monkeypatch)
    with pytest.raises(OSError, match="unshare --net: Operation not permitted"), open_network(shared_link(100)):
        pass


def test_tools_that_are_missing_are_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert missing_reason() == f"not installed: {', '.join(namespaces.TOOLS)}"


def test_another_user_than_root_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert "root" in (missing_reason() or "")
