"""Space against a model that knows only which page belongs to whom."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from paramstore.core.place import Extent
from paramstore.storage.extents import Space

PAGE = 4096
LENGTHS = st.integers(1, 5)


class SpaceMachine(RuleBasedStateMachine):
    """`pages` maps every page to its holder: "free", "filling", "quarantined" or the extent it is part of."""

    held = Bundle("held")
    pinned = Bundle("pinned")
    filling = Bundle("filling")

    @initialize(sizes=st.lists(st.integers(1, 24), min_size=1, max_size=3), written=st.integers(0, 24))
    def open(self, sizes: list[int], written: int) -> None:
        self.space = Space()
        self.pages: dict[tuple[int, int], object] = {}
        self.unwritten: set[tuple[int, int]] = set()
        self.pins: dict[Extent, int] = {}
        self.released: set[Extent] = set()
        self.written_bytes: dict[int, int] = {}
        for volume, size in enumerate(sizes):
            self.space.add_volume(volume, start_bytes=PAGE, size_bytes=(1 + size) * PAGE, written_bytes=written * PAGE)
            self._add_pages(volume, range(1, 1 + size), written)

    def _add_pages(self, volume: int, added: range, written: int = 0) -> None:
        self.pages.update({(volume, page): "free" for page in added})
        self.unwritten |= {(volume, page) for page in added if page >= written}

    def _pages_of(self, extent: Extent) -> list[tuple[int, int]]:
        first = extent.offset_bytes // PAGE
        return [(extent.volume, page) for page in range(first, first + extent.length_bytes // PAGE)]

    def _claim(self, extent: Extent, holder: object) -> None:
        for page in self._pages_of(extent):
            assert self.pages[page] == "free", f"{page} was held by {self.pages[page]}"
            self.pages[page] = holder

    def _free(self, extent: Extent, holder: object) -> None:
        for page in self._pages_of(extent):
            assert self.pages[page] == holder
            self.pages[page] = "free"
            self.unwritten.discard(page)

    def _fits(self, length: int) -> bool:
        return any(all(self.pages.get((v, p + i)) == "free" for i in range(length)) for v, p in self.pages)

    @rule(target=held, length=LENGTHS)
    def reserve(self, length: int) -> object:
        could = self._fits(length)
        has_written = any(
            all(self.pages.get((v, p + i)) == "free" and (v, p + i) not in self.unwritten for i in range(length))
            for v, p in self.pages
        )
        extent = self.space.reserve(length * PAGE - 7)
        assert (extent is not None) == could
        if extent is None:
            return multiple()
        assert extent.length_bytes == length * PAGE
        if has_written and len({volume for volume, _ in self.pages}) == 1:
            assert not self.unwritten.intersection(self._pages_of(extent))
        self._claim(extent, extent)
        return extent

    @rule(target=held, count=st.integers(0, 8), length=LENGTHS)
    def reserve_many(self, count: int, length: int) -> object:
        before = self.space.stats()
        missing = self.space.missing_bytes(count, length * PAGE)
        extents = self.space.reserve_many(count, length * PAGE)
        assert (extents is None) == (missing > 0)
        if extents is None:
            assert self.space.stats() == before
            assert missing <= count * length * PAGE
            return multiple()
        for extent in extents:
            self._claim(extent, extent)
        return multiple(*extents)

    @rule(extent=consumes(held))
    def release(self, extent: Extent) -> None:
        self.space.release(extent)
        if extent in self.pins:
            self.released.add(extent)
        else:
            self._free(extent, extent)

    @rule(extent=consumes(held))
    def quarantine(self, extent: Extent) -> None:
        self.space.quarantine(extent)
        self.pages.update(dict.fromkeys(self._pages_of(extent), "quarantined"))

    @rule(target=pinned, extent=held)
    def pin(self, extent: Extent) -> Extent:
        self.space.pin(extent)
        self.pins[extent] = self.pins.get(extent, 0) + 1
        return extent

    @rule(extent=consumes(pinned))
    def unpin(self, extent: Extent) -> None:
        self.space.unpin(extent)
        self.pins[extent] -= 1
        if not self.pins[extent]:
            del self.pins[extent]
            if extent in self.released:
                self.released.remove(extent)
                self._free(extent, extent)

    @rule(target=filling, volume=st.integers(0, 2), limit=LENGTHS)
    def start_fill(self, volume: int, limit: int) -> object:
        if volume not in {index for index, _ in self.pages}:
            return multiple()
        fresh = [page for page in sorted(self.unwritten) if page[0] == volume and self.pages[page] == "free"]
        extent = self.space.next_unwritten(volume, limit * PAGE)
        assert (extent is None) == (not fresh)
        if extent is None:
            return multiple()
        assert self._pages_of(extent)[0] == fresh[0]
        assert self.unwritten.issuperset(self._pages_of(extent))
        self._claim(extent, "filling")
        return extent

    @rule(extent=consumes(filling))
    def finish_fill(self, extent: Extent) -> None:
        self.space.finish_prefill(extent)
        self._free(extent, "filling")

    @rule(volume=st.integers(0, 2), added=st.integers(0, 4))
    def grow(self, volume: int, added: int) -> None:
        size = sum(index == volume for index, _ in self.pages)
        if size:
            self.space.grow_volume(volume, (1 + size + added) * PAGE)
            self._add_pages(volume, range(1 + size, 1 + size + added))

    @invariant()
    def free_bytes_agree(self) -> None:
        if not hasattr(self, "space"):
            return
        for stats in self.space.stats():
            holders = [holder for (volume, _), holder in self.pages.items() if volume == stats.volume]
            assert stats.free_bytes == holders.count("free") * PAGE
            assert stats.prefilling_bytes == holders.count("filling") * PAGE
            assert stats.quarantined_bytes == holders.count("quarantined") * PAGE

    @invariant()
    def written_bytes_never_shrink_and_tell_the_truth(self) -> None:
        if not hasattr(self, "space"):
            return
        for stats in self.space.stats():
            assert stats.written_bytes >= self.written_bytes.get(stats.volume, 0)
            self.written_bytes[stats.volume] = stats.written_bytes
            for volume, page in self.unwritten:
                if volume == stats.volume and self.pages[volume, page] in ("free", "filling"):
                    assert stats.written_bytes <= page * PAGE


SpaceMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestSpaceMachine = pytest.mark.slow(SpaceMachine.TestCase)
