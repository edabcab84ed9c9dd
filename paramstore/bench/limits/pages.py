"""Memory of a stated kind for the baseline to read to and write from, with every page touched before use.

Page size decides the disk's speed: one O_DIRECT request into scattered 4 KiB pages is cut into many small segments. So a
ratio is fair only between equal kinds of memory, and every result names its kind. The memory comes from `paramstore.memory`,
as the daemon's own does; no system setting is changed.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path

from paramstore.memory.arena import PageKind, PageReport, allocate_private, allocate_shared, probe_pages

HUGE_PAGE_BYTES = 2 << 20
TRANSPARENT = Path("/sys/kernel/mm/transparent_hugepage")


class MemoryKind(StrEnum):
    """A kind of memory: private or shared (memfd), and the size of its pages."""

    PRIVATE_SMALL = "private, 4 KiB pages"
    PRIVATE_HUGE = "private, huge pages"
    SHARED_SMALL = "memfd, 4 KiB pages"
    SHARED_HUGE = "memfd, huge pages"


class Slab:
    """Owner of one stretch of memory of at least `length_bytes`, all of it touched.

    Raises CapacityError where the machine has less than that.
    """

    def __init__(self, kind: MemoryKind, length_bytes: int) -> None:
        self.kind = kind
        self.length_bytes = -(-length_bytes // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
        allocate = allocate_shared if kind in (MemoryKind.SHARED_SMALL, MemoryKind.SHARED_HUGE) else allocate_private
        self._segment = allocate(self.length_bytes, _pages_for(kind))
        self._segment.touch()
        self.view = self._segment.view(0, self.length_bytes)

    def close(self) -> None:
        """Gives the memory back once the last view of it is gone."""
        self.view = memoryview(b"")
        self._segment.close()


def param_kind() -> MemoryKind:
    """Finds the kind of the daemon's `param` arenas on this machine, now: memory that clients map."""
    return MemoryKind.SHARED_SMALL if probe_pages().shared is PageKind.SMALL else MemoryKind.SHARED_HUGE


def optim_kind() -> MemoryKind:
    """Finds the kind of the daemon's `optim` arenas on this machine, now: memory of its own."""
    return MemoryKind.PRIVATE_SMALL if probe_pages().private is PageKind.SMALL else MemoryKind.PRIVATE_HUGE


def available_kinds() -> list[MemoryKind]:
    """Lists the kinds that this machine gives without being changed. Private 4 KiB pages are missing where the kernel makes all
    private memory huge."""
    has_small_private = chosen("enabled") != "always"
    kinds = [MemoryKind.PRIVATE_SMALL] if has_small_private else []
    return list(dict.fromkeys([*kinds, MemoryKind.SHARED_SMALL, optim_kind(), param_kind()]))


def settings() -> dict[str, str]:
    """The system's settings of huge pages: transparent ones (private, shared) and the reserved pool."""
    pool = [line.split()[1] for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("HugePages_Free")]
    return {
        **{name: chosen(name) for name in ("enabled", "shmem_enabled", "defrag")},
        "hugetlb_free_pages": pool[0] if pool else "0",
        "advice": probe_pages().advice,
    }


def chosen(setting: str) -> str:
    """Finds the word in brackets: `always [madvise] never` chooses madvise."""
    try:
        text = (TRANSPARENT / setting).read_text()
    except OSError:
        return "unknown"
    return text.partition("[")[2].partition("]")[0] or text.strip()


def _pages_for(kind: MemoryKind) -> PageReport:
    """The daemon's own choice of huge pages (pool or transparent) for a huge kind, none for a small one."""
    found = probe_pages()
    if kind in (MemoryKind.PRIVATE_SMALL, MemoryKind.SHARED_SMALL):
        return PageReport(shared=PageKind.SMALL, private=PageKind.SMALL, advice="")
    return found
