"""A small planner whose slots are enough for every key beside the reserve: for tests of leases."""

from __future__ import annotations

from paramstore.testing.small_planner import SmallPlanner

A, B, C, D = ((0, expert) for expert in range(4))


def desk(*, param_slots: int = 5, working_slots: int = 2, experts: int = 4, extents: int = 32) -> SmallPlanner:
    """Four experts and slots for all of them beside the reserve."""
    return SmallPlanner(experts=experts, param_slots=param_slots, working_slots=working_slots, extents=extents)
