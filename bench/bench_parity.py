"""Measures parity: trains models of transformers with their experts in a store, and unmodified in memory, on real text.

`python bench/bench_parity.py [--quick] [--dir DIR] [--out FILE]`. No figure depends on the machine's speed or load. Writes
bench/results/parity-<date>.json.
"""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console

import paramstore as ps
from paramstore.demo.corpus import Corpus, open_corpus
from paramstore_bench.frame import Script
from paramstore_testkit.processes.daemon_process import DaemonProcess
from paramstore_testkit.training.parity import FAMILIES, SHORT, Comparison, Reference, Stored, Trial, batches_of, save_checkpoint

KERNELS = ("eager", "grouped_mm")
THREADS = 1
"""Number of torch's threads. These tensors are small: more threads would only wait for each other."""
FP32, BF16 = torch.float32, torch.bfloat16
MAX_NORM = 1.0
COEFFICIENT_TARGET = 1e-6
STEPS, QUICK_STEPS = 20, 4
HOST_BUDGET, VOLUME_SIZE = "8MiB", "160MiB"
CORPUS_BYTES = 1 << 20
EVALUATED = 64
"""Number of bytes of text whose logits are compared."""
SEED = 11
NAMESPACE = "experts"
STOCK, MASTERS, EQUAL_START = "stock", "stock, experts with fp32 masters", "stock, steps from equal states"


@dataclass(frozen=True, slots=True)
class Cell:
    """One run of ours. references: by name, whether its experts have fp32 masters beside their own dtype."""

    family: str
    kernel: str
    dtype: torch.dtype
    references: tuple[tuple[str, bool], ...]
    max_norm: float | None = None

    @property
    def name(self) -> str:
        clipped = "" if self.max_norm is None else ", clipped"
        return f"{self.family}, {self.kernel}, {str(self.dtype).removeprefix('torch.')}{clipped}"


def cells(*, is_quick: bool) -> list[Cell]:
    """Lists the runs: each family and kernel, plain and in bf16; each family clipped, with alternating kernels."""
    families = list(FAMILIES)[:1] if is_quick else list(FAMILIES)
    pairs = list(product(families, KERNELS))
    plain = [Cell(family, kernel, FP32, ((STOCK, False),)) for family, kernel in pairs]
    half = [Cell(family, kernel, BF16, ((MASTERS, True), (STOCK, False))) for family, kernel in pairs]
    clipped = [
        Cell(family, KERNELS[number % 2], FP32, ((EQUAL_START, False), (STOCK, False)), MAX_NORM)
        for number, family in enumerate(families)
    ]
    return [*plain, *half, *clipped]


SCRIPT = Script("parity", __doc__, quick="one family, few steps: a check, not figures to quote")


def main() -> int:
    """Runs the bench. Gives 0 when every target holds, 1 otherwise: the figures are written either way."""
    arguments = SCRIPT.parser().parse_args()
    progress, out = Console(stderr=True), SCRIPT.file(arguments)
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # the library's
    torch.set_num_threads(THREADS)
    rows: list[dict[str, Any]] = []
    report: dict[str, Any] = SCRIPT.heading(arguments)
    report["machine"] |= {"transformers": transformers.__version__, "threads": THREADS}
    with progress.status("bench parity") as status, tempfile.TemporaryDirectory(prefix="bench-", dir=arguments.dir) as folder:
        corpus = open_corpus(Path(folder) / "corpus", size_bytes=CORPUS_BYTES)
        report["text"] = {"sha256": corpus.sha256, "bytes_per_step": SHORT, "bytes_evaluated": EVALUATED}
        for cell in cells(is_quick=arguments.quick):
            status.update(cell.name)
            with tempfile.TemporaryDirectory(dir=folder) as place:
                rows += measure(cell, Path(place), corpus, steps=QUICK_STEPS if arguments.quick else STEPS)
            out.write_text(json.dumps({**report, "rows": rows}, indent=1) + "\n")  # after each cell: a run takes long
    render(rows, Console())
    progress.print(f"written: {out}")
    return 0 if all(row["holds"] is not False for row in rows) else 1


