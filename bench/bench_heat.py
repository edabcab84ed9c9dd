"""Counts where reads go on two volumes of different speed: the share of a decode trace's reads that the faster one serves, beside
what it would serve if the hottest records that fit lay there, and beside records that are spread by free share.

`python bench/bench_heat.py [--quick] [--dir DIR] [--out FILE]`. The slower volume is one whose reads the daemon holds back
(`paramstore_bench/guesses/slow_volume.py`); it measures that by itself. The first half of the trace says what is hot: as the file
that an import is given, or as use in training, with a commit every few tokens. The second half is read with a quarter of the
experts resident. "The hottest" are so by what was known then. Of the namespace that is trained the limit is that, free share, or
the hottest beyond as many as stand in memory, whichever is most; beside all stands what no placement exceeds, the records that the
second half reads most. Counts only: load on the machine changes nothing, unless it hides that a volume is slower, which ends the
run. Writes bench/results/heat-<date>.json.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

import paramstore as ps
from paramstore.bench.context import Bench
from paramstore.bench.report.rows import SUBJECT, Row, Target, judged
from paramstore.bench.service.daemon import Service, serving
from paramstore.config import SEGMENT_ALIGNMENT_BYTES
from paramstore.core.heat import heat_of
from paramstore.core.key import ExpertKey
from paramstore.core.schema import Schema
from paramstore.core.trace import Trace, TraceEventKind, unpack_trace
from paramstore.errors import StepMismatch
from paramstore_bench.frame import Script
from paramstore_bench.guesses.slow_volume import reading_at

TRACE = Path(__file__).parent / "traces" / "decode-1.trace"
SLOW, FAST = "0", "1"
SLOW_BYTES_PER_S = 200e6
RESIDENT = 0.25
TARGET = 0.9
COMMIT_TOKENS = 64
SHAPE = (64, 80)
"""So that about a quarter of the images fill whole segments."""
HOST_BYTES = 256 << 20
RETAINED_STEPS = 2
SETTINGS: dict[str, object] = {"retained_steps": RETAINED_STEPS, "held_steps": 0, "scrub_days": 0.0}
QUICK_USES = 40_000

Heat = dict[ExpertKey, float]
Give = Callable[[ps.Namespace, Trace], tuple[Heat, Collection[ExpertKey]]]
"""Gives a namespace its first step, and whatever more the trace does to it; returns how hot its records are then, and which of them
the newest commit changed."""


@dataclass(frozen=True, slots=True)
class Counted:
    """Reads of one replay. hottest: those of the hottest records that fit on the faster volume, by the heat that was known;
    beyond_memory: the same without as many of the hottest as stand; most_read: those of the records that the replay itself reads
    most, one extent each."""

    reads: int
    fast_reads: int
    hottest: int
    beyond_memory: int
    most_read: int
    resident: float
    classes: tuple[int, int]


SCRIPT = Script("heat", __doc__, quick=f"the first {QUICK_USES} uses of the trace: a check, not figures to quote")


def main() -> int:
    """Runs the bench."""
    arguments = SCRIPT.parser().parse_args()
    trace = unpack_trace(TRACE.read_bytes())
    uses = QUICK_USES if arguments.quick else sum(len(event.experts) for event in trace.events)
    return SCRIPT.run(arguments, lambda bench: rows(bench, *halves(trace, uses)))


def halves(trace: Trace, uses: int) -> tuple[Trace, Trace]:
    """The trace's leases up to so many uses, cut in the middle, whole tokens in each half."""
    cuts: list[int] = []
    counted = 0
    for index, event in enumerate(trace.events):
        counted += len(event.experts) if event.kind is TraceEventKind.ACQUIRE else 0
        if event.kind is TraceEventKind.STEP and counted >= uses / 2 * (1 + len(cuts)):
            cuts.append(index + 1)
    middle, end = cuts[0], cuts[1] if len(cuts) > 1 else len(trace.events)
    return replace(trace, events=trace.events[:middle]), replace(trace, events=trace.events[middle:end])


def rows(bench: Bench, first: Trace, second: Trace) -> Iterator[Row]:
    """Measures an import and training, each with the volumes told apart and without."""
    field = {"w": (SHAPE, torch.float32)}
    cases: list[tuple[str, Schema, Give]] = [
        ("imported with the heat of the first half", ps.param_schema(field), imported),
        ("trained with the first half", ps.adamw_schema({"w": SHAPE}, param_dtype="float32", updates="touched"), trained),
    ]  # fmt: skip
    for number, (case, schema, give) in enumerate(cases):
        found = []
        for name, rate in (("plain", None), ("slow", SLOW_BYTES_PER_S)):
            bench.tell(f"{case}, {'both volumes alike' if rate is None else 'one held back'}")
            with reading_at(rate, volume=int(SLOW)):
                found.append(count(bench.directory / f"{number}-{name}", schema, give, first, second))
        yield row_of(case, schema, *found)


def row_of(case: str, schema: Schema, alike: Counted, apart: Counted) -> Row:
    if apart.classes != (1, 0) or alike.classes != (0, 0):
        raise StepMismatch(f"volumes of classes {alike.classes} and, one held back, {apart.classes}: run it on an idle machine")
    value, hottest, beyond_memory = (count / apart.reads for count in (apart.fast_reads, apart.hottest, apart.beyond_memory))
    by_free_share = alike.fast_reads / alike.reads
    best = max(hottest, by_free_share, beyond_memory) if schema.is_trainable else hottest
    return judged(
        Row(
            name="reads of the faster volume", case=case, subject=SUBJECT, value=value, unit="of all",
            record_bytes=schema.record_bytes, against="the hottest that fit", limit=best, ratio=value / best,
            target=Target("ratio", ">=", TARGET),
            parts={
                "hottest": hottest, "beyond_memory": beyond_memory, "by_free_share": by_free_share,
                "most_read": apart.most_read / apart.reads, "reads": apart.reads, "resident_share": apart.resident,
            },
        )
    )  # fmt: skip


