"""Training throughput of a Qwen3-MoE-shaped model on real text: experts in the store with host budgets of 100, 50, 25 and 10 % of
the states, beside everything in memory. Writes bench/results/training-<date>.json and a picture next to it.

Run it on an idle machine: `python bench/bench_training.py [--quick] [--budgets 1.0,0.5,0.25,0.1] [--dir DIR] [--out FILE]`.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from bench_tiers import check_out
from rich.console import Console
from training_models import QUICK, InMemory, Shape, Stored, Trained

import paramstore as ps
from paramstore.bench import machine, pages, table
from paramstore.bench.context import Bench
from paramstore.bench.experts import WAIT_S
from paramstore.bench.plan import Plan
from paramstore.bench.raw import RawFile
from paramstore.bench.report import Report, Row, encode
from paramstore.bench.service import Service, serving
from paramstore.bench.step_plot import draw_training
from paramstore.bench.training import TARGETS, PairedStep, row_of
from paramstore.cli.exits import exit_code
from paramstore.cli.signals import end_as_interrupt
from paramstore.config import Config
from paramstore.demo.batches import BatchSampler
from paramstore.demo.corpus import Corpus, open_corpus
from paramstore.errors import ConfigError, ParamStoreError

RESULTS = Path(__file__).parent / "results"
NAMESPACE = "experts"
STEPS, QUICK_STEPS, WARM_UP_STEPS = 7, 2, 2
CORPUS_BYTES, QUICK_CORPUS_BYTES = 8 << 20, 1 << 20
LIMIT_BYTES = 640 << 20
ROUNDING_BYTES = 16 << 20
"""Segments and staging are whole huge pages."""
SEED = 3


def main() -> int:
    """0 when every target holds, 1 otherwise: the figures are written either way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a small model, one budget: a check, not figures to quote")
    parser.add_argument("--budgets", help="shares of the states, of 1.0, 0.5, 0.25, 0.1; default: all of them")
    parser.add_argument("--dir", type=Path, default=Path(), help="a directory on the disk in question")
    parser.add_argument("--out", type=Path, help="the JSON file; default: bench/results/training-<date>.json")
    arguments = parser.parse_args()
    file = arguments.out or RESULTS / f"training-{machine.now()[:10]}.json"
    default = "0.5" if arguments.quick else ",".join(map(str, TARGETS))
    try:
        check_out(file)
        shares = budget_shares(arguments.budgets or default)
        return measure(file, arguments.dir, shares, is_quick=arguments.quick)
    except ParamStoreError as error:
        sys.stderr.write(f"bench_training: {type(error).__name__}: {error}\n")
        return exit_code(error)
    except KeyboardInterrupt:
        return 130


def budget_shares(text: str) -> list[float]:
    """The shares in `0.5,0.25`. Raises ConfigError."""
    found = [share for share in TARGETS if str(share) in text.split(",")]
    if len(found) != len(text.split(",")):
        raise ConfigError(f"--budgets {text}: write some of {', '.join(map(str, TARGETS))}, with commas")
    return found


def measure(file: Path, directory: Path, shares: list[float], *, is_quick: bool) -> int:
    """Runs the bench, writes `file` and the picture, and prints the table."""
    command = "python bench/bench_training.py" + (" --quick" if is_quick else "")
    end_as_interrupt()
    progress, date = Console(stderr=True), machine.now()
    shape, steps = (QUICK, QUICK_STEPS) if is_quick else (Shape(), STEPS)
    with progress.status("bench training") as status, tempfile.TemporaryDirectory(prefix="bench-", dir=directory) as folder:
        bench = Bench(Plan(), Path(folder), tell=status.update)
        started_s = bench.clock.now_s()
        bench.tell("the corpus is built")
        corpus = open_corpus(bench.directory / "corpus", size_bytes=QUICK_CORPUS_BYTES if is_quick else CORPUS_BYTES)
        rows = measure_all(bench, shape, corpus, shares, steps=steps)
        seconds = bench.clock.now_s() - started_s
    facts = {**machine.describe(directory), "model": f"{shape}, {shape.expert_parameters} expert parameters, bf16"}
    report = Report(machine=facts, commit=machine.commit(), command=command, date=date, seconds=seconds, rows=rows)
    file.write_bytes(encode(report))
    draw_training(report, file.with_suffix(".png"))
    table.render(report, Console())
    progress.print(f"written: {file}, {file.with_suffix('.png')}")
    return 1 if report.short_rows else 0


