"""Measures what durability costs: a commit beside the same work done by hand, and reopening a large store.

The limit of a commit makes the same system calls by hand: it overwrites as many records with O_DIRECT, then two copies of a note,
flushes the file once, and puts and drops as many rows of an LMDB environment, in the same order of keys, in one synchronous
transaction. Our commit adds the cut, checksums, headers, and the way to the daemon and back.
"""

from __future__ import annotations

import os
import signal
import struct
import subprocess
import sys
import uuid
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median

import lmdb
import torch

import paramstore as ps
from paramstore.bench.context import Bench
from paramstore.bench.limits import pages
from paramstore.bench.pairs import Pair, Sample, sample_pairs
from paramstore.bench.plan import MIB, RecordSize
from paramstore.bench.report.rows import SUBJECT, Row, Target, judged
from paramstore.bench.service.daemon import Service, serving
from paramstore.bench.service.experts import WAIT_S, adamw_schema, create_adamw_namespace, keys_of
from paramstore.core.key import KeySpace
from paramstore.core.location import Extent, Identity, Located
from paramstore.core.schema import PAGE_BYTES, Schema, round_up
from paramstore.errors import StoreUnavailable
from paramstore.limits import RETAINED_STEPS
from paramstore.storage.catalog.base import Change, NamespaceRow, StepRow, VolumeRow
from paramstore.storage.catalog.base import Row as CatalogRow
from paramstore.storage.catalog.lmdb_catalog import LmdbCatalog
from paramstore.storage.format.notes import format_volume, write_note
from paramstore.storage.format.structures import NOTE_COPIES, CommitNote, Superblock, extents_start_bytes
from paramstore.storage.volume.file_volume import FileVolume

RECORD = RecordSize(256 << 10)
COMMIT_TARGET = 1.15
REOPEN_LAYERS = 100
REOPEN_TARGET_S = 2.0
ROW_KEY = struct.Struct(">BIIIQ")  # tag, namespace, layer, expert, step
ROW_BYTES = 40
"""Approximate size of a row's value in the catalog."""
STEP_ROW_BYTES = 300
"""Approximate size of a step's and of a namespace's row in the catalog."""
MAP_BYTES = 256 * MIB


class RowsEnvironment:
    """Owner of an LMDB environment that takes durable transactions of plain rows."""

    def __init__(self, directory: Path) -> None:
        self._environment = lmdb.open(str(directory), map_size=MAP_BYTES, writemap=False, readahead=False)
        self._step = 0
        self._steps: dict[int, list[int]] = {}
        """Steps for which a record has a row, by record."""

    def put(self, count: int) -> None:
        """Makes one synchronous transaction: adds a row to each of `count` records, drops the one that no retained step needs, and
        replaces a step's row and a namespace's."""
        self._step += 1
        with self._environment.begin(write=True) as transaction:
            for number in range(count):
                steps = self._steps.setdefault(number, [])
                if len(steps) == RETAINED_STEPS:
                    transaction.delete(ROW_KEY.pack(5, 1, 0, number, steps.pop(0)))
                steps.append(self._step)
                transaction.put(ROW_KEY.pack(5, 1, 0, number, self._step), os.urandom(ROW_BYTES))
            for name in (b"step", b"namespace"):
                transaction.put(name, os.urandom(STEP_ROW_BYTES))

    def close(self) -> None:
        self._environment.close()


class Commits:
    """Commits in which the first records of a namespace have changed."""

    def __init__(self, bench: Bench, service: Service, schema: Schema, count: int) -> None:
        self._bench = bench
        self._namespace = create_adamw_namespace(service.store, "commits", schema, count)
        self._schema = schema
        self._keys = keys_of(count)
        self._step = 1

    def commit(self, changed: int, number: int) -> Sample:
        """Makes the first `changed` records dirty, then times a commit until it is durable."""
        generator = torch.Generator().manual_seed(number)
        dtype = getattr(torch, self._schema.gradient_dtype)
        fields = {name: torch.randn(shape, generator=generator).to(dtype) for name, shape, _ in self._schema.specs}
        self._namespace.push(dict.fromkeys(self._keys[:changed], fields))
        self._namespace.apply(ps.AdamW(lr=1e-4)).wait(WAIT_S)
        self._step += 1
        started_s = self._bench.clock.now_s()
        result = self._namespace.commit(self._step).wait(WAIT_S)
        seconds = self._bench.clock.now_s() - started_s
        return Sample(changed, seconds, parts={"daemon_s": float(result["seconds"]), "bytes": float(result["bytes_written"])})


