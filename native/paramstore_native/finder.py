"""Finds a kernel of this package once per process, and says in the log whether it or torch does the work, and why.

A kernel is a matter of speed alone: it is handed out only where it was built, and gives torch's bits on this machine.
`PARAMSTORE_NATIVE=0` leaves all of them out.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

from paramstore_native.compiled import Unavailable, build

logger = logging.getLogger(__name__)

SWITCH_VARIABLE = "PARAMSTORE_NATIVE"
K = TypeVar("K")


class Finder(Generic[K]):
    """Owner of what this process knows of one kernel.

    work: what it does, in the log. source: its C. make: the kernel of a built library; raises OSError or AttributeError where the
    file is none. objection: why this machine is not to use it, "" where it gives torch's bits; it imports torch, which callers have
    imported already.
    """

    def __init__(self, work: str, source: Path, make: Callable[[Path], K], objection: Callable[[K], str]) -> None:
        self._work = work
        self._source = source
        self._make = make
        self._objection = objection
        self._lock = threading.Lock()
        self._found: K | Unavailable | None = None
        """The kernel, or why there is none, once this process knows."""

    def kernel(self) -> K | None:
        """The kernel, or None where torch has to do its work. The first call builds and checks it (a second, once per machine, else
        20 ms and torch's import) and logs which of the two is used; later calls are free."""
        with self._lock:
            if self._found is None:
                is_off = os.environ.get(SWITCH_VARIABLE) == "0"
                self._found = found = Unavailable(f"{SWITCH_VARIABLE}=0") if is_off else self.load()
                where = f"torch: {found.reason}" if isinstance(found, Unavailable) else "the native kernel"
                logger.info("%s runs in %s", self._work, where)
        return None if isinstance(self._found, Unavailable) else self._found

    def known_state(self) -> str:
        """The state in words for people: `native`, `torch (why)`, or empty while neither was needed."""
        if self._found is None:
            return ""
        return f"torch ({self._found.reason})" if isinstance(self._found, Unavailable) else "native"

    def load(self, cache: Path | None = None) -> K | Unavailable:
        """The kernel built in `cache` (default: the user's) if it gives what torch gives here, else why there is none."""
        library = build(self._source, cache=cache)
        if isinstance(library, Unavailable):
            return library
        try:
            made = self._make(library)
        except (OSError, AttributeError) as error:
            return Unavailable(f"{library} cannot be loaded: {error}")
        return Unavailable(reason) if (reason := self._objection(made)) else made
