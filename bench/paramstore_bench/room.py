"""Measures what a training namespace takes of its volumes, and what it loses to one that has room for two steps more.

Every record changes at every step, every step is committed, nobody waits for a commit before the next step's gradients are pushed,
and a reader stands on a step until it loses it or ten steps have passed. The other side is the same store with `held_steps=2`: five
times the state. There an update may be written while the commit before it still is; here it waits for the space of the step that
goes with that commit. What is computed meanwhile is a product of matrices, in one thread.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter

import torch

import paramstore as ps
from paramstore.bench.context import Bench
from paramstore.bench.pairs import Pairs, Sample, sample_pairs
from paramstore.bench.plan import MIB, RecordSize
from paramstore.bench.report.rows import SUBJECT, Row, Target, judged
from paramstore.bench.service.daemon import Service, serving
from paramstore.bench.service.experts import WAIT_S, Gradients, adamw_schema, create_adamw_namespace
from paramstore.core.schema import Schema
from paramstore.storage.format.structures import Superblock, extents_start_bytes
from paramstore_client.connection.ticket import Ticket

RECORD = RecordSize(MIB)
RECORDS = 64
BUDGETS = {"all in memory": 512 * MIB, "part of it in memory": 56 * MIB}
STEPS, ROUNDS, LEAST_STEPS = 4, 7, 100
READER_STEPS = 10
SHARE_TARGET, PACE_TARGET = 3.15, 0.95
MATRIX = 512
NAMESPACE = "training"
BLOCK_BYTES = 512
"""Unit of `st_blocks`."""


class Trainer:
    """A training loop over one store, and a reader that lags behind it."""

    def __init__(self, service: Service, schema: Schema, count: int) -> None:
        self.service = service
        self._namespace = create_adamw_namespace(service.store, NAMESPACE, schema, count)
        self._gradients = Gradients(self._namespace, schema, count)
        self._matrix = torch.randn((MATRIX, MATRIX), generator=torch.Generator().manual_seed(1))
        self._reader = service.store.open_namespace(NAMESPACE)
        self.step = 1
        self.drops = 0
        """How often the reader had lost its step when it moved on."""

    def train(self, steps: int, products: int) -> float:
        """Makes so many steps, with so many products of matrices in each; gives their seconds, the last commit's end included."""
        started_s, committed = perf_counter(), None
        for _ in range(steps):
            committed = self._train_one(products)
        assert committed is not None
        committed.wait(WAIT_S)
        return perf_counter() - started_s

    def _train_one(self, products: int) -> Ticket[dict[str, object]]:
        self.step += 1
        if self.step % READER_STEPS == 0:
            self.drops += self._reader.view_step not in self._namespace.steps()
            self._reader.refresh()
        product = self._matrix
        for _ in range(products):
            product = torch.tanh(product @ self._matrix)
        self._gradients.push(self.step)
        self._namespace.apply(ps.AdamW(lr=1e-4)).wait(WAIT_S)
        return self._namespace.commit(self.step)


def measure_room(bench: Bench) -> list[Row]:
    """Makes the rows of each host budget: steps a second beside those with room for two more, and what the volumes took."""
    schema = adamw_schema(RECORD, torch.bfloat16)
    rows, threads = list[Row](), torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for case, budget_bytes in BUDGETS.items():
            with trainers(bench, schema, budget_bytes) as (ours, roomy):
                bench.tell(f"room on volumes, {case}")
                products = products_of(ours)
                for name, count in (("back to back", 0), ("with as long computing", products)):
                    sides = [partial(_sample, trainer, count) for trainer in (ours, roomy)]
                    rows.append(_pace(f"{case}, {name}", sample_pairs(ROUNDS, *sides), ours, schema))
                if ours.step < LEAST_STEPS:
                    ours.train(LEAST_STEPS - ours.step, 0)
                rows.append(_share(case, ours, roomy, schema))
    finally:
        torch.set_num_threads(threads)
    return rows


@contextmanager
def trainers(bench: Bench, schema: Schema, budget_bytes: int) -> Iterator[tuple[Trainer, Trainer]]:
    """Runs two daemons, with as many records: without room for older steps, and with room for two."""
    with (
        bench.folder("ours") as ours, bench.folder("roomy") as roomy,
        serving(ours, host_budget_bytes=budget_bytes, settings={"scrub_days": 0}) as tight,
        serving(roomy, host_budget_bytes=budget_bytes, settings={"scrub_days": 0, "held_steps": 2}) as wide,
    ):  # fmt: skip
        made = Trainer(tight, schema, RECORDS), Trainer(wide, schema, RECORDS)
        for service in (tight, wide):
            service.wait_until_quiet(bench.clock)
        yield made


def products_of(trainer: Trainer) -> int:
    """How many products take as long as a step without them."""
    seconds = median(trainer.train(STEPS, 0) / STEPS for _ in range(3))
    matrix = torch.randn((MATRIX, MATRIX), generator=torch.Generator().manual_seed(1))
    started_s, count, product = perf_counter(), 0, matrix
    while perf_counter() - started_s < seconds:
        product, count = torch.tanh(product @ matrix), count + 1
    return count


def _sample(trainer: Trainer, products: int, _: int) -> Sample:
    return Sample(STEPS, trainer.train(STEPS, products))


def _pace(case: str, pairs: Pairs, ours: Trainer, schema: Schema) -> Row:
    row = Row(
        name="training that commits every step", case=case, subject=SUBJECT, record_bytes=schema.record_bytes, unit="steps/s",
        value=pairs.rate, limit=pairs.limit_rate, against="held_steps=2, five times the state", ratio=pairs.ratio,
        ratio_min=pairs.ratio_min, ratio_max=pairs.ratio_max, target=Target("ratio", ">=", PACE_TARGET),
        parts={**pairs.parts(), "steps_lost_by_a_reader": ours.drops},
    )  # fmt: skip
    return judged(row)


def _share(case: str, ours: Trainer, roomy: Trainer, schema: Schema) -> Row:
    state_bytes = RECORDS * schema.record_bytes
    start_bytes = extents_start_bytes(Superblock(bytes(16), bytes(16), 0))
    taken = {name: _volume_bytes(side.service) - start_bytes for name, side in (("ours", ours), ("held_steps=2", roomy))}
    row = Row(
        name="volumes", case=f"{case}, {RECORDS} records, after {ours.step} steps", subject=SUBJECT, unit="times the state",
        record_bytes=schema.record_bytes, value=taken["ours"] / state_bytes, target=Target("value", "<=", SHARE_TARGET),
        parts={
            "with_held_steps": taken["held_steps=2"] / state_bytes, "state_bytes": state_bytes, "note_bytes": start_bytes,
            "catalog_bytes": _catalog_bytes(ours.service),
        },
    )  # fmt: skip
    return judged(row)


def _volume_bytes(service: Service) -> int:
    """Bytes that the file system has allocated for the volume."""
    (volume,) = service.stats()["volumes"].values()
    path = Path(volume["path"])
    return (path if path.is_file() else next(path.glob("*"))).stat().st_blocks * BLOCK_BYTES


def _catalog_bytes(service: Service) -> int:
    folder = Path(service.stats()["catalog"]["dir"]) / "catalog"
    return sum(file.stat().st_blocks * BLOCK_BYTES for file in folder.iterdir())