def measure_commits(bench: Bench) -> list[Row]:
    """Makes one row per count of changed records: milliseconds, beside the bare work."""
    schema = adamw_schema(RECORD, torch.float32)
    count = max(bench.plan.commit_sizes)
    budget_bytes = 2 * count * (schema.record_bytes + schema.part("param").image_bytes) + 256 * MIB
    rows = []
    with (
        bench.folder("raw") as folder,
        bench.raw_file(folder, pages.optim_kind(), record_bytes=schema.record_bytes, record_count=count + 1) as raw,
        bench.folder("rows") as rows_folder,
        bench.folder("store") as store_folder,
        serving(store_folder, host_budget_bytes=budget_bytes) as service,
    ):
        bench.tell("commits: records are stored")
        commits = Commits(bench, service, schema, count)
        service.wait_until_quiet(bench.clock)
        environment = RowsEnvironment(rows_folder)
        for number in range(RETAINED_STEPS + 1):
            commits.commit(count, -1 - number)

        start = count * schema.record_bytes
        note = [(start + copy * PAGE_BYTES, raw.slab.view[start : start + PAGE_BYTES]) for copy in range(NOTE_COPIES)]

        def bare(changed: int, _: int) -> Sample:
            written = raw.write(range(changed), after=note)
            started_s = bench.clock.now_s()
            environment.put(changed)
            rows_s = bench.clock.now_s() - started_s
            return replace(written, work=changed, seconds=written.seconds + rows_s, parts={**written.parts, "rows_s": rows_s})

        for changed in bench.plan.commit_sizes:
            bench.tell(f"commits of {changed} records")
            pairs = sample_pairs(bench.plan.commit_rounds, partial(commits.commit, changed), partial(bare, changed))
            rows.append(_commit_row(pairs.pairs, changed, schema.record_bytes))
        environment.close()
    return rows


def _commit_row(pairs: tuple[Pair, ...], changed: int, record_bytes: int) -> Row:
    ratios = [pair.ours.seconds / pair.limit.seconds for pair in pairs]
    parts = {name: median(pair.ours.parts[name] for pair in pairs) for name in pairs[0].ours.parts}
    limits = {f"limit_{name}": median(pair.limit.parts[name] for pair in pairs) for name in pairs[0].limit.parts}
    row = Row(
        name="commit", case=f"{changed} changed records", subject=SUBJECT, record_bytes=record_bytes, unit="ms",
        value=median(pair.ours.seconds for pair in pairs) * 1e3, limit=median(pair.limit.seconds for pair in pairs) * 1e3,
        against="the same writes, one flush and one LMDB transaction", target=Target("ratio", "<=", COMMIT_TARGET),
        ratio=median(ratios), ratio_min=min(ratios), ratio_max=max(ratios), parts={**parts, **limits},
    )  # fmt: skip
    return judged(row)


# --- reopening


def make_sparse_store(directory: Path, *, layers: int, experts: int) -> None:
    """Makes a store with one committed step of layers x experts small records, none of which was ever written."""
    schema = Schema.param({"w": ((1, 2048), "bfloat16")})
    space = KeySpace.of(layers, experts)
    store_uuid, volume_uuid = uuid.uuid4().bytes, uuid.uuid4().bytes
    superblock = Superblock(store_uuid, volume_uuid, 0)
    start_bytes = extents_start_bytes(superblock)
    keys = list(space)
    size_bytes = round_up(start_bytes + len(keys) * schema.record_bytes, MIB)
    (directory / "volume").mkdir(parents=True, mode=0o700)
    volume = FileVolume.create(directory / "volume", index=0, size_bytes=size_bytes)
    format_volume(volume, superblock)
    write_note(volume, superblock, 0, CommitNote("sparse", 1, 1, 0, None, len(keys), 0))
    volume.flush()
    volume.close()
    catalog = LmdbCatalog(directory / "catalog", store_uuid=store_uuid)
    catalog.load()
    extents = (Extent(0, start_bytes + at * schema.record_bytes, schema.record_bytes) for at in range(len(keys)))
    rows = (CatalogRow(0, Located(extent, Identity(1, 0), at)) for at, extent in enumerate(extents))
    change = Change(
        put_namespaces=(NamespaceRow("sparse", schema.describe(), space.layers, space.experts, epoch=1, sequence=1),),
        put_rows=tuple(("sparse", key, row) for key, row in zip(keys, rows, strict=True)),
        put_steps=(("sparse", StepRow(0, 1, 0, len(keys), b"")),),
        put_volumes=(VolumeRow(0, volume_uuid, size_bytes, size_bytes),),
    )
    catalog.reserve(len(keys) + 16)
    catalog.apply(change)
    catalog.close()


def measure_reopen(bench: Bench) -> Row:
    """Measures seconds from the start of the daemon's process, Python's own start included, until it serves."""
    layers, experts = REOPEN_LAYERS, bench.plan.reopen_records // REOPEN_LAYERS
    samples = []
    with bench.folder("large") as folder:
        bench.tell(f"reopening a store of {layers * experts} records")
        make_sparse_store(folder / "store", layers=layers, experts=experts)
        for _ in range(bench.plan.commit_rounds):
            started_s = bench.clock.now_s()
            process = subprocess.Popen(
                [sys.executable, "-m", "paramstore", "serve", "--dir", str(folder / "store")],
                stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
            )  # fmt: skip
            assert process.stdout is not None
            line = process.stdout.readline()
            samples.append(bench.clock.now_s() - started_s)
            process.send_signal(signal.SIGTERM)
            process.communicate()
            if not line.startswith("ready"):
                raise StoreUnavailable(f"the daemon ended with {process.returncode} before it served a large store")
    row = Row(
        name="reopening", case=f"{layers * experts} records", subject=SUBJECT, unit="s", value=median(samples),
        target=Target("value", "<=", REOPEN_TARGET_S), parts={"min_s": min(samples), "max_s": max(samples)},
    )  # fmt: skip
    return judged(row)
