"""Memory of a stated kind."""

from __future__ import annotations

from pathlib import Path

import pytest

from paramstore.bench.limits import pages
from paramstore.bench.limits.pages import HUGE_PAGE_BYTES, MemoryKind, Slab


@pytest.mark.parametrize("kind", pages.available_kinds())
def test_slab_is_writable_and_rounded_to_huge_pages(kind: MemoryKind) -> None:
    slab = Slab(kind, HUGE_PAGE_BYTES + 1)
    try:
        slab.view[-1] = 7
        assert slab.view[-1] == 7
        assert slab.length_bytes == len(slab.view) == 2 * HUGE_PAGE_BYTES
    finally:
        slab.close()


def test_kinds_of_the_daemons_arenas_are_among_those_that_are_measured() -> None:
    assert {pages.param_kind(), pages.optim_kind(), MemoryKind.SHARED_SMALL} <= set(pages.available_kinds())


def test_chosen_setting_is_the_word_in_brackets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "TRANSPARENT", tmp_path)
    (tmp_path / "enabled").write_text("always [madvise] never\n")
    assert pages.chosen("enabled") == "madvise"
    assert pages.chosen("absent") == "unknown"


def test_private_small_pages_are_left_out_where_the_kernel_makes_everything_huge(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "TRANSPARENT", tmp_path)
    (tmp_path / "enabled").write_text("[always] madvise never\n")
    assert MemoryKind.PRIVATE_SMALL not in pages.available_kinds()
