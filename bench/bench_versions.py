"""Runs two checkouts of paramstore beside each other, run by run: is any figure worse than it was?

Run it on an idle machine: `python bench/bench_versions.py BASE [--bench tiers,update] [--pairs 15] [--full] [--dir DIR]
[--out FILE]`.
BASE is another checkout in which `make setup` was run. A pair is a run of ours and one of BASE, in alternating order, each from
its own checkout with its own Python. A figure is what a row's target is about; without one a rate's ratio to its limit, or else
its value.
Writes bench/results/versions-<date>.json, anew after each pair from the second on, so that a run which is ended keeps what it
measured ("pairs" of a row says how many): a row's ratio is the median over the pairs, above 1 where ours is
better.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from statistics import median, quantiles

import msgspec
from rich.console import Console

from paramstore.bench.report import machine, table
from paramstore.bench.report.rows import SUBJECT, Report, Row, Target, decode, encode, judged
from paramstore.cli.signals import end_as_interrupt
from paramstore.clock import MonotonicClock
from paramstore.errors import ParamStoreError
from paramstore_bench.frame import check_out

HERE = Path(__file__).resolve().parents[1]
BENCHES = ("tiers", "commits", "update", "training")
SHORT = {"commits": ["bench/bench_commits.py"], "training": [str(HERE / "bench/quarter_training.py")]}
"""What is run of either checkout in place of a bench's `--quick`: `commits` has none, and a quick training holds no quarter."""
STOP_S = 120.0
"""How long a bench that is interrupted may take to end what it has started."""
WORSE_BY_MOST = 0.03
"""Most that a median may lose, unless half the range between the quartiles of its pairs is more."""

Figure = tuple[str, str, int | None, str]
"""Name of one figure in the reports of both: its work, case, record bytes and what it stands against."""


