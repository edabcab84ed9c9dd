"""Lives of the state machines: a third of those that `make soak` runs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis.stateful import RuleBasedStateMachine

from paramstore_testkit.trials.state_machines import EXAMPLES, FIXED_SEED, run_seed

FEWER = EXAMPLES // 3


@pytest.fixture(
    params=[
        pytest.param(FEWER, id=f"{FEWER} of {EXAMPLES} lives"),
        pytest.param(EXAMPLES, marks=pytest.mark.soak, id=f"all {EXAMPLES} lives"),
    ]
)
def run_fixed(request: pytest.FixtureRequest) -> Callable[[type[RuleBasedStateMachine]], None]:
    """Runs lives of a machine that are the same in every run."""

    def run(machine: type[RuleBasedStateMachine]) -> None:
        run_seed(machine, FIXED_SEED, examples=request.param)

    return run
