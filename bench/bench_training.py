"""Measures training throughput of a Qwen3-MoE-shaped model on real text, as a user of `ps.hf` has it: experts in the store with
host budgets of 100, 50, 25 and 10 % of the states, beside the unmodified model with everything in memory. Each budget resumes where
the one before it stopped. The losses of the rule `exact` must be those in memory, and the host budget must hold: else the run ends.
Writes bench/results/training-<date>.json and a picture next to it.

Run it on an idle machine: `python bench/bench_training.py [--quick] [--budgets 1.0,0.5] [--rules exact] [--dir DIR] [--out FILE]`.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

import paramstore as ps
from paramstore.bench.context import GIGA, Bench
from paramstore.bench.limits import pages
from paramstore.bench.limits.raw import RawFile
from paramstore.bench.process import peak_bytes, reset_peak
from paramstore.bench.report.rows import SUBJECT, Row
from paramstore.bench.service.daemon import Service, serving
from paramstore.config import Config
from paramstore.demo.batches import BatchSampler
from paramstore.demo.corpus import Corpus, open_corpus
from paramstore.engine.capacity.budget import staging_bytes_of
from paramstore.engine.transfers.advance import ADVANCE_LOOKAHEAD_RECORDS
from paramstore.errors import ConfigError
from paramstore_bench.frame import Script
from paramstore_bench.step_plot import draw_training
from paramstore_bench.training import EXACT, RULES, TARGETS, PairedStep, check_host_peak, check_losses, row_of
from training_models import QUICK, InMemory, Shape, Step, Stored, run, save_model

MEMORY = "memory"
DENSE = "dense.pt"
ROUNDS, QUICK_ROUNDS = 2, 1
LEAD_STEPS, STEPS = 1, 3
"""Numbers of steps in a row. There is a lead step, since in any later one the update of the step before it runs beside forward."""
CORPUS_BYTES, QUICK_CORPUS_BYTES = 8 << 20, 1 << 20
LIMIT_BYTES = 640 << 20
ROUNDING_BYTES = 2 << 20
"""Bytes to allow for rounding: segments and staging are whole huge pages."""
SETTINGS: dict[str, object] = {"held_steps": 0, "scrub_days": 0}
SMALL_IO_WORKERS, SMALL_PIECE_BYTES = 4, 4 << 20
"""Settings of a daemon where the default staging leaves no room for four records."""
SEED = 3


SCRIPT = Script("training", __doc__, quick="a small model, one budget: a check, not figures to quote", draw=draw_training)


def main() -> int:
    """Runs the bench."""
    parser = SCRIPT.parser()
    parser.add_argument("--budgets", help="shares of the states, of 1.0, 0.5, 0.25, 0.1; default: all of them")
    parser.add_argument("--rules", default=",".join(RULES), help="exact, or exact,touched: a store on the disk for each")
    arguments = parser.parse_args()
    shape = QUICK if arguments.quick else Shape()
    facts = {"model": f"{shape}, {shape.expert_parameters} expert parameters, bf16"}
    return SCRIPT.run(arguments, partial(measure, arguments=arguments, shape=shape), facts=facts)


def measure(bench: Bench, *, arguments: argparse.Namespace, shape: Shape) -> list[Row]:
    """Measures all budgets under all rules. Raises ConfigError where the arguments name others."""
    shares = budget_shares(arguments.budgets or ("0.5" if arguments.quick else ",".join(map(str, TARGETS))))
    rules = arguments.rules.split(",")
    if rules[0] != EXACT or not set(rules) <= set(RULES):
        raise ConfigError(f"--rules {arguments.rules}: write exact, or exact,touched")
    bench.tell("the corpus is built")
    corpus = open_corpus(bench.directory / "corpus", size_bytes=QUICK_CORPUS_BYTES if arguments.quick else CORPUS_BYTES)
    return measure_all(bench, shape, corpus, shares, rules, rounds=QUICK_ROUNDS if arguments.quick else ROUNDS)


def budget_shares(text: str) -> list[float]:
    """Parses the shares in a text like `0.5,0.25`. Raises ConfigError."""
    found = [share for share in TARGETS if str(share) in text.split(",")]
    if len(found) != len(text.split(",")):
        raise ConfigError(f"--budgets {text}: write some of {', '.join(map(str, TARGETS))}, with commas")
    return found


def measure_all(
    bench: Bench, shape: Shape, corpus: Corpus, shares: list[float], rules: list[str], *, rounds: int
) -> list[Row]:
    """Makes the rows: of the import under the smallest budget, then of each budget; one store per rule."""
    checkpoint = bench.directory / "checkpoint"
    save_model(shape, checkpoint, seed=SEED)
    schema = ps.adamw_schema(
        {"gate_up_proj": (2 * shape.inner, shape.hidden), "down_proj": (shape.hidden, shape.inner)}, updates=EXACT,
        param_dtype=torch.bfloat16,
    )  # fmt: skip
    count = min(shape.layers * shape.experts, max(2, LIMIT_BYTES // schema.record_bytes))
    sampler = BatchSampler(corpus, batch=shape.rows, context=shape.context, seed=SEED)
    with ExitStack() as stack:
        raw_folder = stack.enter_context(bench.folder("raw"))
        raw = stack.enter_context(
            bench.raw_file(raw_folder, pages.optim_kind(), record_bytes=schema.record_bytes, record_count=count)
        )
        folders = {rule: stack.enter_context(bench.folder(rule)) for rule in rules}
        budgets = {share: budget_of(round(share * shape.states_bytes), schema) for share in shares}
        smallest = min(budgets.values(), key=lambda budget: budget.size_bytes)
        rows = [_import(bench, checkpoint, folders[rule], rule, budget=smallest) for rule in rules]
        memory = InMemory(checkpoint)
        for number, (share, budget) in enumerate(budgets.items()):
            bench.tell(f"training, host budget {share:.0%} of the states")
            with ExitStack() as cells:
                ours = {
                    rule: cells.enter_context(resumed(bench, checkpoint, folders[rule], rule, budget=budget))
                    for rule in rules
                }
                rounds_taken = [
                    _round(memory, ours, [sampler.draw().input_BT for _ in range(LEAD_STEPS + STEPS)], raw, turn)
                    for turn in range(rounds)
                ]
                for rule, cell in ours.items():
                    cell.commit_s = cell.stored.save(folders[rule] / DENSE, number + 1)
                rows += [_row(share, shape, cell, [taken[rule] for taken in rounds_taken]) for rule, cell in ours.items()]
    return rows


@dataclass(frozen=True, slots=True)
class Budget:
    """Host budget of a daemon. settings: of its `ServeOptions`."""

    size_bytes: int
    settings: dict[str, object]


def budget_of(size_bytes: int, schema: ps.Schema) -> Budget:
    """Makes a budget of `size_bytes`: with less staging where the default takes too much of it, or of about the least that a daemon
    needs, since a share of a quick model is less than that."""
    config = Config()
    if size_bytes >= _least_bytes(schema, config.io_workers, config.piece_bytes):
        return Budget(size_bytes, SETTINGS)
    least_bytes = _least_bytes(schema, SMALL_IO_WORKERS, SMALL_PIECE_BYTES)
    return Budget(max(size_bytes, least_bytes), {**SETTINGS, "io_workers": SMALL_IO_WORKERS, "piece_bytes": SMALL_PIECE_BYTES})


def _least_bytes(schema: ps.Schema, io_workers: int, piece_bytes: int) -> int:
    advance_buffers = len(os.sched_getaffinity(0)) + ADVANCE_LOOKAHEAD_RECORDS
    staging_bytes = staging_bytes_of(schema, io_threads=io_workers, piece_bytes=piece_bytes, advance_buffers=advance_buffers)
    return 4 * (schema.record_bytes + schema.part("param").image_bytes) + staging_bytes + ROUNDING_BYTES


@dataclass(slots=True)
class Running:
    """A daemon, and the model that trains on it. resume_s, commit_s: the times of its checkpoints."""

    rule: str
    service: Service
    stored: Stored
    resume_s: float
    resume_peak_bytes: int
    commit_s: float = 0.0

    def moved(self) -> tuple[int, int]:
        """Bytes read and written so far, of both parts, for whatever reason."""
        figures = self.service.stats()["namespaces"][self.rule]
        return int(figures["bytes_read"]), int(figures["bytes_written"])

    def host_peak_bytes(self, what: str) -> int:
        """Most bytes of host memory, by the kernel's count. Raises CapacityError where that is above the budget."""
        peak = int(self.service.stats()["tiers"]["host"]["kernel_peak_bytes"])
        check_host_peak(peak, self.service.host_budget_bytes, what=f"{what}, {self.rule}")
        return peak


