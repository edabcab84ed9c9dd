"""The most hits that a cache can have, by Belady's choice of victims and nothing else: no plan, no planner."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from paramstore.sim.belady import Belady


def optimal_hits(uses: Sequence[Hashable], slots: int) -> int:
    """Counts the most hits that `slots` slots, empty at first, can have on `uses`, one after the other."""
    policy, held, hits = Belady.of(uses), set[Hashable](), 0
    for name in uses:
        if name in held:
            hits += 1
        elif len(held) == slots:
            victims = policy.victims(1, lambda other: False)
            assert victims is not None
            held.discard(victims[0])
            policy.forget(victims[0])
        held.add(name)
        policy.record(name)
    return hits
