"""A catalog takes the place of another, which is kept, whatever happens on the way."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from paramstore.errors import CatalogError
from paramstore.fsck import swap
from paramstore.fsck.swap import replace_catalog
from paramstore.storage.catalog.base import Change, NamespaceRow
from paramstore.storage.catalog.lmdb_catalog import LmdbCatalog

STORE = b"s" * 16


def change_of(name: str) -> Change:
    schema: dict[str, object] = {"kind": "param", "fields": [["w", [4], "uint8"]], "gradient_dtype": ""}
    return Change(put_namespaces=(NamespaceRow(name, schema, (0,), 1, epoch=2, sequence=1),))


def names_in(path: Path) -> list[str]:
    catalog = LmdbCatalog(path)
    try:
        return list(catalog.load().namespaces)
    finally:
        catalog.close()


def test_the_old_catalog_is_kept_under_the_next_free_name(tmp_path: Path) -> None:
    assert replace_catalog(tmp_path, STORE, change_of("first")) is None
    assert replace_catalog(tmp_path, STORE, change_of("second")) == tmp_path / "catalog.before-rebuild-1"
    assert replace_catalog(tmp_path, STORE, change_of("third")) == tmp_path / "catalog.before-rebuild-2"
    found = {path.name: names_in(path) for path in tmp_path.iterdir()}
    assert found == {"catalog": ["third"], "catalog.before-rebuild-1": ["first"], "catalog.before-rebuild-2": ["second"]}


def test_what_an_interrupted_rebuild_left_is_made_anew(tmp_path: Path) -> None:
    (tmp_path / "catalog.rebuilding").mkdir()
    (tmp_path / "catalog.rebuilding" / "data.mdb").write_bytes(b"half")
    replace_catalog(tmp_path, STORE, change_of("moe"))
    assert [path.name for path in tmp_path.iterdir()] == ["catalog"]


@pytest.mark.parametrize("died_at", range(1, 8))
def test_the_old_catalog_survives_a_rebuild_that_died_anywhere_and_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, died_at: int
) -> None:
    """Every durable act of the swap is a place to die: a flush, a rename, the exchange."""
    replace_catalog(tmp_path, STORE, change_of("first"))
    acts = count(1)

    def dying(act: Callable[..., Any]) -> Callable[..., Any]:
        def acted(*arguments: Any) -> Any:
            if next(acts) == died_at:
                raise KeyboardInterrupt
            return act(*arguments)

        return acted

    with monkeypatch.context() as patched:
        patched.setattr(swap, "flush_directory", dying(swap.flush_directory))
        patched.setattr(swap, "_exchange", dying(swap._exchange))
        patched.setattr(Path, "rename", dying(Path.rename))
        with suppress(KeyboardInterrupt):
            replace_catalog(tmp_path, STORE, change_of("second"))
    assert names_in(tmp_path / "catalog") in (["first"], ["second"])
    kept = replace_catalog(tmp_path, STORE, change_of("third"))
    found = {path.name: names_in(path) for path in tmp_path.iterdir()}
    assert kept is not None
    assert found["catalog"] == ["third"]
    assert ["first"] in found.values(), "the catalog that was there before the first rebuild"
    assert "catalog.rebuilding" not in found


def test_a_catalog_that_cannot_be_replaced_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replace_catalog(tmp_path, STORE, change_of("first"))

    def refuse(one: Path, other: Path) -> None:
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr("paramstore.fsck.swap._exchange", refuse)
    with pytest.raises(CatalogError, match="cannot be replaced"):
        replace_catalog(tmp_path, STORE, change_of("second"))
    assert names_in(tmp_path / "catalog") == ["first"]
    assert not (tmp_path / "catalog.before-rebuild-1").exists(), "nothing was before this rebuild"


def test_a_new_catalog_whose_name_may_not_be_durable_is_not_called_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    LmdbCatalog(tmp_path / "catalog", store_uuid=b"a" * 16).close()

    def fail(_: Path) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(swap, "flush_directory", fail)
    with pytest.raises(CatalogError, match=r"it was replaced, the old one is .*catalog\.before-rebuild-1"):
        replace_catalog(tmp_path, b"b" * 16, Change())
    catalog = LmdbCatalog(tmp_path / "catalog")
    assert catalog.load().store_uuid == b"b" * 16
    catalog.close()