@contextmanager
def running(bench: Bench, checkpoint: Path, folder: Path, rule: str, *, budget: Budget) -> Iterator[Running]:
    """Runs a daemon on the store in `folder`, and a model that trains on it: new from the checkpoint, or resumed."""
    with serving(folder, host_budget_bytes=budget.size_bytes, settings=budget.settings) as service:
        started_s = bench.clock.now_s()
        stored = Stored(checkpoint, service.store, name=rule, updates=rule)
        if (folder / DENSE).exists():
            stored.resume(folder / DENSE)
        made = Running(rule, service, stored, bench.clock.now_s() - started_s, 0)
        made.resume_peak_bytes = made.host_peak_bytes("import or resume")
        yield made


@contextmanager
def resumed(bench: Bench, checkpoint: Path, folder: Path, rule: str, *, budget: Budget) -> Iterator[Running]:
    """Does what `running` does, and waits until the daemon has nothing of its own to do."""
    with running(bench, checkpoint, folder, rule, budget=budget) as cell:
        cell.service.wait_until_quiet(bench.clock)
        yield cell


def _import(bench: Bench, checkpoint: Path, folder: Path, rule: str, *, budget: Budget) -> Row:
    """Makes the row of the first load, which puts the checkpoint's experts into a new store."""
    bench.tell(f"import, {rule}")
    before_bytes = begin_peak()
    with running(bench, checkpoint, folder, rule, budget=budget) as cell:
        client_bytes = peak_bytes(os.getpid()) - before_bytes
        counted = cell.service.stats()["namespaces"][rule]
        written_bytes = float(counted["keys"]) * float(counted["record_bytes"])
    parts = {
        "import_s": cell.resume_s, "host_peak_bytes": float(cell.resume_peak_bytes), "host_budget_bytes": float(budget.size_bytes),
        "client_peak_bytes": float(client_bytes),
    }  # fmt: skip
    return Row(
        name="import", case=f"{rule}, the smallest host budget", subject=SUBJECT, record_bytes=int(counted["record_bytes"]),
        value=written_bytes / cell.resume_s / GIGA, unit="GB/s", parts=parts,
    )  # fmt: skip


