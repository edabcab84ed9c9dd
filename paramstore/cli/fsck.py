"""`paramstore fsck`: checks the volumes of a store that nobody serves, without the daemon's code; on request, a new catalog.

Exit codes: 0 clean, or rebuilt with nothing lost; 4 something is wrong, or was lost, or cannot be rebuilt.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from paramstore.cli.exits import CORRUPT
from paramstore.cli.signals import end_as_interrupt

if TYPE_CHECKING:
    from paramstore.fsck.check import Report


def fsck(
    directory: Path = typer.Option(None, "--dir", help="The store's directory, as given to `serve`."),
    volume: list[str] = typer.Option(None, "--volume", help="A directory of a volume, as given to `serve`."),
    rebuild: bool = typer.Option(False, "--rebuild", help="Make a new catalog of what the volumes prove; the old one is kept."),
    as_json: bool = typer.Option(False, "--json", help="Everything, as JSON."),
) -> None:
    """Check a store that no daemon serves, byte by byte. Writes nothing unless told to --rebuild the catalog."""
    from paramstore.config import load
    from paramstore.fsck import check

    flags = {"dir": directory, "volumes": volume or None}
    config = load({name: value for name, value in flags.items() if value is not None})
    paths = [str(path) for path in config.volume_paths]
    end_as_interrupt()
    with _bar(paths) as progress:
        run = check.rebuild if rebuild else check.check
        report = run(config.dir, paths, progress)
    if as_json:
        sys.stdout.write(json.dumps(as_values(report), indent=2) + "\n")
    else:
        sys.stdout.writelines(line + "\n" for line in lines(report))
    wrong = report.lost if report.is_rebuilt else report.findings
    if wrong:
        raise typer.Exit(CORRUPT)


@contextmanager
def _bar(paths: list[str]) -> Iterator[Callable[[int], None]]:
    """Shows how far through the volumes fsck is; silent where stderr is no terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    from paramstore.fsck.check import total_bytes

    console = Console(stderr=True)
    columns = TextColumn("fsck"), BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=total_bytes(paths))
        yield lambda count: bar.advance(task, count)


def lines(report: Report) -> Iterator[str]:
    """The report for people, line by line."""
    found = report.found
    name = found.store.hex() if found.store else "unknown"
    yield f"store {name}: {_counted(len(found.disks), 'volume')}, {_counted(len(found.records), 'record header')}"
    for name, proof in sorted(report.proofs.items()):
        yield f"namespace {name}: steps proven by the volumes: {_listed(proof.steps)}{_in_catalog(report, name)}"
    for finding in report.findings:
        if not (report.is_rebuilt and finding in report.lost):  # said below, once
            yield f"wrong: {finding.describe()}"
    if report.is_rebuilt:
        yield from _rebuilt(report)
    elif report.findings:
        yield from _would_be_lost(report)
    else:
        yield "clean: the catalog and the volumes agree, and every record of every step is whole"


def _in_catalog(report: Report, name: str) -> str:
    """Names the catalog's steps where they differ from the proven ones: a commit was interrupted, or the catalog is older."""
    namespace = report.contents.namespaces.get(name) if report.contents is not None else None
    if namespace is None or namespace.steps.keys() == report.proofs[name].steps.keys():
        return ""
    return f"; in the catalog: {_listed(namespace.steps)}"


def _listed(steps: Iterable[int]) -> str:
    from paramstore.storage.catalog.base import DRAFT_STEP

    names = ("a draft (an initialization that is not over)" if step == DRAFT_STEP else str(step) for step in sorted(steps))
    return ", ".join(names) or "none"


def _counted(count: int, name: str) -> str:
    return f"{count} {name}" if count == 1 else f"{count} {name}s"


def _would_be_lost(report: Report) -> Iterator[str]:
    """Says for each step what a rebuild would not bring back although the catalog has it. Says nothing without a catalog (it
    is lost already), nor where a rebuild would be refused (it takes nothing away)."""
    if report.contents is None or report.refusal is not None:
        return
    reasons: dict[tuple[str | None, int | None], list[str]] = {}
    for finding in report.lost:
        reasons.setdefault((finding.namespace, finding.step), []).append(finding.describe())
    for (name, step), of_step in reasons.items():
        what = f"step {step} of namespace {name}" if step is not None else f"something of namespace {name}"
        more = f"; and {len(of_step) - 1} more" if len(of_step) > 1 else ""
        yield f"with --rebuild {what} would be lost: {of_step[0]}{more}"


def _rebuilt(report: Report) -> Iterator[str]:
    for volume, copy in report.restored_superblocks:
        yield f"restored: superblock copy {copy} of volume {volume}"
    for volume, name, step in report.restored_notes:
        yield f"restored: the commit note of step {step} of namespace {name} on volume {volume}"
    for finding in report.lost:
        yield f"lost: {finding.describe()}"
    steps = sum(len(proof.steps) for proof in report.proofs.values())
    kept = f"; the old one is {report.old_catalog}" if report.old_catalog is not None else ""
    names = sum(bool(proof.steps) for proof in report.proofs.values())
    yield f"rebuilt: a new catalog with {_counted(steps, 'step')} of {_counted(names, 'namespace')}{kept}"


def as_values(report: Report) -> dict[str, object]:
    """The report as plain values."""
    found = report.found
    return {
        "store": found.store.hex() if found.store else None,
        "volumes": {index: {"place": disk.place, "size_bytes": disk.size_bytes} for index, disk in sorted(found.disks.items())},
        "has_catalog": report.contents is not None,
        "namespaces": {
            name: {
                "proven_steps": sorted(proof.steps), "lost_steps": sorted(proof.lost), "epoch": proof.epoch,
                "records": sum(record.namespace == name for record in found.records),
            }
            for name, proof in sorted(report.proofs.items())
        },
        "findings": [finding.as_json() for finding in report.findings],
        "lost": [finding.as_json() for finding in report.lost],
        "is_rebuilt": report.is_rebuilt,
        "old_catalog": str(report.old_catalog) if report.old_catalog is not None else None,
        "restored_superblocks": [{"volume": volume, "copy": copy} for volume, copy in report.restored_superblocks],
        "restored_notes": [{"volume": volume, "namespace": name, "step": step} for volume, name, step in report.restored_notes],
    }  # fmt: skip
