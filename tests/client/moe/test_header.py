"""Headers: what ranks must have alike, in words; what one refuses, the others learn."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from paramstore.errors import CapacityError, ParamStoreError, StepMismatch
from paramstore_client.moe.granularity.search import TOLD
from paramstore_client.moe.header import (
    DTYPE_AT,
    NUMBERS,
    PHASE_AT,
    TIMED_AT,
    TOLD_AT,
    UNKNOWN,
    Header,
    Phase,
    check_alike,
    check_told,
    messages,
    refusal,
)  # fmt: skip

CPU = torch.device("cpu")
HEADER = Header(Phase.FORWARD, 7, 3, 20, 0, 64, 16, 2, 1, 12345, 1, 1, 0, 0)
FIELDS = [field.name for field in dataclasses.fields(Header)]


def test_messages_hold_the_header_and_the_counts_for_each_rank() -> None:
    told = messages(HEADER, 2, counts=[torch.tensor([1, 2]), torch.tensor([3])], device=CPU)
    assert told.shape == (2, NUMBERS)
    assert [Header.of(numbers) for numbers in told[:, 2:TOLD_AT].tolist()] == [HEADER, HEADER]
    assert told[:, TOLD_AT : TOLD_AT + 3].tolist() == [[1, 2, 0], [3, 0, 0]]
    assert told[:, DTYPE_AT].tolist() == [UNKNOWN, UNKNOWN]
    assert messages(HEADER, 1, device=CPU, computed=torch.bfloat16)[0, DTYPE_AT] == 1


def test_a_header_leaves_room_for_its_fields() -> None:
    assert PHASE_AT + len(FIELDS) <= TIMED_AT < DTYPE_AT - TOLD < DTYPE_AT < TOLD_AT


def test_what_ranks_have_measured_may_differ() -> None:
    told = torch.cat([messages(HEADER, 1, timed=range(rank, rank + TOLD), device=CPU) for rank in (1, 2)])
    check_told(told, this=0)
    assert told[:, TIMED_AT : TIMED_AT + TOLD].tolist() == [list(range(1, 1 + TOLD)), list(range(2, 2 + TOLD))]


@pytest.mark.parametrize("field", FIELDS)
def test_ranks_that_differ_are_named_with_what_each_has(field: str) -> None:
    other = dataclasses.replace(HEADER, **{field: 2})
    if other == HEADER:
        other = dataclasses.replace(HEADER, **{field: 3})
    with pytest.raises(StepMismatch, match=rf"differ in {field}: .* on ranks 0, 2; .* on rank 1\. No row was sent"):
        check_alike([HEADER, other, HEADER])


def test_ranks_before_other_exchanges_are_named_with_these() -> None:
    other = dataclasses.replace(HEADER, phase=Phase.RETURN_BACKWARD)
    with pytest.raises(StepMismatch, match=r"differ in phase: forward on rank 0; return of backward on rank 1"):
        check_alike([HEADER, other])


def test_a_dtype_is_named_as_torch_names_it() -> None:
    with pytest.raises(StepMismatch, match=r"dtype: torch.float32 on rank 0; torch.bfloat16 on rank 1"):
        check_alike([HEADER, dataclasses.replace(HEADER, dtype=1)])


def test_equal_headers_pass() -> None:
    check_alike([HEADER, dataclasses.replace(HEADER)])


@pytest.mark.parametrize(
    ("error", "learned"),
    [
        (CapacityError("of 7 slots"), (CapacityError, "rank 1: of 7 slots")),
        (KeyError("w"), (ParamStoreError, "rank 1: KeyError: 'w'")),
        (KeyboardInterrupt(), (ParamStoreError, "rank 1: KeyboardInterrupt: ")),
        (CapacityError("ü" * 5000), (CapacityError, "rank 1: ü")),
    ],
    ids=repr,
)
def test_what_a_rank_refuses_the_others_raise(error: BaseException, learned: tuple[type[Exception], str]) -> None:
    matched = messages(HEADER, 1, counts=[torch.tensor([1])], device=CPU)
    told = torch.cat([matched, refusal(error, phase=Phase.FORWARD, device=CPU)[None]])
    with pytest.raises(learned[0]) as raised:
        check_told(told, this=0)
    assert learned[1] in str(raised.value)
