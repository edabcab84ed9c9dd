"""Whose turn it is to hash."""

from __future__ import annotations

import pytest

from paramstore.core.schema import Schema
from paramstore.engine.transfers import hashing
from paramstore.engine.transfers.hashing import Hashing
from paramstore.storage.format.structures import chunk_checksums
from paramstore.turns import Turns

PART = Schema.param({"w": ((64, 1024), "float32")}).stored


def test_checksums_are_those_of_the_format() -> None:
    image = memoryview(bytes(range(256)) * (PART.image_bytes // 256))
    assert Hashing(1).checksums(image, PART.chunks()) == chunk_checksums(image, PART.chunks())


def test_a_failed_hash_gives_its_turn_back() -> None:
    turns = Hashing(1)
    with pytest.raises(AssertionError):
        turns.checksums(memoryview(b""), PART.chunks())
    image = memoryview(bytes(PART.image_bytes))
    assert turns.checksums(image, PART.chunks()) == chunk_checksums(image, PART.chunks())


def test_each_hash_takes_a_turn_of_so_many_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    told = list[object]()

    class Noted(Turns):
        def __init__(self, at_once: int) -> None:
            super().__init__(at_once)
            told.append(at_once)

        def __enter__(self) -> None:
            super().__enter__()
            told.append("turn")

    monkeypatch.setattr(hashing, "Turns", Noted)
    monkeypatch.setattr(hashing, "chunk_checksums", lambda *_: told.append("hash"))
    turns = Hashing(3)
    for _ in range(2):
        turns.checksums(memoryview(b""), ())
    assert told == [3, "turn", "hash", "turn", "hash"]
