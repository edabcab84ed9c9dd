"""Words: what the daemon writes is read at once where the page is mapped, and nobody else can write or shrink it."""

from __future__ import annotations

import fcntl
import mmap
import os

import pytest

from paramstore.errors import ProtocolError
from paramstore.memory.shared import Mapping
from paramstore.memory.words import PAGE_BYTES, WORDS, Words, word_of


def mapped(words: Words) -> Mapping:
    return Mapping(words.fd, PAGE_BYTES, is_writable=False)


def test_each_word_is_read_as_it_was_written_last_and_none_is_another() -> None:
    words = Words()
    page = mapped(words)
    seen = [word_of(page, index) for index in range(WORDS)]
    assert [word[0] for word in seen] == [0] * WORDS
    for index in range(WORDS):
        words[index] = index * 4_000_000
    assert [word[0] for word in seen] == [index * 4_000_000 for index in range(WORDS)]
    words.close()
    words.close()
    page.close()
    assert seen[5][0] == 20_000_000, "who has it mapped may read it still"


def test_a_page_can_neither_be_written_by_others_nor_shrink_or_grow() -> None:
    words = Words()
    with pytest.raises(TypeError):
        word_of(mapped(words), 0)[0] = 1
    with pytest.raises(PermissionError):
        mmap.mmap(words.fd, PAGE_BYTES)
    with pytest.raises(PermissionError):
        os.pwrite(words.fd, b"1", 0)
    for length_bytes in (0, 2 * PAGE_BYTES):
        with pytest.raises(PermissionError):
            os.ftruncate(words.fd, length_bytes)
    with pytest.raises(PermissionError):
        fcntl.fcntl(words.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    words.close()


@pytest.mark.parametrize("index", [-1, WORDS, 1 << 40])
def test_a_word_beyond_the_page_is_refused(index: int) -> None:
    words = Words()
    with pytest.raises(ProtocolError, match=f"word {index} of a page of {WORDS}"):
        word_of(mapped(words), index)
    words.close()
