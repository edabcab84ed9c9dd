"""Nodes are told apart by what the launcher says, else by the host; ranks of one need not follow each other."""

from __future__ import annotations

import pytest

from paramstore_client.moe.hops.nodes import Nodes, this_node


def test_ranks_of_a_node_need_not_follow_each_other() -> None:
    nodes = Nodes.named("abba")
    assert nodes.ranks == ((0, 3), (1, 2))
    assert [nodes.place(rank) for rank in range(4)] == [(0, 0), (1, 0), (1, 1), (0, 1)]
    assert nodes.peers(1) == [2, 3]
    assert str(nodes) == "0,3 | 1,2"


def test_nodes_are_alike_where_they_have_as_many_ranks() -> None:
    assert Nodes.named("aabb").are_alike
    assert not Nodes.named("aab").are_alike


def test_a_node_is_told_by_the_launcher_and_else_by_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GROUP_RANK", raising=False)
    monkeypatch.setattr("socket.gethostname", lambda: "one")
    of_host = this_node()
    monkeypatch.setattr("socket.gethostname", lambda: "other")
    assert this_node() != of_host
    monkeypatch.setenv("GROUP_RANK", "0")
    launched = this_node()
    monkeypatch.setattr("socket.gethostname", lambda: "one")
    assert this_node() == launched
    assert 0 <= launched < 2**63
