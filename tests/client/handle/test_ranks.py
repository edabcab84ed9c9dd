"""What a rank says when it opens a namespace, and how it names the start of its job."""

from __future__ import annotations

import pytest
import torch

import paramstore_client as ps
from paramstore.errors import WaitTimeout
from paramstore.wire import messages as m
from paramstore_client.handle.base import ANSWER_GRACE_S
from paramstore_client.handle.ranks import ALONE, RESTART_VARIABLE, RUN_VARIABLE, Rank, this_rank
from paramstore_testkit.wire.fake_daemon import FakeDaemon

SCHEMA = ps.adamw_schema({"w": (2, 3)})


@pytest.mark.parametrize(
    ("group", "environment", "expected"),
    [
        ("", {}, ""), ("mine", {RUN_VARIABLE: "run"}, "mine"), ("", {RUN_VARIABLE: "run"}, "run/0"),
        ("", {RUN_VARIABLE: "run", RESTART_VARIABLE: "3"}, "run/3"), ("", {RESTART_VARIABLE: "3"}, ""),
    ],
)  # fmt: skip
def test_a_group_is_what_the_caller_says_else_torchrun_s_run_and_restart(
    group: str, environment: dict[str, str], expected: str
) -> None:
    assert this_rank(1, 2, group, environment) == Rank(1, 2, expected)
    assert this_rank(0, 1, group, environment) == ALONE, "one rank is no group"


@pytest.mark.parametrize(("rank", "world_size"), [(1, 1), (-1, 1), (2, 2), (0, 0)])
def test_a_rank_that_cannot_be_is_refused(rank: int, world_size: int) -> None:
    with pytest.raises(ps.ConfigError, match=f"rank={rank}|world_size={world_size}: give"):
        this_rank(rank, world_size, "g", {})


def test_several_ranks_say_who_they_are_and_one_says_what_it_always_did(daemon: FakeDaemon, store: ps.Store) -> None:
    alone = store.create_namespace("moe", SCHEMA, layers=1, experts=4)
    ranked = store.open_namespace("moe", "write", 3, 1, 2, "job/0", host_bytes="1MiB")
    reader = store.open_namespace("moe", rank=1, world_size=2, group="job/0")
    created = store.create_namespace("other", SCHEMA, layers=1, experts=4, rank=2, world_size=3, group="job/1")
    (create,) = [request for request in daemon.requests(m.CreateNamespace) if type(request) is m.CreateNamespace]
    (open_rank,), (create_rank,) = daemon.requests(m.OpenRank), daemon.requests(m.CreateRank)
    assert create.name == "moe"
    assert (open_rank.mode, open_rank.at, open_rank.host_bytes) == ("write", 3, 1 << 20)
    assert (open_rank.rank, open_rank.world_size, open_rank.group) == (1, 2, "job/0")
    assert (create_rank.rank, create_rank.world_size, create_rank.group) == (2, 3, "job/1")
    found = [(namespace.rank, namespace.world_size) for namespace in (alone, ranked, reader, created)]
    assert found == [(0, 1), (1, 2), (0, 1), (2, 3)]


def test_a_rank_gives_its_share_of_the_initial_values(store: ps.Store) -> None:
    namespace = store.create_namespace("moe", SCHEMA, layers=2, experts=4, rank=1, world_size=3, group="g")
    asked: list[tuple[int, int]] = []

    def value(key: tuple[int, int]) -> dict[str, torch.Tensor]:
        asked.append(key)
        return {"w": torch.zeros(2, 3)}

    namespace.initialize(value)
    assert asked == [(0, 1), (1, 0), (1, 3)]


def test_a_daemon_that_knows_no_ranks_is_not_asked(daemon: FakeDaemon) -> None:
    daemon.minor = m.TRAINING_MINOR - 1
    with ps.connect(daemon.path) as store:
        with pytest.raises(ps.VersionMismatch, match="of several ranks"):
            store.create_namespace("moe", SCHEMA, layers=1, experts=4, world_size=2)
        assert daemon.requests(m.CreateRank) == []


def test_a_rank_waits_a_little_longer_than_the_daemon_does_which_names_the_missing(daemon: FakeDaemon, store: ps.Store) -> None:
    ranked = store.create_namespace("moe", SCHEMA, layers=1, experts=4, world_size=2, group="g")
    alone = store.create_namespace("other", SCHEMA, layers=1, experts=4)
    waits = [namespace.apply(ps.AdamW(lr=0.1)) for namespace in (ranked, alone)]
    assert [ticket.timeout_s for ticket in waits] == [daemon.wait_timeout_s + ANSWER_GRACE_S, daemon.wait_timeout_s]
    for ticket in waits:
        ticket.wait()


def test_a_rank_that_gives_an_opening_up_says_so(daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    with ps.connect(daemon.path) as store:
        store.create_namespace("moe", SCHEMA, layers=1, experts=4)
        daemon.hold(m.OpenRank)
        monkeypatch.setattr(store._connection, "timeout_s", -ANSWER_GRACE_S)
        with pytest.raises(WaitTimeout):
            store.open_namespace("moe", "write", world_size=2, group="g")
        (cancelled,) = daemon.wait_for(m.Cancel)
        (asked,) = daemon.requests(m.OpenRank)
        assert cancelled.target == asked.id
