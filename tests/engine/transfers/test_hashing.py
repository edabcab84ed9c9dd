"""Whose turn it is to hash."""

from __future__ import annotations

import os
import threading

import pytest

from paramstore.core.schema import Schema
from paramstore.engine.transfers import hashing
from paramstore.engine.transfers.hashing import Hashing
from paramstore.storage.format.structures import chunk_checksums

PART = Schema.param({"w": ((64, 1024), "float32")}).stored
WAIT_S = 10.0


def test_checksums_are_those_of_the_format() -> None:
    image = memoryview(bytes(range(256)) * (PART.image_bytes // 256))
    assert Hashing(1).checksums(image, PART.chunks()) == chunk_checksums(image, PART.chunks())


def test_a_failed_hash_gives_its_turn_back() -> None:
    turns = Hashing(1)
    with pytest.raises(AssertionError):
        turns.checksums(memoryview(b""), PART.chunks())
    image = memoryview(bytes(PART.image_bytes))
    assert turns.checksums(image, PART.chunks()) == chunk_checksums(image, PART.chunks())


@pytest.mark.parametrize("at_once", [1, 2])
def test_no_more_hash_at_once_than_there_are_turns(monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    lock, inside, seen = threading.Lock(), [0], []
    all_inside = threading.Barrier(at_once)  # broken, and the test fails, if fewer than `at_once` ever get in together
    all_started = threading.Barrier(4 * at_once)  # whoever is let in waits until the others had their chance

    def counting(image: memoryview, chunks: object, base_bytes: int = 0) -> list[int]:
        with lock:
            inside[0] += 1
            seen.append(inside[0])
        all_inside.wait(WAIT_S)
        for _ in range(200):  # a turn that nobody guards is taken by another thread here
            os.sched_yield()
        with lock:
            inside[0] -= 1
        return []

    monkeypatch.setattr(hashing, "chunk_checksums", counting)
    turns = Hashing(at_once)

    def work() -> None:
        all_started.wait(WAIT_S)
        turns.checksums(memoryview(b""), ())

    threads = [threading.Thread(target=work) for _ in range(4 * at_once)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert len(seen) == 4 * at_once
    assert max(seen) == at_once
