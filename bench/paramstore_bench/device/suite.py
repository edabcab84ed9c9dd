"""Runs the tests that need a CUDA device, one row a test; on the twin, whose device is simulated, the scenarios that they share."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

from paramstore.bench.report.rows import Row
from paramstore_bench.device.place import Place
from paramstore_bench.device.plan import Plan, yes_or_no
from paramstore_testkit.source import ROOT
from paramstore_testkit.streams.faults import FAULTS
from paramstore_testkit.streams.scenario import SCENARIOS, live_long, simulate

SANITIZED = ROOT / "tests" / "gpu" / "test_device_streams.py"
OF_THIS_BENCH = ROOT / "tests" / "gpu" / "test_bench_device.py"
OPTIONS = ("-p", "no:cacheprovider", "-W", "default", "-m", "gpu")
"""Warnings are errors for the suite: a newer torch's would hide what is asked here."""


def measure_tests(place: Place, plan: Plan, directory: Path) -> Iterator[Row]:
    """Runs the tests marked `gpu`, but those under the sanitizer. On the twin they say why they are skipped."""
    yield from _run(directory, str(ROOT / "tests" / "gpu"), f"--ignore={SANITIZED}", f"--ignore={OF_THIS_BENCH}")


def measure_streams(place: Place, plan: Plan, directory: Path) -> Iterator[Row]:
    """Runs lives of a tier, which a seed decides, under torch's sanitizer; and, with a wait taken away, sees that it finds that."""
    if not place.is_twin:
        yield from _run(directory, str(SANITIZED))
        return
    for scenario in SCENARIOS:
        outcomes = [simulate(seed, scenario) for seed in range(plan.seeds)]
        wrong, races = (sum(len(found) for found in each) for each in zip(*((o.wrong, o.races) for o in outcomes), strict=True))
        yield yes_or_no(
            "scenario of streams", scenario.__name__, is_so=not wrong and not races, seeds=plan.seeds, wrong=wrong, races=races
        )
    for fault in FAULTS_SHOWN:
        with FAULTS[fault]():
            races = len(simulate(0, live_long, is_lazy=True).races)
        yield yes_or_no("planted fault is seen", fault, is_so=races > 0, races=races)


FAULTS_SHOWN = ("slots.DeviceSlots.begin_use: copy.ready.wait_on_stream()", "copier.CudaCopier.copy: after.wait_on_stream()")


def _run(directory: Path, *arguments: str) -> Iterator[Row]:
    """Runs pytest in a process of its own, whose output is this one's."""
    told, environment = directory / "tests.xml", {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # the machine's own
    command = [sys.executable, "-m", "pytest", *OPTIONS, f"--junitxml={told}", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, check=False)
    if not told.exists():
        raise RuntimeError(f"pytest ended with {done.returncode} and told nothing")
    for case in ElementTree.parse(told).iter("testcase"):
        notes = [f"{child.tag}: {child.get('message', '')}" for child in case if child.tag in ("failure", "error", "skipped")]
        is_passed = all(child.tag not in ("failure", "error", "skipped") for child in case)
        yield yes_or_no(
            "test passes", f"{case.get('classname')}::{case.get('name')}", is_so=is_passed, note="; ".join(notes),
            seconds=float(case.get("time", 0.0)),
        )  # fmt: skip
