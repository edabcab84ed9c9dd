"""The memory catalog and the faulty one pass the contract, and fail as they promise."""

from __future__ import annotations

from pathlib import Path

import pytest

from paramstore.errors import CatalogError
from paramstore.storage.catalog.base import Catalog, Change, NamespaceContents
from paramstore.testing.catalogs import CatalogContract, FaultyCatalog, MemoryCatalog, namespace_row


class TestMemoryCatalog(CatalogContract):
    def make(self, path: Path) -> Catalog:
        catalog = MemoryCatalog()
        catalog.load()
        return catalog

    def reopened(self, catalog: Catalog, path: Path) -> Catalog:
        assert isinstance(catalog, MemoryCatalog)
        return catalog.crash()


class TestFaultyCatalogWithoutFault(CatalogContract):
    def make(self, path: Path) -> Catalog:
        catalog = FaultyCatalog(MemoryCatalog(), fail_at=0, outcome="lost")
        catalog.load()
        return catalog

    def reopened(self, catalog: Catalog, path: Path) -> Catalog:
        catalog.reopen()
        return catalog


def test_a_crashed_memory_catalog_is_of_no_use() -> None:
    catalog = MemoryCatalog()
    catalog.crash()
    with pytest.raises(CatalogError):
        catalog.load()


@pytest.mark.parametrize(("outcome", "survivors"), [("lost", ["a", "d"]), ("durable", ["a", "b", "d"])])
def test_the_chosen_apply_fails_and_later_ones_until_reopened(outcome: str, survivors: list[str]) -> None:
    catalog = FaultyCatalog(MemoryCatalog(), fail_at=2, outcome=outcome)  # type: ignore[arg-type]
    catalog.load()
    catalog.apply(Change(put_namespaces=(namespace_row("a"),)))
    for name in ("b", "c"):
        with pytest.raises(CatalogError):
            catalog.apply(Change(put_namespaces=(namespace_row(name),)))
    catalog.reopen()
    catalog.load()
    catalog.apply(Change(put_namespaces=(namespace_row("d"),)))
    assert sorted(catalog.load().namespaces) == survivors


@pytest.mark.parametrize(("outcome", "survivors"), [("lost", ["a"]), ("durable", ["a", "b"])])
def test_the_next_apply_can_be_told_to_fail(outcome: str, survivors: list[str]) -> None:
    catalog = FaultyCatalog(MemoryCatalog(), fail_at=0, outcome="lost")
    catalog.load()
    catalog.apply(Change(put_namespaces=(namespace_row("a"),)))
    catalog.fail_next(outcome)  # type: ignore[arg-type]
    with pytest.raises(CatalogError):
        catalog.apply(Change(put_namespaces=(namespace_row("b"),)))
    catalog.reopen()
    assert sorted(catalog.load().namespaces) == survivors


def test_a_catalog_made_of_contents_keeps_its_own_copy_of_them() -> None:
    first = MemoryCatalog()
    contents = first.load()
    contents.namespaces["a"] = NamespaceContents(namespace_row("a"))
    second = MemoryCatalog(contents)
    contents.namespaces.clear()
    assert list(second.load().namespaces) == ["a"]
    assert first.load().namespaces == {}
