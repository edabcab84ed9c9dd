"""The memory catalog and the faulty one pass the contract, and fail as they promise."""

from __future__ import annotations

from pathlib import Path

import pytest

from paramstore.errors import CatalogError
from paramstore.storage.catalog import Catalog, Change
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