def measure(cell: Cell, folder: Path, corpus: Corpus, *, steps: int) -> list[dict[str, Any]]:
    """Runs the cell; makes a row for each of its references."""
    text = torch.cat([domain.train for domain in corpus.domains])
    path = save_checkpoint(cell.family, folder / "checkpoint", dtype=cell.dtype, seed=SEED)
    daemon = DaemonProcess(folder / "store", "--host-budget", HOST_BUDGET, "--volume-size", VOLUME_SIZE)
    with daemon, ps.connect(daemon.address, debug=True) as store:
        ours = Stored(path, store=store, name=NAMESPACE, kernel=cell.kernel, dtype=cell.dtype, steps=steps)
        beside = {
            name: Comparison(Reference(path, kernel=cell.kernel, dtype=cell.dtype, steps=steps, has_masters=has_masters))
            for name, has_masters in cell.references
        }
        adopting = EQUAL_START if EQUAL_START in beside else ""
        trial = Trial(ours, beside, max_norm=cell.max_norm, adopting=adopting)
        trial.run(batches_of(text, steps=steps, seed=SEED))
        trial.compare(text[-EVALUATED:].long()[None])
        facts = {
            "cell": cell.name, "family": cell.family, "kernel": cell.kernel, "dtype": str(cell.dtype), "max_norm": cell.max_norm,
            "steps": steps, **run_facts(trial, store),
        }  # fmt: skip
        return [{**facts, **row_of(cell, name, comparison)} for name, comparison in beside.items()]


def run_facts(trial: Trial, store: ps.Store) -> dict[str, Any]:
    """Facts that show the run was short of memory: idle experts, evictions, replays, a budget far below the states."""
    figures = store.stats()
    counted, host = figures["namespaces"][NAMESPACE], figures["tiers"]["host"]
    return {
        "experts": counted["keys"], "idle_experts_per_step": trial.idle, "lease_slots": trial.ours.namespace.lease_slots,
        "host_budget_bytes": host["budget_bytes"], "host_peak_bytes": host["kernel_peak_bytes"],
        "state_bytes": counted["state_bytes"], "evictions": counted["param"]["evictions"] + counted["optim"]["evictions"],
        "missed_steps_made": counted["missed_steps_made"], "records_updated": counted["records_updated"],
        "commits": counted["commits"],
    }  # fmt: skip


def row_of(cell: Cell, name: str, comparison: Comparison) -> dict[str, Any]:
    """Makes the row against one reference; `holds` is None where nothing is asked of it."""
    holds: bool | None = comparison.is_equal
    row: dict[str, Any] = {
        "against": name, "is_equal": comparison.is_equal, "losses": [list(pair) for pair in comparison.losses],
        "loss_difference": comparison.loss_difference,
        "differences": {kind: found.figures() for kind, found in comparison.differences.items()},
    }  # fmt: skip
    if cell.max_norm is not None:
        found = comparison.coefficient_difference(cell.max_norm)
        row["norms"] = [list(pair) for pair in comparison.norms]
        row["clipped_steps"] = sum(theirs > cell.max_norm for _, theirs in comparison.norms)
        row["coefficient_difference"] = found
        holds = found <= COEFFICIENT_TARGET and comparison.loss_difference == 0.0 if name == EQUAL_START else None
    elif cell.dtype == BF16 and name == STOCK:
        holds = None
    return {**row, "holds": holds}


def render(rows: list[dict[str, Any]], console: Console) -> None:
    """Prints a line for each row: greatest differences, and in bf16 how many roundings the served weights are apart."""
    for row in rows:
        found, mark = row["differences"], {True: "holds", False: "SHORT", None: "-"}[row["holds"]]
        experts = max(part["largest"] for kind, part in found.items() if kind.startswith("experts'"))
        figures = {
            "loss": row["loss_difference"], "logits": found["logits"]["largest"], "dense": found["dense weights"]["largest"],
            "experts": experts, "coefficient": row.get("coefficient_difference"),
        }  # fmt: skip
        shown = ", ".join(f"{name} {value:.2g}" for name, value in figures.items() if value is not None)
        console.print(f"{mark:5} {row['cell']} | {row['against']} | {shown}", highlight=False, soft_wrap=True)


if __name__ == "__main__":
    sys.exit(main())
