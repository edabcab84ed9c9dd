"""Runs the state machines of the property tests: many lives that are the same in each run, then some of a new seed.

The new seed is told before its lives begin, and with every failure; `run_seed(Machine, seed, examples=NEW_EXAMPLES)` does the
same again.
"""

from __future__ import annotations

import secrets
import sys

import pytest
from hypothesis import HealthCheck, seed, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

EXAMPLES = 300
STEPS = 50
"""Number of rules in one example."""
NEW_EXAMPLES = 30
"""Number of examples of the new seed."""
FIXED_SEED = 1


def run_seed(machine: type[RuleBasedStateMachine], number: int, *, examples: int = EXAMPLES) -> None:
    """Runs `examples` lives that `number` decides, the same each time."""
    seeded = seed(number)(type(machine.__name__, (machine,), {"__module__": machine.__module__}))
    chosen = settings(
        max_examples=examples, stateful_step_count=STEPS, deadline=None, database=None, print_blob=False,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
    )  # fmt: skip
    try:
        run_state_machine_as_test(seeded, settings=chosen)
    except BaseException as error:
        error.add_note(f"{machine.__name__}: seed {number}, {examples} examples of {STEPS} steps")
        raise


def run_fixed(machine: type[RuleBasedStateMachine]) -> None:
    """Runs the lives of every test run."""
    run_seed(machine, FIXED_SEED)


def run_new(machine: type[RuleBasedStateMachine], capsys: pytest.CaptureFixture[str]) -> None:
    """Runs lives that no run had before; their seed stands in the output, so that a run that is killed names it too."""
    number = secrets.randbelow(1 << 32)
    with capsys.disabled():
        sys.stdout.write(f"\n{machine.__name__}: seed {number}\n")
        sys.stdout.flush()
    run_seed(machine, number, examples=NEW_EXAMPLES)
