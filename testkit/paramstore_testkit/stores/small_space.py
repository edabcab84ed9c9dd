"""Free space of a few pages, and extents by their page numbers."""

from __future__ import annotations

from paramstore.core.location import Extent
from paramstore.storage.space.extents import Space

PAGE = 4096


def space(pages: int = 16, *, written: int = 0, volumes: int = 1, start: int = 0) -> Space:
    """Makes volumes of `pages` pages; sizes in pages."""
    made = Space()
    for index in range(volumes):
        made.add_volume(index, start_bytes=start * PAGE, size_bytes=(start + pages) * PAGE, written_bytes=written * PAGE)
    return made


def extent(page: int, pages: int = 1, volume: int = 0) -> Extent:
    return Extent(volume, page * PAGE, pages * PAGE)
