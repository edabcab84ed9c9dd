"""Ranks, each with a session of its own: what a rank asks for behind a collective call, and what becomes of it when one goes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from paramstore.core.schema import Schema
from paramstore.daemon.handlers import COLLECTIVE, OPENING, ORDERED, call_of
from paramstore.engine.capacity.upload_budget import UploadBudget
from paramstore.engine.tables.collective import Argument, Call
from paramstore.errors import (
    ConfigError,
    LeaseError,
    ParamStoreError,
    ProtocolError,
    RankLost,
    StepFailed,
    StepMismatch,
    TicketCancelled,
    WaitTimeout,
)
from paramstore.wire import messages as m
from paramstore_testkit.wire.raw_client import RawClient

AtDesk = Callable[..., None]
ADAMW = (1e-3, 0.9, 0.999, 1e-8, 0.01, 1.0)
KEYS = [(0, 0), (0, 1)]
GRADIENT_BYTES = 4096


class Rank:
    """One rank: its client, its handle, and an upload segment of zeros."""

    def __init__(self, client: RawClient, handle: int, segment: int) -> None:
        self.client = client
        self.handle = handle
        self.segment = segment

    async def send(self, make: Callable[..., Any], *arguments: Any) -> int:
        """Sends a request on the handle and gives its id."""
        message = make(self.client.next_id(), self.handle, *arguments)
        await self.client.send(message)
        return int(message.id)

    async def ask(self, make: Callable[..., Any], *arguments: Any) -> Any:
        return await self.client.result(await self.send(make, *arguments))

    async def send_push(self, key: m.Key, *, place: int = 0) -> int:
        return await self.send(m.Push, [(*key, self.segment, place * GRADIENT_BYTES)])

    async def failure(self, request_id: int) -> ParamStoreError:
        with pytest.raises(ParamStoreError) as raised:
            await self.client.result(request_id)
        return raised.value


async def open_ranks(desk: Any, size: int = 2, *, group: str = "g") -> list[Rank]:
    clients = [await desk.client() for _ in range(size)]
    asked = []
    for rank, client in enumerate(clients):
        message = m.OpenRank(client.next_id(), "moe", "write", None, None, rank, size, group)
        await client.send(message)
        asked.append(message.id)
    handles = [(await client.result(asked_id))["handle"] for client, asked_id in zip(clients, asked, strict=True)]
    return [Rank(client, handle, await desk.upload(client, 16 * 4096)) for client, handle in zip(clients, handles, strict=True)]


async def prepared(desk: Any) -> None:
    """A committed namespace that nobody has open."""
    client = await desk.client()
    await client.request(m.CloseNamespace, await desk.create(client))
    client.close()


async def together(ranks: list[Rank], make: Callable[..., Any], *arguments: Any) -> list[Any]:
    asked = [await rank.send(make, *arguments) for rank in ranks]
    return [await rank.client.result(number) for rank, number in zip(ranks, asked, strict=True)]


def versions(granted: m.Granted) -> list[int]:
    return [slot[3] for slot in granted.slots]


# --- the table


def test_every_collective_message_is_ordered_and_compared_without_what_is_a_rank_s_own() -> None:
    assert COLLECTIVE.keys() - OPENING < ORDERED
    assert not OPENING & ORDERED
    assert m.InitializeSave in ORDERED, "a draft that a rank saves has what it put and called before"
    assert call_of(m.Commit(7, 3, 5, b"x")) == Call("commit", (Argument("step", 5), Argument("extra", b"x")))
    names = [argument.name for argument in call_of(m.OpenRank(1, "moe", "write", 4, None, 1, 2, "g")).arguments]
    assert names == ["name", "mode", "at", "host_bytes", "world_size", "group", "min_lease_slots"]
    first, second = (call_of(m.Apply(number, number, *ADAMW, {"kind": "sgd", "momentum": number * 0.0})) for number in (1, -1))
    assert first.shown(["options"]) == "apply(options={'kind': 'sgd', 'momentum': 0.0})"
    assert not first.matches(second), "0.0 and -0.0, wherever they are"


# --- opening


def test_ranks_create_initialize_and_train_a_namespace_together(at_desk: AtDesk) -> None:
    async def scenario(desk: Any) -> None:
        schema = Schema.adamw({"w": (16, 16)}, param_dtype="float32")
        clients = [await desk.client() for _ in range(2)]
        asked = []
        for rank, client in enumerate(clients):
            message = m.CreateRank(client.next_id(), "moe", schema.describe(), [0], 4, None, rank, 2, "g")
            await client.send(message)
            asked.append(message.id)
        handles = [(await client.result(number))["handle"] for client, number in zip(clients, asked, strict=True)]
        ranks = [Rank(client, handle, await desk.upload(client, 1 << 16)) for client, handle in zip(clients, handles, strict=True)]
        await together(ranks, m.InitializeBegin)
        for number in range(4):
            await ranks[number % 2].ask(m.InitializePut, (0, number), ranks[number % 2].segment, 0)
        await together(ranks, m.InitializeEnd)
        first, second = await together(ranks, m.Commit, 1)
        assert first == second
        assert first["records"] == 4
        for rank in ranks:
            await rank.client.result(await rank.send_push((0, 0)))
        assert [found["records"] for found in await together(ranks, m.Apply, *ADAMW)] == [1, 1]

    at_desk(scenario)


def test_a_rank_that_leaves_while_its_group_forms_may_come_back(at_desk: AtDesk) -> None:
    async def scenario(desk: Any) -> None:
        await prepared(desk)
        gone = await desk.client()
        await gone.send(m.OpenRank(gone.next_id(), "moe", "write", None, None, 0, 2, "g"))
        await desk.until(lambda: desk.store.ranks._forming)
        gone.close()
        await desk.until(lambda: not desk.store.ranks._forming)
        assert len(await open_ranks(desk)) == 2

    at_desk(scenario)


def test_an_opening_that_waits_for_ranks_can_be_cancelled(at_desk: AtDesk) -> None:
    async def scenario(desk: Any) -> None:
        await prepared(desk)
        client = await desk.client()
        message = m.OpenRank(client.next_id(), "moe", "write", None, None, 0, 2, "g")
        await client.send(message)
        await client.send(m.Cancel(message.id))
        with pytest.raises(TicketCancelled, match="rank 0 of group 'g' on namespace 'moe'"):
            await client.result(message.id)
        assert len(await open_ranks(desk)) == 2

    at_desk(scenario)


def test_a_rank_that_reads_or_cannot_be_is_refused_and_a_single_one_opens_alone(at_desk: AtDesk) -> None:
    async def scenario(desk: Any) -> None:
        await prepared(desk)
        client = await desk.client()
        with pytest.raises(ConfigError, match="readers open it one by one"):
            await client.request(m.OpenRank, "moe", "read", None, None, 0, 2, "g")
        for rank, size in ((2, 2), (1, 1), (0, 0)):
            with pytest.raises(ConfigError, match=f"rank={rank}, world_size={size}"):
                await client.request(m.OpenRank, "moe", "write", None, None, rank, size, "g")
        handle = (await client.request(m.OpenRank, "moe", "write", None, None, 0, 1, "g"))["handle"]
        assert await client.request(m.GradientNorm, handle) == 0.0

    at_desk(scenario)


def test_an_opened_view_whose_session_has_ended_meanwhile_is_lost_to_the_others(at_desk: AtDesk) -> None:
    async def scenario(desk: Any) -> None:
        await prepared(desk)
        one, two = await desk.client(), await desk.client()
        first = m.OpenRank(one.next_id(), "moe", "write", None, None, 0, 2, "g")
        second = m.OpenRank(two.next_id(), "moe", "write", None, None, 1, 2, "g")
        await one.send(first)
        await desk.until(lambda: desk.store.ranks._forming)
        await two.send(second)
        await desk.until(lambda: not desk.store.ranks._forming)
        two.close()
        handle = (await one.result(first.id))["handle"]
        await desk.until(lambda: desk.figures()["ranks"]["open"] == [0])
        with pytest.raises(RankLost):
            await one.request(m.GradientNorm, handle)

    at_desk(scenario)


def test_each_rank_may_push_all_experts_at_the_gradient_dtype(at_desk: AtDesk) -> None:
    async def scenario(desk: Any) -> None:
        await prepared(desk)
        ranks = await open_ranks(desk, 3)
        for rank in ranks:
            await desk.push(rank.client, rank.handle, [(0, expert) for expert in range(4)])
        assert desk.figures()["pending_gradients"] == 4
        assert all(len(pending) == 3 for pending in desk.store.namespaces["moe"].writing.pending.values())

    at_desk(scenario)


# --- order


def test_what_a_rank_sends_behind_its_apply_takes_effect_after_it(at_desk: AtDesk) -> None:
    async def scenario(desk: Any) -> None:
        await prepared(desk)
        one, two = await open_ranks(desk)
        await one.client.result(await one.send_push(KEYS[0]))
        applied = await one.send(m.Apply, *ADAMW)
        pushed = await one.send_push(KEYS[0], place=1)
        leased = await one.send(m.Acquire, KEYS, "param", 5.0)
        read = await one.send(m.Read, KEYS[0], one.segment, 8192)
        prefetched = await one.send(m.Prefetch, KEYS, "param", None)
        again = await one.send(m.Apply, *ADAMW)
        await desk.until(lambda: len(desk.sessions[-2]._held.by_id) == 5)
        assert desk.figures()["ranks"] == {"group": "g", "world_size": 2, "open": [0, 1], "waiting": [0]}
        assert await one.client.request(m.Steps, one.handle) == [1], "what has no order is answered"
        await two.client.result(await two.send_push(KEYS[1]))
        assert (await two.ask(m.Apply, *ADAMW))["records"] == 2
        assert (await one.client.result(applied))["records"] == 2
        assert await one.client.result(pushed) is None
        assert versions(await one.client.result(leased)) == [1, 1]
        assert (await one.client.result(read))["version"] == 1
        assert (await one.client.result(prefetched))["skipped"] == 0
        assert (await two.ask(m.Apply, *ADAMW))["records"] == 1, "the push behind the first apply belongs to the second"
        assert (await one.client.result(again))["records"] == 1

    at_desk(scenario)


def test_thousands_of_calls_of_a_rank_that_is_ahead_run_when_the_other_comes(at_desk: AtDesk) -> None:
    async def scenario(desk: Any) -> None:
        await prepared(desk)
        one, two = await open_ranks(desk)
        ahead = [await one.send(m.GradientNorm) for _ in range(3000)]
        behind = [await two.send(m.GradientNorm) for _ in range(3000)]
        assert await one.client.result(ahead[-1]) == 0.0
        assert await two.client.result(behind[-1]) == 0.0

    at_desk(scenario)


def test_a_lease_behind_a_call_is_bounded_by_its_own_timeout(at_desk: AtDesk) -> None:
    async def scenario(desk: Any) -> None:
        await prepared(desk)
        one, two = await open_ranks(desk)
        applied = await one.send(m.Apply, *ADAMW)
        late = await one.send(m.Acquire, KEYS, "param", 0.01)
        patient = await one.send(m.Acquire, KEYS, "param", 5.0)
        error = await one.failure(late)
        assert isinstance(error, WaitTimeout)
        assert "lease of 2 keys of 'moe': it waits for rank 0's own call before it, and that for rank 1" in str(error)
        await two.ask(m.Apply, *ADAMW)
        await one.client.result(applied)
        assert versions(await one.client.result(patient)) == [0, 0]

    at_desk(scenario)


def test_what_is_held_can_be_cancelled_and_its_number_is_in_use(at_desk: AtDesk) -> None:
    async def scenario(desk: Any) -> None:
        await prepared(desk)
        one, two = await open_ranks(desk)
        applied = await one.send(m.Apply, *ADAMW)
        leased = await one.send(m.Acquire, KEYS, "param", 5.0)
        prefetched = await one.send(m.Prefetch, KEYS, "param", None)
        pushed = await one.send_push(KEYS[0])
        await one.client.send(m.Release([leased]))  # it is not granted: nothing happens
        for number in (leased, prefetched, pushed):
            await one.client.send(m.Cancel(number))
        assert isinstance(await one.failure(leased), TicketCancelled)
        assert isinstance(await one.failure(prefetched), TicketCancelled)
        await one.client.send(m.Steps(pushed, one.handle))
        assert isinstance(await one.failure(pushed), ProtocolError)  # of the second; the push goes on
        await two.ask(m.Apply, *ADAMW)
        await one.client.result(applied)
        assert await one.client.result(pushed) is None
        assert desk.figures()["leased_slots"] == 0

    at_desk(scenario)


# --- refusals


def test_a_mismatch_is_told_to_all_and_what_was_sent_behind_it_is_refused_too(at_desk: AtDesk) -> None:
    async def scenario(desk: Any) -> None:
        await prepared(desk)
        one, two = await open_ranks(desk)
        await one.client.result(await one.send_push(KEYS[0]))
        mine = [await one.send(m.Apply, *ADAMW), await one.send(m.Commit, 2, b""), await one.send_push(KEYS[0], place=1)]
        theirs = [await two.send(m.Apply, 2e-3, *ADAMW[1:]), await two.send(m.Commit, 2, b"")]
        for rank, asked in ((one, mine), (two, theirs)):
            for number in asked:
                error = await rank.failure(number)
                assert isinstance(error, StepMismatch)
                assert "rank 0 called apply(lr=0.001), rank 1 called apply(lr=0.002)" in str(error)
        assert await one.client.request(m.Steps, one.handle) == [1], "a step without its apply is never committed"
        await together([one, two], m.Rollback, 1)
        assert (await together([one, two], m.Apply, *ADAMW))[0]["records"] == 0

    at_desk(scenario)


def test_options_that_are_refused_are_refused_for_every_rank(at_desk: AtDesk) -> None:
    async def scenario(desk: Any) -> None:
        await prepared(desk)
        ranks = await open_ranks(desk)
        asked = [await rank.send(m.Apply, -1.0, *ADAMW[1:]) for rank in ranks]
        assert {type(await rank.failure(number)) for rank, number in zip(ranks, asked, strict=True)} == {ConfigError}
        assert await together(ranks, m.GradientNorm) == [0.0, 0.0]

    at_desk(scenario)


# --- ends


def test_when_a_rank_s_connection_ends_the_others_hear_of_it_at_once_and_go_on_reading(at_desk: AtDesk) -> None:
    async def scenario(desk: Any) -> None:
        await prepared(desk)
        one, two, three = await open_ranks(desk, 3)
        granted = await one.ask(m.Acquire, KEYS[:1], "param", 5.0)
        await two.client.result(await two.send_push(KEYS[0]))
        waiting = [await rank.send(m.Apply, *ADAMW) for rank in (one, two)]
        behind = await one.send(m.Acquire, KEYS[:1], "param", 5.0)
        await desk.until(lambda: desk.figures()["ranks"]["waiting"] == [0, 1])
        three.client.close()
        for rank, number in zip((one, two), waiting, strict=True):
            error = await rank.failure(number)
            assert isinstance(error, RankLost)
            assert "rank 2 is gone: the session of its process (pid " in str(error)
        assert versions(await one.client.result(behind)) == versions(granted) == [0]
        with pytest.raises(RankLost):
            await two.client.result(await two.send_push(KEYS[1]))
        assert desk.figures()["pending_gradients"] == 0
        again = await open_ranks(desk, 3, group="next")
        assert await together(again, m.GradientNorm) == [0.0] * 3

    at_desk(scenario)


def test_a_lease_that_was_held_for_a_session_that_ended_is_never_granted(at_desk: AtDesk) -> None:
    async def scenario(desk: Any) -> None:
        await prepared(desk)
        one, two = await open_ranks(desk)
        granted = await one.ask(m.Acquire, KEYS[:1], "param", 5.0)
        await one.send(m.Apply, *ADAMW)
        await one.send(m.Acquire, KEYS[1:], "param", 5.0)
        gone = desk.sessions[-2]
        await desk.until(lambda: len(gone._held.by_id) == 1)
        one.client.close()  # its process lives, and may read what it has leased
        await desk.until(lambda: gone.is_ended and not gone._tasks)
        with pytest.raises(RankLost):
            await two.ask(m.GradientNorm)
        assert (desk.figures()["leased_slots"], gone._leases.granted.keys(), len(gone._held.by_id)) == (1, {granted.id}, 0)

    at_desk(scenario)


def test_a_rank_that_closes_its_handle_answers_what_it_still_held(at_desk: AtDesk) -> None:
    async def scenario(desk: Any) -> None:
        await prepared(desk)
        one, two = await open_ranks(desk)
        asked = [await one.send(m.Apply, *ADAMW), await one.send_push(KEYS[0]), await one.send(m.Acquire, KEYS, "param", 5.0)]
        await one.ask(m.CloseNamespace)
        assert [type(await one.failure(number)) for number in asked] == [RankLost, LeaseError, LeaseError]
        with pytest.raises(RankLost, match="rank 0 closed the namespace"):
            await two.ask(m.GradientNorm)

    at_desk(scenario)


@pytest.mark.parametrize("is_held", [False, True])
def test_a_session_that_ends_with_calls_under_way_leaves_nothing(is_held: bool, at_desk: AtDesk) -> None:
    async def scenario(desk: Any) -> None:
        await prepared(desk)
        one, two = await open_ranks(desk)
        await one.client.result(await one.send_push(KEYS[0]))
        await one.send(m.Apply, *ADAMW)
        if is_held:
            for _ in range(3):
                await one.send(m.Acquire, KEYS, "param", 5.0)
        else:
            await two.send(m.Apply, *ADAMW)
        gone = desk.sessions[-2]
        one.client.close()
        await desk.until(lambda: gone in desk.gone and not gone._tasks)
        assert len(gone._held.by_id) == 0
        assert desk.store.uploads.bytes_of(gone) == 0
        with pytest.raises(RankLost):
            await two.ask(m.GradientNorm)
        assert len(await open_ranks(desk)) == 2

    at_desk(scenario)


# --- room for gradients


def test_a_rank_that_waits_for_room_gets_it_when_the_other_ends_the_layer_and_hears_of_its_end(at_desk: AtDesk) -> None:
    async def scenario(desk: Any) -> None:
        await prepared(desk)
        one, two = await open_ranks(desk)
        begun = [await rank.send(m.BeginApply, *ADAMW) for rank in (one, two)]
        for number, key in enumerate(KEYS):
            await one.ask(m.Push, [(*key, one.segment, number * GRADIENT_BYTES)], True)
        assert await one.ask(m.AwaitRoom, KEYS, 0.0) == []
        waits = await one.send(m.AwaitRoom, KEYS[:1], 30.0)
        await two.ask(m.Push, [(*KEYS[0], two.segment, 0)], True)
        assert await one.client.result(waits) == [list(KEYS[0])]
        waits = await one.send(m.AwaitRoom, KEYS[1:], 30.0)
        await two.ask(m.EndLayers, [0])
        assert await one.client.result(waits) == [list(KEYS[1])]
        await one.ask(m.Push, [(0, 2, one.segment, 0)], True)
        waits = await one.send(m.AwaitRoom, [(0, 3)], 30.0)
        two.client.close()
        assert isinstance(await one.failure(waits), RankLost)
        assert isinstance(await one.failure(begun[0]), StepFailed)

    at_desk(scenario)


def test_a_rank_is_told_its_share_of_the_gradient_budget_and_a_reader_of_none(at_desk: AtDesk) -> None:
    async def scenario(desk: Any) -> None:
        await prepared(desk)
        desk.store.uploads = UploadBudget(desk.store.host, budget_bytes=8 << 20)
        clients = [await desk.client() for _ in range(3)]
        asked = [m.OpenRank(client.next_id(), "moe", "write", None, None, rank, 3, "g") for rank, client in enumerate(clients)]
        for client, message in zip(clients, asked, strict=True):
            await client.send(message)
        opened = [await client.result(message.id) for client, message in zip(clients, asked, strict=True)]
        assert [each["gradient_share_bytes"] for each in opened] == [(8 << 20) // 3] * 3
        reader = await (await desk.client()).request(m.OpenNamespace, "moe", "read", None, None)
        assert reader["gradient_share_bytes"] is None

    at_desk(scenario)
