"""`make soak`: tries crash states of new seeds for hours; one, two and three volumes in turn, and crashes of lives that recover
twice. Beside each seed it runs SIMULATED_SEEDS new seeds of the simulation of the daemon.

Every seed's line and every hour's tables go to stdout. Ends at the first violation with exit code 1, the seed and what to run.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
import traceback
from dataclasses import replace

import torch

from paramstore_testkit.bugs.canaries import pytest_configure
from paramstore_testkit.crash.check import Figures
from paramstore_testkit.crash.states import Plan, enumerate_seed, report
from paramstore_testkit.disks.crash_disk import Depth
from paramstore_testkit.sim import run as sim_run

TABLE_EVERY_S = 3600.0
SIMULATED_SEEDS = 40
"""Seeds of the simulation that take about as long as one seed of the crash states."""
PLAN = Plan(acts=40, depth=Depth(random_subsets=24), resume_share=0.1, resume_levels=2)


def plan_of(seed: int) -> Plan:
    """Makes the plan of a seed; equal for equal seeds."""
    return replace(PLAN, volume_count=1 + seed % 3, with_creation=seed % 16 == 0)


def simulated_seeds(seed: int) -> range:
    """Seeds of the simulation beside `seed`: different for each, and none that every test run has."""
    return range(seed * SIMULATED_SEEDS, (seed + 1) * SIMULATED_SEEDS)


def soak(*, first_seed: int, hours: float) -> int:
    """Tries seeds from `first_seed` on, at least one, until the time is over. Gives the exit code."""
    started_s, table_s, seed, figures, simulated = time.perf_counter(), 0.0, first_seed, Figures(), sim_run.Figures()
    while True:
        try:
            figures.add(enumerate_seed(seed, plan_of(seed)))
            sim_run.soak(simulated_seeds(seed), simulated)
        except BaseException:  # noqa: BLE001 - whatever it was, the seed must be told
            tell(f"seed {seed} fails; repeat it with: python -m paramstore_testkit.soak --seed {seed} --hours 0")
            tell(traceback.format_exc())
            return 1
        seed += 1
        seconds = time.perf_counter() - started_s
        counts = f"{figures.total} states, {figures.total_distinct} distinct, {simulated.requests} requests"
        tell(f"seed {seed - 1}: {counts}, {seconds:.0f} s")
        is_over = seconds >= hours * 3600
        if is_over or seconds - table_s > TABLE_EVERY_S:
            table_s = seconds
            tell(report(figures, seeds=range(first_seed, seed), seconds=seconds, core_s=time.process_time()))
            tell(sim_run.report(simulated))
        if is_over:
            return 0


def tell(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="soak", description="Crash states and simulations of new seeds.")
    parser.add_argument("--hours", type=float, default=8.0)
    parser.add_argument("--seed", type=int, default=1000, help="the first one")
    given = parser.parse_args(arguments)
    logging.disable(logging.CRITICAL)  # there are thousands of crashes; a failure is printed
    torch.set_num_threads(1)
    pytest_configure()  # a bug that PARAMSTORE_BUG names
    return soak(first_seed=given.seed, hours=given.hours)


if __name__ == "__main__":
    sys.exit(main())
