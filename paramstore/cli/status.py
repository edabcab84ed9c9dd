"""`paramstore status`: one screen about a running daemon."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from itertools import chain
from typing import TYPE_CHECKING, Any

import typer

from paramstore.cli.address import ADDRESS_HELP
from paramstore.cli.verify import described_lines
from paramstore.sizes import format_size

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

DAY_S = 86_400.0
FINDINGS_SHOWN = 10
PIPE_COLUMNS = 10_000
"""Width where nobody looks on: each row of a table is a line."""


def status(
    address: str = typer.Argument(None, help=ADDRESS_HELP),
    as_json: bool = typer.Option(False, "--json", help="Everything, as JSON."),
) -> None:
    """Show tiers, volumes, namespaces and queues of a running daemon."""
    import paramstore_client as client

    with client.connect(address) as store:
        stats = store.stats()
    if as_json:
        sys.stdout.write(json.dumps(stats, indent=2) + "\n")
        return
    _print(stats)


def _print(stats: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from paramstore.storage.space.fences import WAY_ON

    console = Console(width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else PIPE_COLUMNS)
    daemon, host = stats["daemon"], stats["tiers"]["host"]
    up = f"up {daemon['uptime_s']:.0f} s, store {daemon['store_uuid'][:8]}"
    console.print(f"paramstore {daemon['version']}, pid {daemon['pid']}, {up}", highlight=False)
    tiers = Table(title="Tiers", title_justify="left")
    for column in ("tier", "used", "of", "read", "written", "notes"):
        tiers.add_column(column)
    pages = f"pages: shared {host['shared_pages']}, private {host['private_pages']}"
    tiers.add_row("host", format_size(host["used_bytes"]), format_size(host["budget_bytes"]), "", "", pages)
    for name, tier in stats["tiers"].items():
        if name != "host":
            used = format_size(tier["size_bytes"] - tier["free_bytes"])
            read, written = format_size(tier["bytes_read"]), format_size(tier["bytes_written"])
            tiers.add_row(name, used, format_size(tier["size_bytes"]), read, written, "")
    _show(console, tiers)
    if host["page_advice"]:
        console.print(f"for huge pages: {host['page_advice']}")
    volumes = Table(title="Volumes", title_justify="left")
    for column in ("volume", "path", "mode", "class", "size", "free", "written once", "read", "written in all", "endurance"):
        volumes.add_column(column)
    for index, volume in stats["volumes"].items():
        mode = " ".join(filter(None, (volume["mode"], volume.get("granularity"))))
        sizes = [format_size(volume[name]) for name in ("size_bytes", "free_bytes", "written_bytes")]
        path, in_all = Text(str(volume["path"])), format_size(volume["bytes_written_total"])
        volumes.add_row(index, path, mode, _speed(volume), *sizes, _read(volume, stats["volumes"]), in_all, _endurance(volume))
    _show(console, volumes)
    for index, volume in stats["volumes"].items():
        if reason := volume.get("reason"):
            console.print(f"volume {index} has mode {volume['mode']}: {reason}", soft_wrap=True, markup=False, highlight=False)
        if volume["fenced"]:
            line = f"volume {index} is fenced, it gets no new records: {volume['fenced']}; {WAY_ON}"
            console.print(line, soft_wrap=True, markup=False, highlight=False)
    # An older daemon says nothing of the catalog's disk, and has no patrol.
    if (disk := stats.get("catalog")) and disk["free_bytes"] is not None:
        line = f"catalog in {disk['dir']}: {format_size(disk['free_bytes'])} free on its file system"
        console.print(line, soft_wrap=True, markup=False, highlight=False)
    _show(console, _namespaces(stats))
    lines = namespace_lines(stats["namespaces"]), verify_lines(stats.get("verify")), patrol_lines(stats.get("patrol"))
    for line in chain(extent_lines(stats.get("extents")), *lines):
        console.print(line, soft_wrap=True, markup=False, highlight=False)


def _show(console: Console, table: Table) -> None:
    """Prints a table; where it is wider than the console, each row as a paragraph, so that nothing is cut."""
    from rich.padding import Padding
    from rich.text import Text

    if console.measure(table, options=console.options.update(max_width=PIPE_COLUMNS)).maximum <= console.width:
        console.print(table)
        return
    console.print(str(table.title), style="italic")
    for first, *others in zip(*(column.cells for column in table.columns), strict=True):
        console.print(Text(f"{table.columns[0].header} {first}"))
        named = zip(table.columns[1:], others, strict=True)
        console.print(Padding(Text(", ".join(f"{column.header} {cell}" for column, cell in named if cell)), (0, 0, 0, 2)))


def extent_lines(extents: dict[str, Any] | None) -> Iterator[str]:
    """Lines about leased extents, where the daemon leases any, and how clients that are there have found them to be read."""
    if extents and extents["leases_max"]:
        yield f"extents: {extents['leased']} of {extents['leases_max']} are leased"
        for volume, words in extents["modes"].items():
            yield f"extents of volume {volume} are read so, as clients have proven: {', '.join(words)}"


def namespace_lines(namespaces: dict[str, Any]) -> Iterator[str]:
    """Lines about what namespaces may take of the volumes, and about those that are broken or have a prepared step, with what
    somebody must do."""
    from paramstore.engine.capacity.entitlements import in_words

    for name, namespace in namespaces.items():
        if parts := namespace.get("volume_shares"):  # an older daemon does not say
            line = f"namespace {name} may take {format_size(namespace['entitled_bytes'])} of the volumes, {in_words(parts)}"
            borrowed = namespace["borrowed_bytes"]
            yield line + (f"; older steps of readers have borrowed {format_size(borrowed)}" if borrowed else "")
        if namespace["broken"]:
            yield f"namespace {name} is broken: {namespace['broken']}"
        prepared = namespace.get("prepared_step")
        if prepared is not None:
            yield (
                f"namespace {name}: step {prepared} is prepared: finalize it, or open a writer at={prepared}, which commits it, "
                f"or at={namespace['committed_step']}, which drops it"
            )


def verify_lines(verify: dict[str, Any] | None) -> Iterator[str]:
    """Lines about the last `verify`, if it found something: how it ended, and what is damaged."""
    last = verify["last"] if verify is not None else None
    if last is not None and last["found"]:
        yield f"verify: the last one ended, {last['state']}: {last['found']} damaged"
        yield from _bounded(list(described_lines(last)), last["found"])


def patrol_lines(patrol: dict[str, Any] | None) -> Iterator[str]:
    """Lines about the patrol, which checks everything in the background: how far it is, when its last pass ended, the damage."""
    if patrol is None:
        return
    if not patrol["scrub_days"]:
        yield "patrol: off, scrub_days is 0"
        return
    running, last = patrol["running"], patrol["last"]
    now = "none is under way" if running is None else _progress(running)
    before = "none has ended yet"
    if last is not None:
        ended_days = patrol["last_ended_s"] / DAY_S
        before = f"the last one ended {ended_days:.1f} days ago, {last['state']}: {last['found'] or 'none'} damaged"
    yield f"patrol: a pass every {patrol['scrub_days']:g} days; {now}; {before}"
    passes = [result for result in (running, last) if result is not None]
    lines = list(dict.fromkeys(line for result in passes for line in described_lines(result)))  # most are found by both
    yield from _bounded(lines, max((result["found"] for result in passes), default=0))


def _bounded(lines: list[str], found: int) -> Iterator[str]:
    """The first few lines, and how many more there are of `found`: a daemon describes a few of them."""
    yield from lines[:FINDINGS_SHOWN]
    more = max(found, len(lines)) - len(lines[:FINDINGS_SHOWN])
    if more:
        yield f"and {more} more: `paramstore verify` names them"


def _progress(scrub: dict[str, Any]) -> str:
    read, total = scrub["bytes_read"], scrub["bytes_total"]
    return f"{format_size(read)} of {format_size(total)} are read: {scrub['found'] or 'none'} damaged"


def _speed(volume: dict[str, Any]) -> str:
    """The volume's speed class, 0 the fastest, and how fast it was read when that was measured. An older daemon tells none."""
    rate = volume.get("read_bytes_per_s")
    return f"{volume.get('speed_class', '')}" + (f" ({format_size(int(rate))}/s)" if rate is not None else "")


