"""Ranks run on their nodes under their quotas, those of `torch.distributed` find each other, and no rank outlives its block."""

from __future__ import annotations

import json
import os
import select
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from paramstore_testkit.nodes import namespaces, quota
from paramstore_testkit.nodes.links import rails, shared_link
from paramstore_testkit.nodes.namespaces import Network, open_network
from paramstore_testkit.nodes.ranks import Ended, place_of, start_ranks

END_S = 60.0
RATE_MBIT_S = 100
ROW_BYTES = 1 << 19
EXCHANGE = f"""
import datetime, json, os, signal, time
import torch
import torch.distributed as dist

dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=50))
rank, world_size = dist.get_rank(), dist.get_world_size()
rows = torch.full((world_size, {ROW_BYTES}), rank, dtype=torch.uint8)
arrived = torch.empty_like(rows)
dist.barrier()
start_s = time.monotonic()
dist.all_to_all_single(arrived, rows)
print(json.dumps([start_s, time.monotonic(), arrived.unique(dim=1).flatten().tolist()]), flush=True)
if rank == world_size - 1:
    signal.pause()
try:
    dist.all_to_all_single(arrived, rows)
except RuntimeError:
    print("lost", flush=True)
"""


@pytest.fixture
def network() -> Iterator[Network]:
    if reason := namespaces.missing_reason():
        pytest.skip(reason)
    with open_network(shared_link(RATE_MBIT_S)) as made:
        yield made


def test_ranks_of_a_shared_link_are_numbered_node_by_node() -> None:
    places = [place_of(rank, shared_link(RATE_MBIT_S), ranks_per_node=2) for rank in range(4)]
    assert [place["RANK"] for place in places] == ["0", "1", "2", "3"]
    assert [place["LOCAL_RANK"] for place in places] == ["0", "1", "0", "1"]
    assert [place["GROUP_RANK"] for place in places] == ["0", "0", "1", "1"]
    assert {(place["WORLD_SIZE"], place["LOCAL_WORLD_SIZE"], place["MASTER_ADDR"]) for place in places} == {("4", "2", "192.0.2.1")}


def test_ranks_of_rails_are_local_to_their_machine() -> None:
    topology = rails(RATE_MBIT_S, spine_rate_mbit_s=25)
    places = [place_of(rank, topology, ranks_per_node=1) for rank in range(4)]
    assert [place["LOCAL_RANK"] for place in places] == ["0", "1", "0", "1"]
    assert {place["LOCAL_WORLD_SIZE"] for place in places} == {"2"}
    assert [place["GROUP_RANK"] for place in places] == ["0", "0", "1", "1"]
    assert [place["GLOO_SOCKET_IFNAME"] for place in places] == [topology.interface(node) for node in range(4)]


def test_each_rank_runs_on_its_node_and_says_how_it_ended(network: Network) -> None:
    tell = 'readlink /proc/self/ns/net; echo "$RANK $WHO" >&2; exit "$RANK"'
    with start_ranks(network, ["sh", "-c", tell], ranks_per_node=2, environment={"WHO": "me"}) as ranks:
        ended = ranks.wait(timeout_s=END_S)
    nodes = [os.readlink(f"/proc/{holder}/ns/net") + "\n" for holder in network.holders]
    assert ended == [Ended(rank, nodes[rank // 2], f"{rank} me\n") for rank in range(4)]


def test_each_rank_runs_under_its_quota(network: Network) -> None:
    if reason := quota.missing_reason():
        pytest.skip(reason)
    with (
        quota.open_quotas(2, share=0.5) as quotas,
        start_ranks(network, ["sh", "-c", "echo up; exec sleep infinity"], quotas=quotas) as ranks,
    ):
        for rank, each in enumerate(quotas):
            ranks.await_output(rank, "up", timeout_s=END_S)
            assert (each.group / "cgroup.procs").read_text().split() == [str(ranks.pid(rank))]


def test_a_rank_that_takes_too_long_is_killed(network: Network) -> None:
    with start_ranks(network, ["sleep", "infinity"]) as ranks:
        assert [ended.exit_code for ended in ranks.wait(timeout_s=0.05)] == [None, None]


def test_a_rank_is_stopped_continued_and_killed(network: Network) -> None:
    with start_ranks(network, ["sh", "-c", "echo up; exec sleep infinity"]) as ranks:
        ranks.await_output(0, "up", timeout_s=END_S)
        for number, expected in [(signal.SIGSTOP, os.CLD_STOPPED), (signal.SIGCONT, os.CLD_CONTINUED)]:
            ranks.send(0, number)
            told = os.waitid(os.P_PID, ranks.pid(0), os.WSTOPPED | os.WCONTINUED)
            assert told is not None
            assert told.si_code == expected
        ranks.send(0, signal.SIGKILL)
        ranks.send(1, signal.SIGKILL)
        assert [ended.exit_code for ended in ranks.wait(timeout_s=END_S)] == [-signal.SIGKILL] * 2


def test_a_rank_that_ends_without_what_is_awaited_says_why(network: Network) -> None:
    with (
        start_ranks(network, ["sh", "-c", "echo no disk >&2"]) as ranks,
        pytest.raises(TimeoutError, match=r"rank 1 has not written 'up': no disk"),
    ):
        ranks.await_output(1, "up", timeout_s=END_S)


def test_after_an_error_all_ranks_have_ended_with_what_they_started(network: Network, tmp_path: Path) -> None:
    start = f"sleep infinity & echo $! > {tmp_path}/$RANK; echo up; wait"
    with suppress(KeyError), start_ranks(network, ["sh", "-c", start]) as ranks:
        for rank in range(2):
            ranks.await_output(rank, "up", timeout_s=END_S)
        pidfds = [os.pidfd_open(int((tmp_path / str(rank)).read_text())) for rank in range(2)]
        pidfds += [os.pidfd_open(ranks.pid(rank)) for rank in range(2)]
        raise KeyError
    for pidfd in pidfds:
        assert select.select([pidfd], [], [], END_S)[0]
        os.close(pidfd)


@pytest.mark.soak  # test_namespaces.py has the rate of a link without torch, whose start takes 10 s
def test_ranks_of_torch_exchange_rows_over_the_link_and_lose_one(network: Network) -> None:
    (link,) = network.topology.links
    with start_ranks(network, [sys.executable, "-c", EXCHANGE], ranks_per_node=2) as ranks:
        for rank in range(4):
            ranks.await_output(rank, "]]", timeout_s=END_S)
        ranks.send(3, signal.SIGKILL)
        ended = ranks.wait(timeout_s=END_S)
    assert [each.exit_code for each in ended] == [0, 0, 0, -signal.SIGKILL], [each.errors for each in ended]
    assert [each.output.split()[-1] for each in ended[:3]] == ["lost"] * 3
    starts_s, ends_s, arrived = zip(*(json.loads(each.output.splitlines()[0]) for each in ended), strict=True)
    assert list(arrived) == [[0, 1, 2, 3]] * 4
    crossing_bytes = 4 * ROW_BYTES  # each rank of a node sends a row to each of the other node
    assert all(network.sent_bytes(node, link) >= crossing_bytes for node in range(2))
    assert max(ends_s) - min(starts_s) > 0.8 * crossing_bytes * 8 / (RATE_MBIT_S * 1e6)
