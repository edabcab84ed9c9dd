"""Activations on the host: what was put in comes out, buffers serve again, and the limit holds."""

from __future__ import annotations

import pytest
import torch

from paramstore.errors import CapacityError
from paramstore_client.moe.host_arena import ROUND_BYTES, HostArena


def _storage(size_bytes: int, seed: int = 0) -> torch.UntypedStorage:
    return torch.randint(256, (size_bytes,), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8).untyped_storage()


@pytest.mark.parametrize("size_bytes", [0, 1, ROUND_BYTES, ROUND_BYTES + 1])
def test_bytes_come_back_as_they_were(size_bytes: int) -> None:
    storage = _storage(size_bytes)
    held = HostArena().hold(storage)
    assert held.bytes().untyped_storage().data_ptr() != storage.data_ptr()
    assert held.bytes().tolist() == list(storage)
    assert held.bytes().storage_offset() == 0, "views of the storage lie as they lay"


def test_a_buffer_that_nobody_has_serves_the_next_of_about_its_size() -> None:
    arena = HostArena()
    first, second = arena.hold(_storage(100)), arena.hold(_storage(100))
    size_bytes, address = arena.size_bytes, first.bytes().data_ptr()
    del first
    third = arena.hold(_storage(90, seed=1))
    assert third.bytes().data_ptr() == address
    assert third.bytes().tolist() == list(_storage(90, seed=1))
    assert second.bytes().tolist() == list(_storage(100))
    assert arena.size_bytes == size_bytes == 2 * ROUND_BYTES


def test_what_does_not_fit_is_refused_with_the_bytes_and_free_buffers_make_room_first() -> None:
    arena = HostArena(3 * ROUND_BYTES)
    held = [arena.hold(_storage(ROUND_BYTES)) for _ in range(3)]
    with pytest.raises(CapacityError, match=f"{4 * ROUND_BYTES} bytes on the host, the limit is {3 * ROUND_BYTES}"):
        arena.hold(_storage(1))
    held.pop()
    held.pop()
    with pytest.raises(CapacityError):
        arena.hold(_storage(2 * ROUND_BYTES + 1))
    assert arena.hold(_storage(2 * ROUND_BYTES)).bytes().tolist() == list(_storage(2 * ROUND_BYTES))


def test_buffers_grow_no_further_than_were_used_at_once_whatever_the_sizes() -> None:
    arena, drawn = HostArena(), torch.Generator().manual_seed(0)
    most = 0
    for _ in range(50):
        sizes = torch.randint(ROUND_BYTES, 20 * ROUND_BYTES, (10,), generator=drawn).tolist()
        held = [arena.hold(_storage(size)) for size in sizes]
        most = max(most, sum(map(len, (each.bytes() for each in held))))
        del held
    assert arena.size_bytes <= 1.3 * most