def _read(volume: dict[str, Any], volumes: dict[str, dict[str, Any]]) -> str:
    """Bytes read from the volume, and their share of what was read from all of them."""
    of_all = sum(other["bytes_read"] for other in volumes.values())
    share = f", {volume['bytes_read'] / of_all:.0%}" if of_all and len(volumes) > 1 else ""
    return format_size(volume["bytes_read"]) + share


def _endurance(volume: dict[str, Any]) -> str:
    if volume["endurance_used"] is None:
        return "not stated"
    return f"{volume['endurance_used']:.2%} of {format_size(volume['endurance_bytes'])}"


def _namespaces(stats: dict[str, Any]) -> Table:
    from rich.table import Table

    table = Table(title="Namespaces", title_justify="left")
    columns = "name", "step", "epoch", "param slots", "hits", "misses", "optim slots", "dirty", "leased", "amplification", "state"
    for column in columns:
        table.add_column(column)
    for name, ns in stats["namespaces"].items():
        param, optim = ns["param"], ns["optim"]
        table.add_row(
            name, str(ns["committed_step"]), str(ns["epoch"]), f"{param['resident']}/{param['slots']}", str(param["hits"]),
            str(param["misses"]), f"{optim['resident']}/{optim['slots']}", _dirty(ns), str(ns["leased_slots"]),
            _amplification(ns), _state(ns),
        )  # fmt: skip
    return table


def _dirty(namespace: dict[str, Any]) -> str:
    limit = namespace["dirty_limit_bytes"]
    return format_size(namespace["dirty_bytes"]) + (f" of {format_size(limit)}" if limit is not None else "")


def _amplification(namespace: dict[str, Any]) -> str:
    """Write amplification: bytes written for each byte of a record that a commit has published."""
    amplification = namespace["write_amplification"]
    return "" if amplification is None else f"{amplification:.3f}"


def _state(namespace: dict[str, Any]) -> str:
    if namespace["broken"]:
        return "broken"
    commit = namespace["commit"]
    if commit is None:
        prepared = namespace.get("prepared_step")
        return "ok" if prepared is None else f"step {prepared} is prepared"
    rest = f", {commit['eta_s']:.1f} s" if commit["eta_s"] is not None else ""
    return f"committing {commit['step']}: {commit['records_left']} of {commit['records']} records left{rest}"
