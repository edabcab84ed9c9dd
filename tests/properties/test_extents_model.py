"""Space against a model that knows only which page belongs to whom."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from paramstore.core.location import Extent
from paramstore.storage.space.extents import Space
from paramstore_testkit.trials.state_machines import run_new

PAGE = 4096
LENGTHS = st.integers(1, 5)
OWNERS = st.sampled_from(["a", "b", ""])
CLASSES = st.none() | st.integers(0, 2)


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
        self.owners: dict[Extent, str] = {}
        self.entitled: dict[str, int] = {}
        self.is_short = False
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
        self.is_short = self.is_short and holder == "filling"

    def _fits(self, length: int) -> bool:
        return any(self._fits_on(volume, length) for volume in {volume for volume, _ in self.pages})

    def _fits_on(self, volume: int, length: int) -> bool:
        return any(all(self.pages.get((v, p + i)) == "free" for i in range(length)) for v, p in self.pages if v == volume)

    def _of_class(self, speed_class: int) -> set[int]:
        return {volume for volume, _ in self.pages if self.space.preference.class_of(volume) == speed_class}

    def _held_pages(self, owner: str) -> int:
        return sum(extent.length_bytes // PAGE for extent, whose in self.owners.items() if whose == owner)

    def _may_take(self, owner: str, length: int) -> bool:
        """Within its own entitlement, or without touching what the others have not taken of theirs."""
        if self._held_pages(owner) + length <= self.entitled.get(owner, 0):
            return True
        usable = sum(holder in ("free", "filling") for holder in self.pages.values())
        kept = sum(max(0, count - self._held_pages(other)) for other, count in self.entitled.items() if other != owner)
        return usable - length >= kept

    @rule(owner=OWNERS, pages=st.integers(0, 12))
    def entitle(self, owner: str, pages: int) -> None:
        self.space.entitle(owner, pages * PAGE)
        self.entitled[owner] = pages
        self.is_short = False

    @rule(classes=st.sampled_from([(0, 0, 0), (0, 1, 0), (1, 0, 0), (0, 1, 2), (2, 1, 0)]))
    def tell_apart(self, classes: tuple[int, ...]) -> None:
        self.space.preference.set_classes(dict(enumerate(classes)))

    @rule(target=held, length=LENGTHS, owner=OWNERS, speed_class=CLASSES)
    def reserve(self, length: int, owner: str, speed_class: int | None) -> object:
        could = self._fits(length) and self._may_take(owner, length)
        has_written = any(
            all(self.pages.get((v, p + i)) == "free" and (v, p + i) not in self.unwritten for i in range(length))
            for v, p in self.pages
        )
        extent = self.space.reserve(length * PAGE - 7, owner=owner, speed_class=speed_class)
        assert (extent is not None) == could
        if extent is None:
            self.is_short = True
            return multiple()
        assert extent.length_bytes == length * PAGE
        if speed_class is not None and self.space.preference.class_of(extent.volume) != speed_class:
            assert not any(self._fits_on(volume, length) for volume in self._of_class(speed_class))
        if has_written and len({volume for volume, _ in self.pages}) == 1:
            assert not self.unwritten.intersection(self._pages_of(extent))
        self._claim(extent, extent)
        self.owners[extent] = owner
        return extent

    @rule(target=held, count=st.integers(0, 8), length=LENGTHS, owner=OWNERS, classes=st.lists(CLASSES, max_size=8))
    def reserve_many(self, count: int, length: int, owner: str, classes: list[int | None]) -> object:
        before = self.space.stats()
        missing = self.space.missing_bytes(count, length * PAGE, owner=owner)
        extents = self.space.reserve_many(count, length * PAGE, owner=owner, speed_classes=classes)
        assert (extents is None) == (missing > 0)
        if extents is None:
            self.is_short = True
            assert self.space.stats() == before
            assert missing <= count * length * PAGE
            return multiple()
        for extent in extents:
            self._claim(extent, extent)
            self.owners[extent] = owner
        return multiple(*extents)

    @rule(extent=consumes(held))
    def release(self, extent: Extent) -> None:
        self.space.release(extent)
        if extent in self.pins:
            self.released.add(extent)
        else:
            del self.owners[extent]
            self._free(extent, extent)

    @rule(extent=consumes(held))
    def quarantine(self, extent: Extent) -> None:
        self.space.quarantine(extent)
        del self.owners[extent]
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
                del self.owners[extent]
                self._free(extent, extent)

    @rule(target=filling, volume=st.integers(0, 2), limit=LENGTHS)
    def start_fill(self, volume: int, limit: int) -> object:
        if volume not in {index for index, _ in self.pages}:
            return multiple()
        fresh = [page for page in sorted(self.unwritten) if page[0] == volume and self.pages[page] == "free"]
        extent = self.space.next_unwritten(volume, limit * PAGE)
        assert (extent is None) == (not fresh or self.is_short)
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
            self.is_short = self.is_short and not added

    @invariant()
    def held_bytes_agree(self) -> None:
        if hasattr(self, "space"):
            for owner in ("a", "b", ""):
                assert self.space.held_bytes(owner) == self._held_pages(owner) * PAGE

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


@pytest.mark.slow
def test_every_page_has_one_holder_and_is_given_to_who_may_take_it(run_fixed: Callable[..., None]) -> None:
    run_fixed(SpaceMachine)


@pytest.mark.slow
def test_the_same_in_lives_that_no_run_had_before(capsys: pytest.CaptureFixture[str]) -> None:
    run_new(SpaceMachine, capsys)
