"""Runs seeds of the simulation and reports what they met. `lives` says what a seed is."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from random import Random

from paramstore_testkit.sim.lives import Lives
from paramstore_testkit.sim.loop import VirtualLoop
from paramstore_testkit.sim.machine import installed
from paramstore_testkit.sim.markers import LEAST, MARKERS, probed
from paramstore_testkit.sim.plan import Plan, plan_of
from paramstore_testkit.sim.world import World
from paramstore_testkit.trial import telling

REQUESTS = 2000
"""Number of requests of one seed."""


@dataclass(slots=True)
class Figures:
    """Counts of what a run has done, added up over seeds."""

    seeds: int = 0
    requests: int = 0
    virtual_s: float = 0.0
    core_s: float = 0.0
    lives: int = 0
    records_checked: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    fired: Counter[str] = field(default_factory=Counter)
    markers: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    trace_hashes: dict[int, int] = field(default_factory=dict)

    def add(self, lives: Lives, core_s: float) -> None:
        world = lives.world
        self.seeds += 1
        self.requests += world.done_requests
        self.virtual_s += world.loop.time()
        self.core_s += core_s
        self.lives += lives.lives
        self.records_checked += lives.records_checked
        self.kinds += world.requests
        self.fired += world.machine.fired
        self.markers += world.markers
        self.errors += world.errors
        self.trace_hashes[world.plan.seed] = world.trace_hash

    def missed(self) -> dict[str, int]:
        """Lists markers that were met too rarely."""
        return {name: self.markers[name] for name in MARKERS if self.markers[name] < LEAST}


def run_seed(seed: int, figures: Figures, *, requests: int = REQUESTS, plan: Plan | None = None) -> World:
    """Runs one seed. Raises what the simulation found, with the seed, the request's number and the end of the trace."""
    chosen = plan or plan_of(seed)
    random = Random(seed * 2)
    loop = VirtualLoop(random, shuffles=chosen.shuffles)
    started_s = time.process_time()
    with installed(loop, random):
        world = World(chosen, loop, random)
        lives = Lives(world)
        with telling(lives.story), probed(world.mark), asyncio.Runner(loop_factory=lambda: loop) as runner:
            runner.run(lives.live(requests))
    figures.add(lives, time.process_time() - started_s)
    return world


def run_seeds(seeds: Iterable[int], *, requests: int = REQUESTS) -> Figures:
    figures = Figures()
    for seed in seeds:
        run_seed(seed, figures, requests=requests)
    return figures


def soak(seeds: Iterable[int], figures: Figures) -> None:
    """Runs `seeds`, each as long as in a test run, and adds to `figures` what they met. Raises as `run_seed`."""
    for seed in seeds:
        run_seed(seed, figures)


def report(figures: Figures) -> str:
    """Makes a report for people."""
    rate = figures.requests / figures.core_s if figures.core_s else 0.0
    lines = [
        f"{figures.seeds} seeds, {figures.requests} requests, {figures.virtual_s / 3600:.1f} virtual hours, {figures.lives} lives, "
        f"{figures.records_checked} records compared on disks, {figures.core_s:.1f} s of one core ({rate:.0f} requests a second)",
        *_columns("faults fired", figures.fired),
        *_columns("errors answered", figures.errors),
        *_columns("requests", figures.kinds),
        *_columns("markers", figures.markers),
    ]
    return "\n".join(lines)


def _columns(title: str, counts: Counter[str]) -> list[str]:
    most_first = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return [f"{title}:", *(f"  {name:<48}{count:>9}" for name, count in most_first)]
