"""`paramstore bench tiers` with the peers beside it; writes bench/results/tiers-<date>.json and a picture next to it.

Run it on an idle machine: `python bench/bench_tiers.py [--quick] [--dir DIR] [--out FILE]`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rich.console import Console

from paramstore.bench.plan import Plan
from paramstore.bench.report import machine, table
from paramstore.bench.report.plot import check_target, draw
from paramstore.bench.report.rows import encode
from paramstore.bench.tiers import run
from paramstore.cli.exits import exit_code
from paramstore.cli.signals import end_as_interrupt
from paramstore.errors import ConfigError, ParamStoreError
from peers import PEERS

RESULTS = Path(__file__).parent / "results"


def main() -> int:
    """Runs the bench. Gives 0 when every target holds, 1 otherwise: the figures are written either way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small sets: a check, not figures to quote")
    parser.add_argument("--dir", type=Path, default=Path(), help="a directory on the disk in question")
    parser.add_argument("--out", type=Path, help="the JSON file; default: bench/results/tiers-<date>.json")
    arguments = parser.parse_args()

    file = arguments.out or RESULTS / f"tiers-{machine.now()[:10]}.json"
    try:
        check_out(file)
        return measure(file, arguments.dir, is_quick=arguments.quick)
    except ParamStoreError as error:
        sys.stderr.write(f"bench_tiers: {type(error).__name__}: {error}\n")
        return exit_code(error)
    except KeyboardInterrupt:
        return 130


def check_out(file: Path) -> None:
    """Checks that the JSON and the picture beside it can be written; makes the directory. Raises ConfigError."""
    if file.suffix == ".png":
        raise ConfigError(f"--out {file}: it is the JSON file; the picture lies beside it")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out {file}: {error.strerror}") from error
    check_target(file.with_suffix(".png"))


def measure(file: Path, directory: Path, *, is_quick: bool) -> int:
    """Runs the bench, writes `file` and the picture, and prints the table."""
    command = "python bench/bench_tiers.py" + (" --quick" if is_quick else "")
    end_as_interrupt()
    progress = Console(stderr=True)
    with progress.status("bench tiers") as status:
        plan = Plan.quick() if is_quick else Plan()
        report = run(plan, directory, command=command, peers=PEERS, tell=status.update)
    file.write_bytes(encode(report))
    draw(report, file.with_suffix(".png"))
    table.render(report, Console())
    progress.print(f"written: {file}, {file.with_suffix('.png')}")
    return 1 if report.short_rows else 0


if __name__ == "__main__":
    sys.exit(main())