def count(directory: Path, schema: Schema, give: Give, first: Trace, second: Trace) -> Counted:
    """Makes a namespace in a store of its own, replays the second half, and counts what each volume read."""
    keys = first.header.space
    directory.mkdir()
    volumes = directory / "slow", directory / "fast"
    with serving(directory / "store", host_budget_bytes=HOST_BYTES, settings=SETTINGS, volumes=volumes) as service:
        image_bytes = schema.part("param").image_bytes
        segments = round(RESIDENT * len(keys) * image_bytes / SEGMENT_ALIGNMENT_BYTES)
        share = SEGMENT_ALIGNMENT_BYTES * (segments + 2 * schema.is_trainable)  # working slots, and staging
        with service.store.create_namespace("moe", schema, layers=keys.layers, experts=keys.experts, host_bytes=share) as made:
            extents = int(service.stats()["volumes"][FAST]["free_bytes"]) // schema.record_bytes
            heat, changed = give(made, first)
            made.evict().wait()
            return replayed(service, made, second, heat, Room(extents, changed))


@dataclass(frozen=True, slots=True)
class Room:
    """The faster volume's extents. changed: records that each commit changes: such a one has an extent for each retained step, and
    one for the next before the oldest is free; the others have one."""

    extents: int
    changed: Collection[ExpertKey]

    def hottest(self, heat: Mapping[ExpertKey, float], *, beyond: int = 0) -> Collection[ExpertKey]:
        """The hottest records that fit there; those beyond so many first."""
        found, left = set[ExpertKey](), self.extents
        ranked = sorted(heat, key=heat.__getitem__, reverse=True)
        for key in ranked[beyond:] + ranked[:beyond]:
            taken = RETAINED_STEPS + 1 if key in self.changed else 1
            if taken <= left:
                left -= taken
                found.add(key)
        return found


def replayed(service: Service, made: ps.Namespace, trace: Trace, heat: Heat, room: Room) -> Counted:
    """Leases what the trace leases. heat: what is known of it."""
    before = service.stats()["volumes"]
    service.store.trace_begin()
    loaded: list[ExpertKey] = []
    for number, leased in enumerate(leases(trace)):
        made.acquire(leased).release()
        if number % 1000 == 999:
            loaded += loads(service)
            service.store.trace_begin()
    loaded += loads(service)
    after = service.stats()
    reads = {index: int(after["volumes"][index]["reads"]) - int(before[index]["reads"]) for index in (SLOW, FAST)}
    if sum(reads.values()) != len(loaded):
        raise StepMismatch(f"{sum(reads.values())} reads, and {len(loaded)} loads that the daemon told of")
    slots = int(after["namespaces"]["moe"]["param"]["slots"])
    classes = tuple(int(after["volumes"][index]["speed_class"]) for index in (SLOW, FAST))
    read = Counter(loaded)
    return Counted(
        read.total(), reads[FAST], sum(read[key] for key in room.hottest(heat)),
        sum(read[key] for key in room.hottest(heat, beyond=slots)), sum(count for _, count in read.most_common(room.extents)),
        slots / len(trace.header.space), (classes[0], classes[1]),
    )  # fmt: skip


def loads(service: Service) -> list[ExpertKey]:
    """Keys of the transfers from a volume since the last call of `trace_begin`."""
    return [(row[2], row[3]) for row in service.store.trace_end()["transfers"] if row[0].startswith("load")]


def leases(trace: Trace) -> Iterator[Sequence[ExpertKey]]:
    return (event.keys for event in trace.events if event.kind is TraceEventKind.ACQUIRE and event.experts)


def imported(made: ps.Namespace, first: Trace) -> tuple[Heat, Collection[ExpertKey]]:
    value = {"w": torch.zeros(SHAPE)}
    with made.begin_initialize(heat=first) as initialization:
        for key in initialization.missing:
            initialization.put(key, value)
        initialization.end()
    made.commit(0).wait()
    return heat_of(first, first.header.space, namespace=made.name), ()


def trained(made: ps.Namespace, first: Trace) -> tuple[Heat, Collection[ExpertKey]]:
    """Trains what the trace leases: gradients of what COMMIT_TOKENS tokens used, one apply and one commit. What is left over when
    the trace ends is not trained."""
    value = {"w": torch.zeros(SHAPE)}
    made.initialize(lambda _: value)
    made.commit(0).wait()
    used = set[ExpertKey]()
    changed: Collection[ExpertKey] = ()
    tokens = 0
    for event in first.events:
        if event.kind is TraceEventKind.ACQUIRE and event.experts:
            made.acquire(event.keys).release()
            used.update(event.keys)
        elif event.kind is TraceEventKind.STEP:
            tokens += 1
            if tokens % COMMIT_TOKENS == 0:
                train(made, used, tokens)
                changed, used = used, set()
    return dict(zip(made.keys(), made.residency()["heat"], strict=True)), changed


def train(made: ps.Namespace, used: Collection[ExpertKey], step: int) -> None:
    gradient = {"w": torch.ones(SHAPE)}
    made.push(dict.fromkeys(used, gradient))
    made.apply(ps.AdamW(lr=1e-3)).wait()
    made.commit(step).wait()


if __name__ == "__main__":
    sys.exit(main())
