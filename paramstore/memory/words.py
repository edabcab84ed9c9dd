"""Words that the daemon writes and one client reads: a sealed page, by which a client is told something without a message.

A word is written and read whole: it lies at a multiple of its size. The page can be mapped read-only by others, and never shrinks.
"""

from __future__ import annotations

import mmap
from typing import Any, Final

from paramstore.errors import ProtocolError
from paramstore.memory.arena import Segment, allocate_words
from paramstore.memory.shared import Mapping

PAGE_BYTES = mmap.PAGESIZE
WORD_FORMAT: Final = "I"
WORD_BYTES = 4
WORDS = PAGE_BYTES // WORD_BYTES
"""Words of a page."""


class Words:
    """Owner of a page of words, as the daemon has it. Raises CapacityError where it cannot be made."""

    def __init__(self) -> None:
        self._segment: Segment = allocate_words(PAGE_BYTES)
        self._words = self._segment.view(0, PAGE_BYTES).cast(WORD_FORMAT)

    @property
    def fd(self) -> int:
        """The page's descriptor, for the client."""
        assert self._segment.fd is not None, "used after close"
        return self._segment.fd

    def __setitem__(self, index: int, value: int) -> None:
        self._words[index] = value

    def close(self) -> None:
        """Gives the page up; a client that has mapped it may still read it. May be called twice."""
        self._words.release()
        self._segment.close()


def word_of(page: Mapping, index: int) -> memoryview:
    """The word `index` of a page that was mapped here, as a sequence of one number. Raises ProtocolError where there is none."""
    count = page.length_bytes // WORD_BYTES
    if not 0 <= index < count:
        raise ProtocolError(f"the daemon named word {index} of a page of {count}")
    buffer: Any = page.buffer  # a ctypes array
    return memoryview(buffer).cast("B").cast(WORD_FORMAT)[index : index + 1].toreadonly()