def main() -> int:
    """Compares the two. Gives 0 when no figure is worse, 1 otherwise."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", type=Path, help="the other checkout, with its environment in .venv")
    parser.add_argument("--bench", default=",".join(BENCHES), help=f"of {', '.join(BENCHES)}")
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--full", action="store_true", help="whole runs in place of quick ones")
    parser.add_argument("--dir", type=Path, default=Path(), help="a directory on the disk in question")
    parser.add_argument("--out", type=Path, help="the JSON file; default: bench/results/versions-<date>.json")
    arguments = parser.parse_args()
    benches = arguments.bench.split(",")
    if unknown := set(benches) - set(BENCHES):
        parser.error(f"--bench {','.join(sorted(unknown))}: give some of {', '.join(BENCHES)}")
    if arguments.pairs < 2:
        parser.error(f"--pairs {arguments.pairs}: quartiles need at least 2")
    file = arguments.out or HERE / f"bench/results/versions-{machine.now()[:10]}.json"
    end_as_interrupt()
    try:
        check_out(file)
        return measure(file, benches, arguments)
    except (ParamStoreError, OSError, subprocess.SubprocessError) as error:
        sys.stderr.write(f"bench_versions: {type(error).__name__}: {error}\n")
        return 1
    except KeyboardInterrupt:
        return 130


def measure(file: Path, benches: list[str], arguments: argparse.Namespace) -> int:
    """Runs the pairs of each bench, writes `file` after each pair, and prints the table."""
    console, clock, date = Console(stderr=True), MonotonicClock(), machine.now()
    report = Report(
        machine={**machine.describe(arguments.dir), "pairs": arguments.pairs, "base": _commit(arguments.base)},
        commit=machine.commit(), date=date, seconds=0.0, rows=[],
        command=f"python bench/bench_versions.py BASE --bench {arguments.bench} --pairs {arguments.pairs}"
        + " --full" * arguments.full,
    )  # fmt: skip
    started_s = clock.now_s()
    for bench in benches:
        before = report.rows
        for found in pairs_of(bench, arguments, console):
            report = msgspec.structs.replace(report, rows=[*before, *compared(found)], seconds=clock.now_s() - started_s)
            half = file.with_suffix(".part")
            half.write_bytes(encode(report))
            half.replace(file)  # whole, whenever it ends
    table.render(report, Console())
    console.print(f"written: {file}")
    return 1 if report.short_rows else 0


def pairs_of(bench: str, arguments: argparse.Namespace, console: Console) -> Iterator[dict[Figure, list[tuple[Row, Row]]]]:
    """Runs both checkouts in turn; after each pair from the second on, gives the rows of ours and of BASE for each figure."""
    found: dict[Figure, list[tuple[Row, Row]]] = defaultdict(list)
    for number in range(arguments.pairs):
        console.print(f"{bench}: pair {number + 1} of {arguments.pairs}")
        order = (HERE, arguments.base.resolve()) if number % 2 == 0 else (arguments.base.resolve(), HERE)
        runs = {checkout: run(bench, checkout, arguments.dir.resolve(), is_full=arguments.full) for checkout in order}
        ours, theirs = runs[HERE], runs[arguments.base.resolve()]
        for figure in ours.keys() & theirs.keys():
            found[figure].append((ours[figure], theirs[figure]))
        if number > 0:  # quartiles need two
            yield found


def run(bench: str, checkout: Path, directory: Path, *, is_full: bool) -> dict[Figure, Row]:
    """Runs a bench once, from its own checkout. Raises CalledProcessError where it wrote no report."""
    with tempfile.TemporaryDirectory(prefix="versions-", dir=directory) as folder:
        out = Path(folder) / "report.json"
        whole = f"bench/bench_{bench}.py"
        script = [whole] if is_full else SHORT.get(bench, [whole, "--quick"])
        command = [str(checkout / ".venv/bin/python"), *script, "--dir", folder, "--out", str(out)]
        with subprocess.Popen(command, cwd=checkout, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as child:
            try:
                _, told = child.communicate()
            except BaseException:
                child.terminate()  # it ends the daemon that it has started
                child.wait(STOP_S)
                raise
        if not out.exists():  # a bench that misses a target ends with 1 as well
            raise subprocess.CalledProcessError(child.returncode, command, stderr=told)
        report = decode(out.read_bytes())
    return {(row.name, row.case, row.record_bytes, row.against): row for row in report.rows if row.subject == SUBJECT}


def compared(found: dict[Figure, list[tuple[Row, Row]]]) -> Iterator[Row]:
    """Gives a row for each figure that every pair has: the ratios of the pairs, beside what their median may lose."""
    count = max(map(len, found.values()), default=0)
    for (name, case, record_bytes, against), pairs in found.items():
        measured = [(_measured(ours), _measured(theirs)) for ours, theirs in pairs]
        if len(pairs) < count or not all(min(pair) > 0 for pair in measured):
            continue
        one = pairs[0][0]
        ratios = [ours / theirs if _more_is_better(one) else theirs / ours for ours, theirs in measured]
        first, _, third = quantiles(ratios, n=4)
        row = Row(
            name=name, case=case, subject=SUBJECT, record_bytes=record_bytes, unit="of its limit" if _is_ratio(one) else one.unit,
            value=median(ours for ours, _ in measured), limit=median(theirs for _, theirs in measured),
            against=", ".join(filter(None, ("BASE", against))), ratio=median(ratios), ratio_min=min(ratios), ratio_max=max(ratios),
            target=Target("ratio", ">=", 1 - max(WORSE_BY_MOST, (third - first) / 2)),
            parts={"quartile_1": first, "quartile_3": third, "pairs": len(pairs)},
        )  # fmt: skip
        yield judged(row)


def _is_ratio(row: Row) -> bool:
    """Whether the figure is the row's ratio: its target is about the ratio, or it has none and is a rate beside a limit."""
    if row.target is not None:
        return row.target.quantity == "ratio"
    return row.ratio is not None and "/s" in row.unit


def _measured(row: Row) -> float:
    return row.ratio if _is_ratio(row) and row.ratio is not None else row.value


def _more_is_better(row: Row) -> bool:
    return row.target.relation == ">=" if row.target is not None else "/s" in row.unit


def _commit(checkout: Path) -> str:
    return subprocess.run(
        ["git", "-C", str(checkout), "rev-parse", "HEAD"], capture_output=True, text=True, check=True
    ).stdout.strip()  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
