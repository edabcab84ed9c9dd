"""Which exchange a word of the user opens, by where the ranks stand."""

from __future__ import annotations

import datetime
import threading
from typing import Any

import pytest
import torch.distributed as dist

from paramstore.errors import ConfigError, StepMismatch
from paramstore_client.moe.hops.nodes import Nodes
from paramstore_client.moe.hops.opening import meet_nodes, opened

SECOND = datetime.timedelta(seconds=1)


@pytest.mark.parametrize(
    ("way", "stand", "why"),
    [
        ("flat", "aabb", "as told"),
        ("auto", "aa", "all ranks are on one node"),
        ("auto", "aab", "unequal numbers of ranks: 0,1 | 2"),
    ],
)
def test_the_flat_exchange_stays_where_nothing_else_can_win(way: str, stand: str, why: str) -> None:
    flat: Any = object()
    exchange, choice = opened(way, flat, Nodes.named(stand))
    assert exchange is flat
    assert choice is not None
    assert choice.ways == ()
    assert why in choice.why


@pytest.mark.parametrize("way", ["two_hops", "row_per_node"])
def test_what_is_asked_for_is_opened_unmeasured(way: str) -> None:
    flat: Any = object()
    exchange, choice = opened(way, flat, Nodes.named("aabb"))
    assert exchange is not flat
    assert choice is not None
    assert choice.ways == (way,)


def test_several_nodes_are_measured_at_the_first_rows() -> None:
    flat: Any = object()
    exchange, choice = opened("auto", flat, Nodes.named("aabb"))
    assert exchange is not flat
    assert choice is None


@pytest.mark.parametrize("way", ["two_hops", "row_per_node"])
def test_nodes_of_unequal_size_are_refused_where_hops_are_asked_for(way: str) -> None:
    with pytest.raises(ConfigError, match=rf"exchange='{way}'.*0,1 \| 2.*'auto' or 'flat'"):
        opened(way, object(), Nodes.named("aab"))  # type: ignore[arg-type]  # nothing is sent


def _met(monkeypatch: pytest.MonkeyPatch, stand: str, ways: list[str]) -> list[Nodes | StepMismatch]:
    """What ranks learn, each a thread whose name begins with that of its node."""
    store, found = dist.HashStore(), list[Nodes | StepMismatch]()  # type: ignore[attr-defined]  # torch's stubs lack it
    monkeypatch.setattr("paramstore_client.moe.hops.opening.this_node", lambda: threading.current_thread().name[0])

    def meet(rank: int) -> None:
        try:
            found.append(meet_nodes(store, ways[rank], rank=rank, world_size=len(stand), limit=SECOND))
        except StepMismatch as error:
            found.append(error)

    threads = [threading.Thread(target=meet, args=(rank,), name=f"{node}{rank}") for rank, node in enumerate(stand)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    return found


def test_all_ranks_learn_which_of_them_share_a_node(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _met(monkeypatch, "abba", ["auto"] * 4) == [Nodes(((0, 3), (1, 2)))] * 4


def test_ranks_that_ask_for_different_exchanges_are_named_before_a_row_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    said = {str(error) for error in _met(monkeypatch, "aab", ["auto", "flat", "auto"])}
    assert said == {"expert-parallel ranks differ in exchange: auto on ranks 0, 2; flat on rank 1"}


def test_a_rank_that_does_not_come_is_waited_for_no_longer_than_said() -> None:
    store = dist.HashStore()  # type: ignore[attr-defined]  # torch's stubs lack it
    with pytest.raises(dist.DistStoreError):
        meet_nodes(store, "auto", rank=0, world_size=2, limit=datetime.timedelta(seconds=0.05))
