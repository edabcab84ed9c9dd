"""A small planner with fewer working slots than keys: for tests of working copies."""

from __future__ import annotations

from paramstore.core.residency import Working
from paramstore.core.schema import Schema
from paramstore.engine.namespace import WorkingCopy
from paramstore.testing.small_planner import SCHEMA, SmallPlanner

A, B, C, D = ((0, expert) for expert in range(4))


def desk(
    *, param_slots: int = 4, working_slots: int = 2, extents: int = 32, schema: Schema = SCHEMA, is_committed: bool = True
) -> SmallPlanner:
    return SmallPlanner(
        param_slots=param_slots, working_slots=working_slots, extents=extents, schema=schema, is_committed=is_committed
    )


def in_state(state: Working) -> tuple[SmallPlanner, WorkingCopy]:
    """A desk whose key A is in `state`."""
    small = desk(working_slots=3)
    if state in (Working.DIRTY, Working.WRITING):
        small.update(A)
        if state is Working.WRITING:
            small.begin_write(A)
    elif state is Working.UPDATING:
        small.begin_apply(A)
        small.begin_update(A)
    elif state is Working.LOADING:
        small.hold(A)
        small.start()
    elif state is Working.CLEAN:
        small.unhold(small.held(A))
    working = small.namespace.working[A]
    assert working.state is state
    return small, working
