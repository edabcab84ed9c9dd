"""Rows without the service: raw I/O with every kind of memory the machine gives, and the peers, beside the best of raw."""

from __future__ import annotations

from paramstore.bench.context import Bench, row_of_pairs
from paramstore.bench.limits import pages
from paramstore.bench.limits.raw import ALIGNMENT_BYTES, RawFile, RecordStore
from paramstore.bench.pairs import sample_pairs
from paramstore.bench.plan import MIB, RecordSize, shuffled
from paramstore.bench.report.plot import READ, WRITE
from paramstore.bench.report.rows import RAW, Row


def measure_baseline(bench: Bench, size: RecordSize) -> list[Row]:
    """Two rows, read and write, for each kind of memory and for each peer of `bench`."""
    record_bytes = size.nominal_bytes // ALIGNMENT_BYTES * ALIGNMENT_BYTES
    count = bench.plan.record_count(record_bytes)
    rows: list[Row] = []
    with (
        bench.folder("raw") as folder,
        bench.raw_file(folder, pages.optim_kind(), record_bytes=record_bytes, record_count=count) as raw,
    ):
        for kind in pages.available_kinds():
            bench.tell(f"raw, {kind}, records of {record_bytes / MIB:.3g} MiB")
            with bench.raw_file(folder, kind, record_bytes=record_bytes, record_count=count) as other:
                rows += _rows_beside(bench, raw, other, subject=RAW, case=str(kind))
        for make in bench.peers:
            with bench.folder("peer") as peer_folder:
                peer = make(peer_folder, raw.slab, record_bytes=record_bytes, record_count=count)
                bench.tell(f"{peer.name}, records of {record_bytes / MIB:.3g} MiB")
                rows += _rows_beside(bench, raw, peer, subject=peer.name, case="")
                peer.close()
    return rows


def _rows_beside(bench: Bench, raw: RawFile, other: RecordStore, *, subject: str, case: str) -> list[Row]:
    def order(number: int) -> list[int]:
        return shuffled(raw.record_count, seed=number)

    rounds = bench.plan.peer_rounds
    pairs = {
        READ: sample_pairs(rounds, lambda number: other.read(order(number)), lambda number: raw.read(order(number))),
        WRITE: sample_pairs(rounds, lambda number: other.write(order(number)), lambda number: raw.write(order(number))),
    }
    return [
        row_of_pairs(found, name=name, case=case, subject=subject, record_bytes=raw.record_bytes, against=raw.name)
        for name, found in pairs.items()
    ]
