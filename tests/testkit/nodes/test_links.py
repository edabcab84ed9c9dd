"""In every topology each node has an address of its own and one link to each other node."""

from __future__ import annotations

from itertools import combinations

import pytest

from paramstore_testkit.nodes.links import Topology, rails, shared_link

TOPOLOGIES = [shared_link(200), rails(100, spine_rate_mbit_s=25)]


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_every_two_nodes_are_joined_by_one_link(topology: Topology) -> None:
    nodes = range(len(topology.machines))
    assert sorted(link.ends for link in topology.links) == list(combinations(nodes, 2))
    for node in nodes:
        assert {link.other_end(node) for link in topology.links_of(node)} == {*nodes} - {node}


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_addresses_and_interfaces_are_distinct(topology: Topology) -> None:
    nodes = range(len(topology.machines))
    assert len({topology.address(node) for node in nodes}) == len(nodes)
    names = [link.interface for link in topology.links]
    assert len({*names}) == len(names)
    assert max(map(len, names)) <= 15  # what the kernel takes
    assert all(topology.interface(node) in {link.interface for link in topology.links_of(node)} for node in nodes)


def test_rails_join_devices_of_one_number_and_the_spine_the_others() -> None:
    rates = {link.ends: link.rate_mbit_s for link in rails(100, spine_rate_mbit_s=25).links}
    assert rates == {(0, 1): None, (2, 3): None, (0, 2): 100, (1, 3): 100, (0, 3): 25, (1, 2): 25}