def begin_peak() -> int:
    """Begins the count of this process's peak anew; gives what is resident now."""
    reset_peak()
    return peak_bytes(os.getpid())


def _round(
    memory: InMemory, ours: dict[str, Running], batches: list[Tensor], raw: RawFile, turn: int
) -> dict[str, tuple[list[PairedStep], int]]:
    """Trains in memory and by each rule; gives for each rule the steps after the lead-in beside those in memory, and the growth of
    this process meanwhile. The order alternates from round to round. Raises StepMismatch."""
    taken: dict[str, list[Step]] = {}
    moved_bytes: dict[str, tuple[float, float]] = {}
    grown_bytes: dict[str, int] = {}

    def train(rule: str) -> None:
        cell, before_bytes = ours[rule], begin_peak()
        lead = [cell.stored.step(batch) for batch in batches[:LEAD_STEPS]]
        before = cell.moved()
        taken[rule] = [*lead, *run(cell.stored, batches[LEAD_STEPS:])]
        read, written = (late - early for late, early in zip(cell.moved(), before, strict=True))
        moved_bytes[rule] = read / STEPS, written / STEPS
        grown_bytes[rule] = peak_bytes(os.getpid()) - before_bytes

    for who in (MEMORY, *ours) if turn % 2 else (*reversed(ours), MEMORY):
        if who == MEMORY:
            taken[MEMORY] = run(memory, batches)
        else:
            train(who)
    order = range(raw.record_count)
    read_rate, write_rate = raw.read(order).rate, raw.write(order).rate
    check_losses([step.loss for step in taken[EXACT]], [step.loss for step in taken[MEMORY]], what=f"round {turn}")
    return {
        rule: (
            [
                PairedStep(mine.phases, theirs.phases, read / read_rate + written / write_rate, read + written)
                for mine, theirs in list(zip(taken[rule], taken[MEMORY], strict=True))[LEAD_STEPS:]
            ],
            grown_bytes[rule],
        )
        for rule, (read, written) in moved_bytes.items()
    }


def _row(share: float, shape: Shape, cell: Running, rounds: list[tuple[list[PairedStep], int]]) -> Row:
    """Makes the row of one cell. Raises CapacityError where the host budget did not hold."""
    peak = cell.host_peak_bytes(f"host budget {share:.0%} of the states")
    counted = cell.service.stats()["namespaces"][cell.rule]
    facts = {
        "optim_slots": float(counted["optim"]["slots"]), "param_slots": float(counted["param"]["slots"]),
        "records": float(counted["keys"]), "host_budget_bytes": float(cell.service.host_budget_bytes),
        "host_peak_bytes": float(peak), "own_memory_bytes": float(cell.service.own_memory_bytes()),
        "client_peak_bytes": float(max(grown for _, grown in rounds)), "commit_s": cell.commit_s,
        "resume_s": cell.resume_s, "resume_host_peak_bytes": float(cell.resume_peak_bytes),
        "budget_share": cell.service.host_budget_bytes / shape.states_bytes,
    }  # fmt: skip
    steps = [step for taken, _ in rounds for step in taken]
    return row_of(share, steps, tokens=shape.tokens, record_bytes=int(counted["record_bytes"]), facts=facts, rule=cell.rule)


if __name__ == "__main__":
    sys.exit(main())