def measure_all(bench: Bench, shape: Shape, corpus: Corpus, shares: list[float], *, steps: int) -> list[Row]:
    """One row per budget, over one store."""
    schema = ps.adamw_schema(shape.fields(), param_dtype=torch.bfloat16)
    memory = InMemory(shape, seed=SEED)
    count = min(shape.layers * shape.experts, max(2, LIMIT_BYTES // schema.record_bytes))
    rows = []
    with (
        bench.folder("raw") as raw_folder,
        bench.raw_file(raw_folder, pages.optim_kind(), record_bytes=schema.record_bytes, record_count=count) as raw,
        bench.folder("store") as folder,
    ):
        for share in shares:
            bench.tell(f"training, host budget {share:.0%} of the states")
            budget_bytes = max(round(share * shape.expert_parameters * 12), least_budget_bytes(schema))
            with opened(folder, schema, shape, memory, budget_bytes=budget_bytes) as (service, namespace):
                service.wait_until_quiet(bench.clock)
                stored = Stored(shape, namespace, seed=SEED)
                rows.append(_measure_cell(bench, shape, corpus, share, (memory, stored), service, raw, steps=steps))
    return rows


def least_budget_bytes(schema: ps.Schema) -> int:
    """What a daemon needs at least, about: quick models are so small that a share of them is less."""
    staging_bytes = Config().io_workers * max(field.length_bytes for field in schema.stored.fields)
    return 4 * (schema.record_bytes + schema.part("param").image_bytes) + staging_bytes + ROUNDING_BYTES


@contextmanager
def opened(
    folder: Path, schema: ps.Schema, shape: Shape, memory: InMemory, *, budget_bytes: int
) -> Iterator[tuple[Service, ps.Namespace]]:
    """A daemon on the store in `folder`, and its namespace opened for writing; made from the model in memory at first."""
    with serving(folder, host_budget_bytes=budget_bytes, settings={"held_steps": 0, "scrub_days": 0}) as service:
        if service.store.namespaces():
            namespace = service.store.open_namespace(NAMESPACE, mode="write")
        else:
            namespace = service.store.create_namespace(NAMESPACE, schema, layers=shape.layers, experts=shape.experts)
            namespace.initialize(lambda key: memory.expert(*key))
            namespace.commit(1).wait(WAIT_S)
        yield service, namespace


def _measure_cell(
    bench: Bench, shape: Shape, corpus: Corpus, share: float, models: tuple[Trained, Trained], service: Service, raw: RawFile,
    *, steps: int,
) -> Row:  # fmt: skip
    memory, stored = models
    sampler = BatchSampler(corpus, batch=shape.rows, context=shape.context, seed=SEED)
    taken = []
    for number in range(-WARM_UP_STEPS, steps):
        batch = sampler.draw().input_BT
        before = moved(service)
        if number % 2:
            in_memory, ours = memory.step(batch), stored.step(batch)
        else:
            ours, in_memory = stored.step(batch), memory.step(batch)
        after, order = moved(service), range(raw.record_count)
        if number < 0:
            continue
        read_bytes, written_bytes = (late - early for late, early in zip(after, before, strict=True))
        io_s = read_bytes / raw.read(order).rate + written_bytes / raw.write(order).rate
        taken.append(PairedStep(ours, in_memory, io_s, read_bytes + written_bytes))
    figures = service.stats()
    counted, host = figures["namespaces"][NAMESPACE], figures["tiers"]["host"]
    facts = {
        "optim_slots": float(counted["optim"]["slots"]), "param_slots": float(counted["param"]["slots"]),
        "records": float(counted["keys"]), "host_budget_bytes": float(service.host_budget_bytes),
        "host_peak_bytes": float(host["kernel_peak_bytes"]), "own_memory_bytes": float(service.own_memory_bytes()),
    }  # fmt: skip
    return row_of(share, taken, tokens=shape.tokens, record_bytes=int(counted["record_bytes"]), facts=facts)


def moved(service: Service) -> tuple[int, int]:
    """Bytes read and written for the namespace so far: of both parts, whoever asked."""
    figures = service.stats()["namespaces"][NAMESPACE]
    return int(figures["bytes_read"]), int(figures["bytes_written"])


if __name__ == "__main__":
    sys.exit(main())
