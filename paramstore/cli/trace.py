"""`paramstore trace`: records which experts a model's routers choose, and replays that at other sizes and under other policies."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import typer

from paramstore.cli.address import ADDRESS_HELP
from paramstore.cli.signals import end_as_interrupt
from paramstore.errors import ConfigError

if TYPE_CHECKING:
    from paramstore.core.trace import Trace
    from paramstore.sim.picture import Cost
    from paramstore.sim.sweep import Point

T = TypeVar("T")
ABOUT = "Record which experts a model chooses, and replay it at other sizes and under other policies."
FILE_BYTES_MAX = 1 << 30
"""The most bytes of a trace's file: a larger one is something else."""
PROMPT = "The history of the world is the history of what people have written down. In the beginning"
TRACE = typer.Argument(help="A trace, as `paramstore trace record` and ps.hf.recording write it.")
SLOTS = typer.Option(None, "--slots", help="Numbers of slots, as 64,128; default: eight sizes.")
SHARES = typer.Option(None, "--shares", help="The same as shares of all experts, as 0.1,0.25.")
POLICY = typer.Option([], "--policy", help="One to replay beside Belady's; repeat for more. Default all.")
PLACE = typer.Option(None, "--place", help="'reader': slots of a served model; 'daemon': its arenas, with updates. By the trace.")
LOAD_RATE = typer.Option(None, "--load-rate", help="Of what moves, as 3GiB/s, or the JSON of a `paramstore bench tiers`.")
USES = typer.Option(
    None, "--uses", min=0, help="Replay the first steps with so many uses of experts; 0: all. Default: what takes half a minute."
)  # fmt: skip
COMPUTE_MS = typer.Option(None, "--compute-ms", min=0.0, help="Arithmetic of one step, in milliseconds.")

app = typer.Typer(name="trace", help=ABOUT, no_args_is_help=True, rich_markup_mode=None)


@app.callback()
def trace() -> None:
    """Record which experts a model chooses, and replay it at other sizes and under other policies."""


@app.command()
def record(
    path: str = typer.Argument(metavar="MODEL", help="A directory of safetensors, or the id of a model in the hub's cache."),
    file: Path = typer.Argument(help="The trace to write; one that is there is replaced."),
    prompt: str = typer.Argument(PROMPT, help="What the model continues."),
    tokens: int = typer.Option(128, "--tokens", min=1, help="The most tokens that it writes."),
    namespace: str = typer.Option(None, "--namespace", help="Of the experts; made if there is none. Default the model's name."),
    socket: str = typer.Option(None, "--socket", help=ADDRESS_HELP),
) -> None:
    """Run a model's checkpoint through a daemon, and keep which experts its routers choose for each token."""
    import paramstore_client as client
    from paramstore.directories import check_writable
    from paramstore_client.checkpoint_directory import checkpoint_directory

    check_writable("FILE", file)
    directory = checkpoint_directory(path)  # told before the imports that take seconds
    from paramstore_client.hf.compat import modeling
    from paramstore_client.hf.recorder import record_text

    end_as_interrupt()
    modeling.hush()
    with client.connect(socket) as store:
        try:
            trace = record_text(directory, file, prompt, tokens=tokens, store=store, name=namespace)
        except KeyboardInterrupt:
            sys.stderr.write(f"paramstore: interrupted; {file} has what was recorded, if the model ran by then\n")
            raise
    sys.stdout.write(f"{file}: {trace.steps} steps, the prompt and each token after it\n")


@app.command()
def replay(
    file: Path = TRACE,
    slots: str = SLOTS,
    shares: str = SHARES,
    policy: list[str] = POLICY,
    place: str = PLACE,
    load_rate: str = LOAD_RATE,
    compute_ms: float = COMPUTE_MS,
    uses: int = USES,
    as_json: bool = typer.Option(False, "--json", help="Everything that was counted, as JSON."),
) -> None:
    """Print the miss rate of every policy at several sizes, beside Belady's optimum."""
    from paramstore.sim.picture import check_steps

    end_as_interrupt()
    recorded, place = read_trace(file, place=place, uses=uses)
    cost = cost_of(recorded, load_rate, compute_ms)
    if cost is not None:
        check_steps(recorded)
    points = replayed(recorded, slots=slots, shares=shares, policies=policy, place=place)
    if as_json:
        sys.stdout.write(json.dumps(_report(recorded, points, cost), indent=1) + "\n")
    else:
        _print(recorded, points, cost)


@app.command()
def plot(
    file: Path = TRACE,
    out: Path = typer.Option(..., "--out", help="The picture; its suffix chooses the format (.png, .svg, .pdf)."),
    slots: str = SLOTS,
    shares: str = SHARES,
    policy: list[str] = POLICY,
    place: str = PLACE,
    load_rate: str = LOAD_RATE,
    compute_ms: float = COMPUTE_MS,
    uses: int = USES,
) -> None:
    """Draw miss rate against slots, and bytes or latency of a step against memory, for every policy beside Belady's."""
    from paramstore.bench.report.plot import check_target
    from paramstore.sim.picture import check_steps, draw

    end_as_interrupt()
    check_target(out, "--out")
    recorded, place = read_trace(file, place=place, uses=uses)
    cost = cost_of(recorded, load_rate, compute_ms)
    check_steps(recorded)
    draw(recorded, replayed(recorded, slots=slots, shares=shares, policies=policy, place=place), out, cost)


