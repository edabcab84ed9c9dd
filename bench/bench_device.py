"""Measures what a CUDA device gives the HBM tier on this machine; prints a table, writes bench/results/device-<date>.json.

`python bench/bench_device.py [--quick] [--dir DIR] [--out FILE]`, on an idle machine. Ends with 2, and measures nothing, where
there is no CUDA device. A measurement that cannot be made becomes a row whose note says why; the others go on.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from rich.console import Console

from device_copies import measure_kvikio, measure_overlap, measure_pinning, measure_tier_copies
from device_layers import measure_decoding, measure_host_sync
from device_plan import Plan, absent
from paramstore.bench.report import machine, table
from paramstore.bench.report.rows import Report, Row, encode
from paramstore.clock import Clock, MonotonicClock
from paramstore.errors import ParamStoreError

RESULTS = Path(__file__).parent / "results"
NO_DEVICE = 2


def measure_all(plan: Plan, device: torch.device, clock: Clock, directory: Path, *, tell: Callable[[str], None]) -> list[Row]:
    measurements: dict[str, Callable[[], list[Row]]] = {
        "pinning": lambda: measure_pinning(plan, device, clock),
        "copies beside compute": lambda: measure_overlap(plan, device),
        "copies of the tier": lambda: measure_tier_copies(plan, device, clock),
        "kvikio": lambda: measure_kvikio(plan, device, clock, directory),
        "host sync": lambda: measure_host_sync(plan, device, clock),
        "decoding": lambda: measure_decoding(plan, device, clock, directory / "store"),
    }
    rows: list[Row] = []
    for name, measure in measurements.items():
        tell(name)
        try:
            rows += measure()
        except (ParamStoreError, RuntimeError, OSError) as error:  # such a machine is rare, so the other measurements go on
            rows.append(absent(name, f"{type(error).__name__}: {error}"))
    return rows


def describe_device(device: torch.device) -> dict[str, object]:
    properties = torch.cuda.get_device_properties(device)
    return {
        "name": properties.name, "memory_bytes": properties.total_memory, "multiprocessors": properties.multi_processor_count,
        "capability": list(torch.cuda.get_device_capability(device)), "cuda": torch.version.cuda,
    }  # fmt: skip


def main(words: Sequence[str] | None = None) -> int:
    """Runs the bench. Gives 0 when the figures are written, NO_DEVICE where there is nothing to measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small sets: a check, not figures to quote")
    parser.add_argument("--dir", type=Path, default=Path(), help="a directory on the disk in question")
    parser.add_argument("--out", type=Path, help="the JSON file; default: bench/results/device-<date>.json")
    arguments = parser.parse_args(words)
    progress = Console(stderr=True)
    if not torch.cuda.is_available():
        progress.print(
            f"bench_device: no CUDA device: torch {torch.__version__} finds none. Run it on a machine with an NVIDIA GPU and a "
            "CUDA build of torch; `python bench/bench_tiers.py` measures the host's tiers.",
            highlight=False, soft_wrap=True,
        )
        return NO_DEVICE

    clock, device = MonotonicClock(), torch.device("cuda", torch.cuda.current_device())
    plan = Plan.quick() if arguments.quick else Plan()
    started_s, date = clock.now_s(), machine.now()
    with tempfile.TemporaryDirectory(prefix="bench-", dir=arguments.dir) as folder, progress.status("bench device") as status:
        rows = measure_all(plan, device, clock, Path(folder), tell=status.update)
    report = Report(
        machine={**machine.describe(arguments.dir), "device": describe_device(device)}, commit=machine.commit(),
        command="python bench/bench_device.py" + (" --quick" if arguments.quick else ""), date=date,
        seconds=clock.now_s() - started_s, rows=rows,
    )  # fmt: skip
    file = arguments.out or RESULTS / f"device-{date[:10]}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(encode(report))
    table.render(report, Console())
    for row in rows:
        if row.note:
            progress.print(f"{row.name}, {row.case}: {row.note}", highlight=False)
    progress.print(f"written: {file}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
