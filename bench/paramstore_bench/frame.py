"""The frame of a script that measures: its options, what measurements share, the report as JSON and as a table, the exit code."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from paramstore.bench.context import Bench
from paramstore.bench.plan import Plan
from paramstore.bench.report import machine, table
from paramstore.bench.report.plot import check_target
from paramstore.bench.report.rows import Report, Row, encode
from paramstore.cli.exits import exit_code
from paramstore.cli.signals import end_as_interrupt
from paramstore.errors import ConfigError, ParamStoreError

RESULTS = Path(__file__).parents[1] / "results"
REST = "what comes after"
"""Named as left out by the report of a run that was interrupted."""

Tell = Callable[[str], None]
Draw = Callable[[Report, Path], None]


@dataclass(frozen=True, slots=True)
class Script:
    """The script `bench/bench_<name>.py`. about: its docstring; quick: what `--quick` does, "" where there is no such option;
    words: its positional arguments, as its command line shows them. draw: makes a picture beside the JSON."""

    name: str
    about: str | None
    quick: str = ""
    words: str = ""
    draw: Draw | None = None

    def parser(self) -> argparse.ArgumentParser:
        """The options that benches have in common: `--quick`, `--dir`, `--out`."""
        parser = argparse.ArgumentParser(description=self.about, formatter_class=argparse.RawDescriptionHelpFormatter)
        if self.quick:
            parser.add_argument("--quick", action="store_true", help=self.quick)
        else:
            parser.set_defaults(quick=False)
        parser.add_argument("--dir", type=Path, default=Path(), help="a directory on the disk in question")
        parser.add_argument("--out", type=Path, help=f"the JSON file; default: bench/results/{self.name}-<date>.json")
        return parser

    def command(self, *, is_quick: bool) -> str:
        """The command line that a report names."""
        return f"python bench/bench_{self.name}.py" + f" {self.words}" * bool(self.words) + " --quick" * is_quick

    def file(self, arguments: argparse.Namespace) -> Path:
        """The JSON file, whose directory is there on return. Raises ConfigError where it, or the picture beside it, cannot be."""
        file: Path = arguments.out or RESULTS / f"{self.name}-{machine.now()[:10]}.json"
        check_out(file)
        if self.draw is not None:
            check_target(file.with_suffix(".png"))
        return file

    def heading(self, arguments: argparse.Namespace) -> dict[str, Any]:
        """Says what was run where, for a report with figures of its own."""
        return {
            "machine": machine.describe(arguments.dir), "commit": machine.commit(),
            "command": self.command(is_quick=arguments.quick), "date": machine.now(),
        }  # fmt: skip

    def carry_out(self, work: Callable[[], int]) -> int:
        """Gives what `work` gives, the code of an error that ended it, and 130 after an interrupt."""
        end_as_interrupt()
        try:
            return work()
        except ParamStoreError as error:
            sys.stderr.write(f"bench_{self.name}: {type(error).__name__}: {error}\n")
            return exit_code(error)
        except KeyboardInterrupt:
            return 130

    def run(
        self, arguments: argparse.Namespace, measure: Callable[[Bench], Iterable[Row]], *,
        facts: Mapping[str, object] | None = None, left_out: Mapping[str, str] | None = None,
    ) -> int:  # fmt: skip
        """Measures in a temporary folder of `--dir`, which is removed at the end, and reports.

        facts: what is said of the run beside the machine. left_out: what was not measured, and why.
        Gives 0 when every target holds, 1 otherwise: the figures are written either way; the code of an error that ended it, and
        130 after an interrupt, which leaves a report of the rows that were there by then, if any, in a file named after that.
        """
        missing = dict(left_out or {})

        def take(tell: Tell) -> Report:
            date, rows = machine.now(), list[Row]()
            with tempfile.TemporaryDirectory(prefix="bench-", dir=arguments.dir) as folder:
                bench = Bench(Plan.quick() if arguments.quick else Plan(), Path(folder), tell=tell)
                started_s = bench.clock.now_s()
                try:
                    for row in measure(bench):
                        rows.append(row)
                except KeyboardInterrupt:
                    if not rows:
                        raise
                    missing[REST] = "an interrupt"
                seconds = bench.clock.now_s() - started_s
            about = {**machine.describe(arguments.dir), **(facts or {}), **({"left_out": missing} if missing else {})}
            return Report(
                machine=about, commit=machine.commit(), command=self.command(is_quick=arguments.quick), date=date,
                seconds=seconds, rows=rows,
            )  # fmt: skip

        return self.report(arguments, take)

    def report(self, arguments: argparse.Namespace, take: Callable[[Tell], Report]) -> int:
        """Writes and prints the report that `take` makes; gives what `run` gives."""
        return self.carry_out(lambda: self._report(arguments, take))

    def _report(self, arguments: argparse.Namespace, take: Callable[[Tell], Report]) -> int:
        progress, file = Console(stderr=True), self.file(arguments)
        with progress.status(f"bench {self.name}") as status:
            report = take(status.update)
        left_out = report.machine.get("left_out", {})
        assert isinstance(left_out, dict)
        if REST in left_out:
            file = file.with_stem(f"{file.stem}-interrupted")
        written = [file]
        file.write_bytes(encode(report))
        if self.draw is not None:
            written.append(file.with_suffix(".png"))
            self.draw(report, written[-1])
        table.render(report, Console())
        for name, reason in left_out.items():
            progress.print(f"left out: {name}: {reason}")
        progress.print(f"written: {', '.join(map(str, written))}")
        return 130 if REST in left_out else 1 if report.short_rows else 0


def check_out(file: Path) -> None:
    """Checks that the JSON can be written, and a picture beside it; makes the directory. Raises ConfigError."""
    if file.suffix == ".png":
        raise ConfigError(f"--out {file}: it is the JSON file; the picture lies beside it")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=file.parent).close()
    except OSError as error:
        raise ConfigError(f"--out {file}: {error.strerror}") from error


def wait_policy() -> dict[str, str]:
    """How torch's threads wait for each other, as a fact of a run: what spins takes a core from loads."""
    return {"OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "")}