def read_trace(file: Path, *, place: str | None, uses: int | None) -> tuple[Trace, str]:
    """The trace in `file`, as much of it as is to be replayed, and where that is. Raises ConfigError, naming the file, where it
    cannot be read or is none."""
    from paramstore.core.trace import unpack_trace
    from paramstore.sim.sweep import USES, beginning, place_of

    try:
        with file.open("rb") as opened:
            content = opened.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}: `paramstore trace record` makes a trace") from error
    try:
        if len(content) > FILE_BYTES_MAX:
            raise ConfigError(f"this is no trace: it has more than {FILE_BYTES_MAX} bytes")
        trace = unpack_trace(content)
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from error
    place = place_of(trace, place)
    uses = USES[place] if uses is None else uses
    return beginning(trace, uses) if uses else trace, place


def replayed(trace: Trace, *, slots: str | None, shares: str | None, policies: Sequence[str], place: str) -> list[Point]:
    """Every replay that is asked for, with a bar on stderr meanwhile. Raises ConfigError before the first."""
    from rich.console import Console
    from rich.progress import track

    from paramstore.sim.sweep import policies_named, sizes_of, sweep

    sizes = sizes_of(trace, slots=_numbers("--slots", slots, int), shares=_numbers("--shares", shares, float))
    chosen, console = policies_named(place, policies), Console(stderr=True)
    every = sweep(trace, sizes, place=place, policies=chosen)
    bar = track(
        every, "replay", total=len(sizes) * len(chosen), console=console, transient=True, disable=not console.is_terminal
    )  # fmt: skip
    return list(bar)


def cost_of(trace: Trace, load_rate: str | None, compute_ms: float | None) -> Cost | None:
    """What `--load-rate` and `--compute-ms` say; None where there is no rate. Raises ConfigError."""
    from paramstore.sim.picture import Cost
    from paramstore.sizes import parse_size

    compute_s = None if compute_ms is None else compute_ms / 1e3
    if load_rate is None:
        if compute_s is not None:
            raise ConfigError("--compute-ms without --load-rate: what loads take is not known")
        return None
    if load_rate.endswith("/s"):
        rate, source = float(parse_size(load_rate.removesuffix("/s"))), load_rate
    else:
        rate, source = _measured(Path(load_rate), trace.schema.record_bytes)
    if rate <= 0:
        raise ConfigError(f"--load-rate {load_rate}: give more than 0, as 3GiB/s")
    return Cost(rate, source, compute_s)


def _measured(file: Path, record_bytes: int) -> tuple[float, str]:
    """Bytes a second that `paramstore bench tiers` has reported of loads, of records of the nearest size; and in words."""
    from msgspec import MsgspecError

    from paramstore.bench.report.plot import READ
    from paramstore.bench.report.rows import SUBJECT, decode

    try:
        report = decode(file.read_bytes())
        rows = [row for row in report.rows if (row.name, row.subject, row.unit) == (READ, SUBJECT, "GB/s")]
        row = min(rows, key=lambda row: abs((row.record_bytes or 0) - record_bytes))
    except (OSError, ValueError, MsgspecError) as error:
        raise ConfigError(
            f"--load-rate {file}: give a rate, as 3GiB/s, or what `paramstore bench tiers --json` has printed: {error}"
        ) from error
    return row.value * 1e9, f"{row.value:.2f} GB/s ({file.name}, records of {(row.record_bytes or 0) / 1e6:.0f} MB)"


def _numbers(flag: str, text: str | None, kind: Callable[[str], T]) -> list[T] | None:
    try:
        return None if text is None else [kind(word) for word in text.split(",")]
    except ValueError as error:
        raise ConfigError(f"{flag} {text}: give numbers with commas between them") from error


def _about(trace: Trace) -> dict[str, Any]:
    visits = [event for event in trace.events if event.kind.name == "ACQUIRE"]
    tokens = sum(sum(event.tokens) for event in visits)
    return {
        "name": trace.header.name, "how": trace.header.how, "layers": len(trace.header.layers), "experts": trace.header.experts,
        "record_bytes": trace.schema.record_bytes, "steps": trace.steps, "dispatches": len(visits),
        "uses": sum(len(event.experts) for event in visits), "tokens": tokens or None,
    }  # fmt: skip


def _report(trace: Trace, points: Sequence[Point], cost: Cost | None) -> dict[str, Any]:
    rows = [asdict(point) | {"miss_rate": point.miss_rate} for point in points]
    if cost is not None:
        for row, point in zip(rows, points, strict=True):
            row["step_s"] = cost.step_s(point, trace.steps)
    return {"trace": _about(trace), "cost": None if cost is None else asdict(cost), "points": rows}


def _print(trace: Trace, points: Sequence[Point], cost: Cost | None) -> None:
    about = _about(trace)
    tokens = "not counted" if about["tokens"] is None else f"{about['tokens']:,}, each choice of an expert counted"
    where = "slots of a reader" if points[0].place == "reader" else "slots of each arena"
    sys.stdout.write(
        f"{about['name']}: {about['steps']:,} steps, {about['dispatches']:,} dispatches, {about['uses']:,} uses of "
        f"{about['layers']} x {about['experts']} experts; tokens: {tokens}\n"
    )
    _print_table(points, f"miss rate, {where}", lambda point: f"{point.miss_rate:.3f}")
    if cost is not None:
        title = f"ms of a step, modelled from counts: bytes moved at {cost.source}"
        _print_table(points, title, lambda point: f"{cost.step_s(point, trace.steps) * 1e3:.3g}")


def _print_table(points: Sequence[Point], title: str, cell: Callable[[Point], str]) -> None:
    policies = list(dict.fromkeys(point.policy for point in points))
    lines = [("slots", "share", *policies)]
    for slots in dict.fromkeys(point.slots for point in points):
        row = [point for point in points if point.slots == slots]
        lines.append((str(slots), f"{row[0].share:.1%}", *map(cell, row)))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    sys.stdout.write(f"\n{title}\n")
    for line in lines:
        sys.stdout.write("  ".join(map(str.rjust, line, widths)) + "\n")
