"""A small planner with slots to spare: for tests of cuts and rollbacks."""

from __future__ import annotations

from paramstore.testing.small_planner import SmallPlanner

A, B, C, D = ((0, expert) for expert in range(4))


def desk(
    *, experts: int = 4, param_slots: int = 6, working_slots: int = 3, extents: int = 32, is_committed: bool = True
) -> SmallPlanner:
    return SmallPlanner(
        experts=experts, param_slots=param_slots, working_slots=working_slots, extents=extents, is_committed=is_committed
    )
