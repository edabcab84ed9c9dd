"""Rows in two hops over real groups: those of the flat exchange, in its order, and who is gone is named as there."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from contextlib import suppress

import pytest
import torch
from torch import Tensor

from paramstore.errors import ParamStoreError, RankLost, StepMismatch
from paramstore_client.moe.exchange import FlatExchange
from paramstore_client.moe.hops.choice import ExchangeChoice
from paramstore_client.moe.hops.nodes import Nodes
from paramstore_client.moe.hops.two_hops import TwoHopExchange, row_bytes
from paramstore_testkit.training.thread_ranks import of_all, run_ranks

NODES = {"2 x 2": "aabb", "2 x 3": "aaabbb", "3 x 2": "aabbcc", "mixed up": "abba", "one": "aa"}
DTYPES = (torch.float32, torch.bfloat16, torch.int32, torch.uint8)


def hopping(flat: FlatExchange, stand: str) -> TwoHopExchange:
    nodes = Nodes.named(stand)
    return TwoHopExchange(flat, nodes, lambda _: ExchangeChoice(("two_hops",), "told", nodes))


def drawn_counts(size: int, seed: int) -> list[list[int]]:
    """Rows from each rank to each: few, many, none; of one rank none at all, and in one draw of three one rank gets all."""
    drawn = random.Random(seed)
    counts = [[drawn.choice((0, 0, 1, 2, 7)) for _ in range(size)] for _ in range(size)]
    counts[drawn.randrange(size)] = [0] * size
    if seed % 3 == 0:
        counts = [[sum(row) if to == size - 1 else 0 for to in range(size)] for row in counts]
    return counts


def rows_of(rank: int, counts: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.randint(100, (sum(counts), 3), generator=torch.Generator().manual_seed(rank)).to(dtype)


@pytest.mark.parametrize("stand", NODES.values(), ids=NODES)
def test_rows_are_those_of_the_flat_exchange_in_its_order(stand: str) -> None:
    def rank(flat: FlatExchange) -> None:
        exchange = hopping(flat, stand)
        for seed, dtype in enumerate(DTYPES):
            counts = drawn_counts(len(stand), seed)
            to_each, from_each = counts[flat.rank], [row[flat.rank] for row in counts]
            sent = rows_of(flat.rank, to_each, dtype)
            wanted = flat.rows(sent, to_each=to_each, from_each=from_each)
            got = exchange.rows(sent, to_each=to_each, from_each=from_each)
            assert got.dtype == dtype
            assert torch.equal(got, wanted), f"seed {seed}"

    of_all(run_ranks(len(stand), rank))


def test_several_calls_are_under_way_and_messages_beside_them() -> None:
    def rank(flat: FlatExchange) -> list[int]:
        exchange = hopping(flat, "aabb")
        under_way = [
            exchange.start_rows(torch.full((4, 2), 10 * number + flat.rank), to_each=[1] * 4, from_each=[1] * 4)
            for number in range(5)
        ]  # fmt: skip
        assert exchange.alike(torch.full((4, 1), flat.rank)).flatten().tolist() == [0, 1, 2, 3]
        return [int(row) for arriving in under_way for row in arriving.wait()[:, 0]]

    wanted = [10 * number + other for number in range(5) for other in range(4)]
    assert of_all(run_ranks(4, rank)) == [wanted] * 4


def test_a_call_that_is_too_small_goes_in_one_hop_on_all_ranks() -> None:
    """What counts is the rank that sends most."""

    class Large(ExchangeChoice):
        def hops(self, sent_bytes: int) -> bool:
            return sent_bytes > 100

    def rank(flat: FlatExchange) -> list[int]:
        nodes = Nodes.named("aabb")
        exchange = TwoHopExchange(flat, nodes, lambda _: Large(("two_hops",), "told", nodes))
        sent_bytes = []
        for most in (1, 30):
            counts = [[most if one == 2 else 1 for _ in range(4)] for one in range(4)]
            before_bytes = flat.sent_bytes
            exchange.rows(torch.zeros(sum(counts[flat.rank]), 4), to_each=counts[flat.rank], from_each=[1, 1, most, 1])
            sent_bytes.append(flat.sent_bytes - before_bytes)
        return sent_bytes

    told_bytes = 3 * 3 * 8  # to each of three others: bytes of a rank, and rows for two nodes
    for number, (small, large) in enumerate(of_all(run_ranks(4, rank))):
        rows, mates_rows = (30 if each == 2 else 1 for each in (number, number ^ 1))
        assert small == told_bytes + 3 * 16
        assert large == told_bytes + (3 * rows + mates_rows) * 16, "rows of a rank's mate are sent on by it"


def test_the_choice_is_made_once_on_the_device_of_the_first_rows() -> None:
    asked = []

    def rank(flat: FlatExchange) -> None:
        def choose(device: torch.device) -> ExchangeChoice:
            asked.append(device)
            return ExchangeChoice((), "flat", Nodes.named("ab"))

        exchange = TwoHopExchange(flat, Nodes.named("ab"), choose)
        assert exchange.chosen is None
        for _ in range(2):
            exchange.rows(torch.zeros(2, 1), to_each=[1, 1], from_each=[1, 1])
        assert exchange.chosen is not None

    of_all(run_ranks(2, rank))
    assert asked == [torch.device("cpu")] * 2


@pytest.mark.parametrize("calls", [0, 1])
def test_a_rank_that_has_left_is_named_by_all(calls: int) -> None:
    def rank(flat: FlatExchange) -> str:
        exchange = hopping(flat, "aabb")
        for _ in range(calls):
            exchange.rows(torch.zeros(4, 2), to_each=[1] * 4, from_each=[1] * 4)
        if flat.rank == 0:
            return ""
        with pytest.raises(RankLost) as raised:
            exchange.rows(torch.zeros(4, 2), to_each=[1] * 4, from_each=[1] * 4)
        with pytest.raises(RankLost) as again:
            exchange.rows(torch.zeros(4, 2), to_each=[1] * 4, from_each=[1] * 4)
        assert str(again.value) == str(raised.value)
        return str(raised.value)

    for said in of_all(run_ranks(4, rank))[1:]:
        assert said.startswith("expert-parallel ranks: rank 0 left an exchange")


def test_a_rank_that_stops_between_the_hops_is_named_in_time() -> None:
    given_up = threading.Semaphore(0)

    def stand_still() -> Tensor:
        assert all(given_up.acquire(timeout=20.0) for _ in range(3))
        return torch.empty(0)

    def rank(flat: FlatExchange) -> str:
        exchange = hopping(flat, "aabb")
        if flat.rank == 3:
            exchange.in_turn(stand_still)
        arriving = exchange.start_rows(torch.zeros(4, 2), to_each=[1] * 4, from_each=[1] * 4)
        if flat.rank == 3:
            with suppress(ParamStoreError):  # the others may have sent all of theirs
                arriving.wait()
            return ""
        with pytest.raises((StepMismatch, RankLost)) as raised:
            arriving.wait()
        with pytest.raises((StepMismatch, RankLost)):
            exchange.alike(torch.zeros(4, 1))
        given_up.release()
        return str(raised.value)

    said = of_all(run_ranks(4, rank, timeout_s=0.5))
    assert any("rank 3 did not come to an exchange within 0.5 s" in text for text in said[:3])


def test_an_exchange_that_was_left_refuses_rows() -> None:
    def rank(flat: FlatExchange) -> None:
        exchange = hopping(flat, "ab")
        exchange.leave(StepMismatch("out of step"))
        with pytest.raises(StepMismatch, match="out of step"):
            exchange.rows(torch.zeros(2, 1), to_each=[1, 1], from_each=[1, 1])
        with pytest.raises(StepMismatch, match="out of step"):
            exchange.alike(torch.zeros(2, 1))

    of_all(run_ranks(2, rank))


def test_bytes_of_a_row_are_known_where_there_is_none() -> None:
    assert row_bytes(torch.zeros(0, 3, 5, dtype=torch.bfloat16)) == 30
    assert row_bytes(torch.zeros(0, dtype=torch.uint8)) == 1


def test_what_fails_between_the_hops_of_one_rank_ends_the_exchange_before_the_next_call_sends() -> None:
    """A backend ends the process where rows meet others of another length."""

    def rank(flat: FlatExchange) -> str:
        exchange = hopping(flat, "aa")
        rows, called = flat.rows, [0]

        def failing(sent: Tensor, *, to_each: Sequence[int], from_each: Sequence[int]) -> Tensor:
            called[0] += 1
            if flat.rank == 0 and called[0] == 2:
                raise MemoryError("of the host")
            return rows(sent, to_each=to_each, from_each=from_each)

        flat.rows = failing  # type: ignore[method-assign]
        sent = torch.ones(100, 4)
        under_way = [exchange.start_rows(sent, to_each=[50, 50], from_each=[50, 50]) for _ in range(2)]
        said = []
        for each in under_way:
            with pytest.raises((ParamStoreError, MemoryError)) as raised:
                each.wait()
            said.append(f"{type(raised.value).__name__}: {raised.value}")
        return " | ".join(said)

    first, second = of_all(run_ranks(2, rank, timeout_s=1.0))
    assert first.startswith("MemoryError: of the host | RankLost: expert-parallel ranks: this one left an exchange by MemoryError")
    assert "rank 0" in second


def test_the_thread_ends_with_the_exchange() -> None:
    def rank(flat: FlatExchange) -> threading.Thread | None:
        exchange = hopping(flat, "aa")
        exchange.rows(torch.ones(2, 4), to_each=[1, 1], from_each=[1, 1])
        return exchange._worker

    for thread in of_all(run_ranks(2, rank)):
        assert thread is not None
        thread.join(10.0)
        assert not thread.is_alive()
