"""Whose turn it is to hash."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from paramstore.core.schema import Schema
from paramstore.engine.transfers import hashing
from paramstore.engine.transfers.hashing import Hashing
from paramstore.errors import VolumeError
from paramstore.storage.format.structures import chunk_checksums
from paramstore.turns import Turns

WAIT_S = 30.0
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


def test_hashes_beside_what_its_block_does() -> None:
    image = memoryview(bytes(range(256)) * (PART.image_bytes // 256))
    threads = list[int]()
    kept = hashing.chunk_checksums

    def noting(*arguments: Any) -> list[int]:
        threads.append(threading.get_ident())
        return kept(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hashing, "chunk_checksums", noting)
        with Hashing(1).beside(image, PART.chunks()) as checksums:
            assert checksums() == kept(image, PART.chunks())
    assert threads != [threading.get_ident()]


def test_nobody_uses_the_image_once_a_block_beside_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    is_begun, may_end, is_over = threading.Event(), threading.Event(), list[bool]()

    def slow(*_: object) -> list[int]:
        is_begun.set()
        assert may_end.wait(WAIT_S)
        is_over.append(True)
        return []

    def read_and_fail() -> None:
        with Hashing(1).beside(memoryview(b""), ()):
            assert is_begun.wait(WAIT_S)
            threading.Thread(target=may_end.set).start()
            raise VolumeError("a disk that went away")

    monkeypatch.setattr(hashing, "chunk_checksums", slow)
    with pytest.raises(VolumeError):
        read_and_fail()
    assert is_over == [True]
