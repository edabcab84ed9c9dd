from __future__ import annotations

import pytest
import torch

from paramstore.core.key import ExpertKey
from paramstore.core.optimizers import AdamW
from paramstore.errors import LeaseError, StepMismatch
from paramstore.testing.memory_namespace import MemoryNamespace
from paramstore_client.hf.model.lease_window import Hint, Window
from paramstore_client.nn.weight_views import Identities

CPU = torch.device("cpu")


def no_hint(room: int) -> list[ExpertKey]:
    return []


def window_of(
    namespace: MemoryNamespace, experts: int, *, is_upward: bool = True, identities: Identities | None = None,
    hint: Hint = no_hint, part_size: int | None = None,
) -> Window:  # fmt: skip
    keys = [(0, expert) for expert in range(experts)]
    return Window(
        namespace, keys, identities or Identities(), device=CPU, is_upward=is_upward, hint=hint, part_size=part_size
    )


def test_half_the_slots_are_leased_and_the_next_part_is_prefetched() -> None:
    namespace = MemoryNamespace.of_swiglu(lease_slots=4)
    with window_of(namespace, 5) as window:
        for position in range(5):
            weights = window.weights(position)
            assert torch.equal(weights["down"], namespace.values((0, position))["down"])
    assert list(namespace.happened("acquire", "prefetch")) == [
        ("acquire", ((0, 0), (0, 1))), ("prefetch", ((0, 2), (0, 3))), ("acquire", ((0, 2), (0, 3))), ("prefetch", ((0, 4),)),
        ("acquire", ((0, 4),)),
    ]  # fmt: skip
    assert namespace.leased_keys_max == 2
    assert not namespace.leased


def test_downward_pass_prefetches_the_part_below() -> None:
    namespace = MemoryNamespace.of_swiglu(lease_slots=4)
    with window_of(namespace, 5, is_upward=False) as window:
        for position in reversed(range(5)):
            window.weights(position)
    assert list(namespace.happened("prefetch")) == [("prefetch", ((0, 2), (0, 3))), ("prefetch", ((0, 0), (0, 1)))]


def test_hint_is_asked_for_the_room_beside_the_last_part() -> None:
    namespace = MemoryNamespace.of_swiglu(lease_slots=5)
    rooms = []

    def hint(room: int) -> list[ExpertKey]:
        rooms.append(room)
        return [(1, 0)]

    with window_of(namespace, 3, hint=hint) as window:
        for position in range(3):
            window.weights(position)
    assert rooms == [4]
    assert list(namespace.happened("prefetch"))[-1] == ("prefetch", ((1, 0),))


def test_weights_in_any_order_are_right() -> None:
    namespace = MemoryNamespace.of_swiglu(lease_slots=2)
    with window_of(namespace, 4) as window:
        for position in (3, 0, 2, 2, 1):
            assert torch.equal(window.weights(position)["down"], namespace.values((0, position))["down"])


def test_released_window_leases_again_when_asked() -> None:
    namespace = MemoryNamespace.of_swiglu(lease_slots=2)
    with window_of(namespace, 2) as window:
        window.weights(0)
        window.release()
        assert not namespace.leased
        assert torch.equal(window.weights(0)["down"], namespace.values((0, 0))["down"])
    assert not namespace.leased


def test_error_in_a_pass_gives_the_lease_back() -> None:
    namespace = MemoryNamespace.of_swiglu(lease_slots=2)
    with pytest.raises(KeyError), window_of(namespace, 2) as window:
        window.weights(0)["nothing"]
    assert not namespace.leased


def test_other_bytes_in_a_later_pass_are_refused() -> None:
    namespace = MemoryNamespace.of_swiglu(lease_slots=2)
    identities = Identities()
    with window_of(namespace, 1, identities=identities) as window:
        window.weights(0)
    namespace.push({(0, 0): namespace.values((0, 0))})
    namespace.apply(AdamW())
    with pytest.raises(StepMismatch, match=r"expert \(0, 0\)"), window_of(namespace, 1, identities=identities) as window:
        window.weights(0)
    assert not namespace.leased


def test_weights_that_were_released_while_they_were_used_end_the_pass() -> None:
    namespace = MemoryNamespace.of_swiglu(lease_slots=2)
    window = window_of(namespace, 3)
    window.weights(0)
    namespace.leased[0].release()
    with pytest.raises(LeaseError, match="was released"):
        window.weights(1)
    with pytest.raises(LeaseError, match="was released"):
        window.__exit__(None, None, None)
    window.weights(1)
    window.__exit__(None, None, None)
    assert not namespace.leased


def test_given_part_size_leases_no_more() -> None:
    namespace = MemoryNamespace.of_swiglu(lease_slots=64)
    with window_of(namespace, 3, part_size=1) as window:
        for position in range(3):
            window.weights(position)
    assert namespace.leased_keys_max == 1


def test_where_others_hold_too_many_slots_parts_get_smaller() -> None:
    namespace = MemoryNamespace.of_swiglu(lease_slots=4)
    with namespace.acquire([(1, 0), (1, 1), (1, 2)]), window_of(namespace, 3, part_size=3) as window:
        for position in range(3):
            assert torch.equal(window.weights(position)["down"], namespace.values((0, position))["down"])
    assert [keys for _, keys in namespace.happened("acquire")][1:] == [((0, 0),), ((0, 1),), ((0, 2),)]


def test_where_others_hold_every_slot_the_error_is_theirs() -> None:
    namespace = MemoryNamespace.of_swiglu(lease_slots=2)
    with namespace.acquire([(1, 0), (1, 1)]), window_of(namespace, 2) as window, pytest.raises(LeaseError, match="own leases hold"):
        window.weights(0)


def test_a_release_that_was_interrupted_is_done_by_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    namespace = MemoryNamespace.of_swiglu()
    window = window_of(namespace, 2)
    window.weights(0)
    lease = window._lease
    assert lease is not None
    release, interrupts = lease.release, [KeyboardInterrupt]

    def interrupted() -> None:
        if interrupts:
            raise interrupts.pop()
        release()

    monkeypatch.setattr(lease, "release", interrupted)
    with pytest.raises(KeyboardInterrupt):
        window.release()
    window.release()
    assert namespace.leased == []
