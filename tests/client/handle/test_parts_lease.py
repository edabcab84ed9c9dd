"""A lease that goes through more keys than may be leased at once, part after part."""

from __future__ import annotations

import pytest
import torch

from paramstore.core.key import ExpertKey
from paramstore.core.optimizers import AdamW
from paramstore.errors import (
    CapacityError,
    LeaseError,
    ParamStoreError,
    StepMismatch,
    UnknownKey,
    UnknownNamespace,
    VolumeError,
)
from paramstore.testing.memory_namespace import MemoryNamespace

KEYS: list[ExpertKey] = [(0, expert) for expert in range(6)]


def namespace(lease_slots: int) -> MemoryNamespace:
    return MemoryNamespace.of_swiglu(lease_slots=lease_slots)


@pytest.mark.parametrize("lease_slots", [1, 2, 3, 5, 6, 64])
def test_any_number_of_keys_is_gone_through_with_any_number_of_slots(lease_slots: int) -> None:
    ns = namespace(lease_slots)
    seen = []
    with ns.acquire_arriving([*KEYS, KEYS[0]], may_pass=True) as lease:
        assert lease.passing_count == (0 if lease_slots >= 6 else 6)
        assert lease.ahead == (0, 0)
        for key in lease.in_turn():
            assert torch.equal(lease[key]["down"], ns.values(key)["down"])
            assert lease.identity(key) == ns.identity(key)
            assert lease.passes(key) == (lease_slots < 6)
            seen.append(key)
    assert seen == KEYS
    assert ns.leased == []
    assert ns.leased_keys_max <= lease_slots


@pytest.mark.parametrize("lease_slots", [1, 2, 3, 5, 6, 64])
def test_keys_are_turned_to_in_whatever_order(lease_slots: int) -> None:
    ns = namespace(lease_slots)
    with ns.acquire_arriving(KEYS, may_pass=True) as lease:
        for key in (*KEYS, KEYS[4], KEYS[0], KEYS[0], KEYS[3]):
            assert torch.equal(lease.turn_to(key)["down"], ns.values(key)["down"])
        with pytest.raises(UnknownKey):
            lease.turn_to((1, 0))
    assert ns.leased_keys_max <= lease_slots
    with pytest.raises(LeaseError, match="released"):
        lease.turn_to(KEYS[0])


def test_what_fits_is_leased_once() -> None:
    ns = namespace(6)
    with ns.acquire_arriving(KEYS, may_pass=True) as lease:
        assert list(lease.in_turn()) == KEYS
    assert [kind for kind, _ in ns.events] == ["acquire", "release"]


def test_the_next_part_is_asked_for_beside_the_one_whose_turn_it_is() -> None:
    ns = namespace(5)
    with ns.acquire_arriving(KEYS, may_pass=True) as lease:
        assert list(lease.in_turn()) == KEYS
    parts = [tuple(KEYS[start : start + 2]) for start in (0, 2, 4)]
    assert list(ns.happened("acquire", "prefetch")) == [
        ("acquire", parts[0]), ("prefetch", parts[1]), ("acquire", parts[1]), ("prefetch", parts[2]), ("acquire", parts[2]),
    ]  # fmt: skip


def test_a_key_is_there_in_its_turn_alone() -> None:
    ns = namespace(2)
    with ns.acquire_arriving(KEYS[:3], may_pass=True) as lease:
        turns = lease.in_turn()
        assert [next(turns), next(turns)] == KEYS[:2]
        with pytest.raises(LeaseError, match="passes by"):
            lease[KEYS[0]]
        with pytest.raises(UnknownKey):
            lease[1, 0]
    with pytest.raises(LeaseError, match="was released"):
        next(turns)


def test_what_may_not_pass_is_refused_above_the_slots() -> None:
    ns = namespace(5)
    with pytest.raises(CapacityError, match="6 keys asked"):
        ns.acquire_arriving(KEYS)
    with ns.acquire_arriving(KEYS[:5]) as lease:
        assert list(lease.in_turn()) == KEYS[:5]


def test_each_part_asks_for_the_next_once_when_a_key_of_it_is_turned_to() -> None:
    ns = namespace(4)
    with ns.acquire_arriving(KEYS, may_pass=True) as lease:
        for key in KEYS:
            lease.turn_to(key)
    assert list(ns.happened("prefetch")) == [("prefetch", tuple(KEYS[2:4])), ("prefetch", tuple(KEYS[4:]))]


def test_parts_are_of_one_view() -> None:
    ns = namespace(2)
    with ns.acquire_arriving(KEYS, may_pass=True) as lease:
        turns = lease.in_turn()
        next(turns)
        ns.push({KEYS[5]: {name: torch.ones_like(value) for name, value in ns.values(KEYS[5]).items()}})
        ns.apply(AdamW(lr=0.1))
        with pytest.raises(StepMismatch, match="moved while a layer was computed"):
            list(turns)
    assert ns.leased == []


def test_others_that_hold_too_many_are_told_of_and_nothing_stays_leased() -> None:
    ns = namespace(4)
    with ns.acquire_arriving(KEYS, may_pass=True) as lease:
        turns = lease.in_turn()
        assert [next(turns), next(turns)] == KEYS[:2]
        with ns.acquire([(1, 0), (1, 1)]):
            assert next(turns) == KEYS[2], "its first part was given back before"
        assert next(turns) == KEYS[3]
        others = ns.acquire([(1, 0)])
        ns.lease_slots = 2  # as if another thread had leased as many
        with others, pytest.raises(LeaseError, match="own leases hold 1 of 2"):
            next(turns)
    assert ns.leased == []


@pytest.mark.parametrize("error", [CapacityError, UnknownNamespace, VolumeError])
def test_a_part_that_cannot_be_asked_for_ahead_fails_none_of_them(
    error: type[ParamStoreError], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise error("no hints")

    ns = namespace(4)
    monkeypatch.setattr(ns, "prefetch", refuse)
    with ns.acquire_arriving(KEYS, may_pass=True) as lease:
        assert list(lease.in_turn()) == KEYS
    assert ns.leased == []
    assert "2 experts of layer 0 could not be loaded ahead: no hints" in caplog.text
