"""Commits beside the bare work, and a store that was never written but opens: so small that only the shape means anything."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from paramstore.bench.context import Bench
from paramstore.bench.plan import Plan
from paramstore.storage.catalog.lmdb_catalog import LmdbCatalog
from paramstore.storage.recovery import open_store
from paramstore.storage.volume.file_volume import FileVolume
from paramstore_bench.commits import make_sparse_store, measure_commits, measure_reopen

TINY = replace(Plan.quick(), commit_rounds=2, commit_sizes=(1, 3), reopen_records=300)


def test_a_sparse_store_is_one_that_recovery_accepts(tmp_path: Path) -> None:
    make_sparse_store(tmp_path / "store", layers=3, experts=50)
    catalog = LmdbCatalog(tmp_path / "store" / "catalog")
    volume = FileVolume.open(tmp_path / "store" / "volume", index=0)
    try:
        recovered = open_store(catalog.load(), {0: volume})
    finally:
        volume.close()
        catalog.close()
    ledger = recovered.ledgers["sparse"]
    assert ledger.committed_step == 0
    assert len(set(ledger.extents())) == 150


@pytest.mark.slow
def test_every_count_of_records_has_its_row_with_what_it_is_made_of(tmp_path: Path) -> None:
    rows = measure_commits(Bench(TINY, tmp_path))
    assert [row.case for row in rows] == ["1 changed records", "3 changed records"]
    for row, count in zip(rows, TINY.commit_sizes, strict=True):
        assert row.record_bytes is not None
        assert row.parts["bytes"] == count * row.record_bytes
        assert row.ratio is not None
        assert row.parts.keys() >= {"daemon_s", "limit_flush_s", "limit_rows_s"}
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_reopening_is_timed_from_the_start_of_the_process(tmp_path: Path) -> None:
    row = measure_reopen(Bench(TINY, tmp_path))
    assert row.case == "300 records"
    assert 0 < row.parts["min_s"] <= row.value <= row.parts["max_s"]
    assert list(tmp_path.iterdir()) == []
