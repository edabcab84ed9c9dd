"""Who catches up: the records of an exact namespace that an apply updates although they have no gradient. Pure.

Every apply looks at a few keys, in turn, such that each is looked at once in MISSED_MAX / 2 applies, and takes those along that
have missed half of MISSED_MAX by then. So no record ever misses more than MISSED_MAX, no apply has a burst of them, and what is
updated more often than that is never taken.
"""

from __future__ import annotations

from paramstore.core.apply_log import MISSED_MAX
from paramstore.core.key import ExpertKey
from paramstore.core.optimizers import Options
from paramstore.engine.namespace import NamespaceState, WorkingCopy

LATE_AFTER = MISSED_MAX // 2
"""Missed steps above which an apply that looks at a record takes it along."""


def due_keys(namespace: NamespaceState) -> list[ExpertKey]:
    """The keys that the apply called last takes along, if they have no gradient."""
    keys, apply = namespace.keys, namespace.log.last
    count = -(-len(keys) // LATE_AFTER)
    due = []
    for position in range(apply * count, (apply + 1) * count):
        number = position % len(keys)
        key = (keys.layers[number // keys.experts], number % keys.experts)
        target = namespace.working[key].target
        if target is not None and apply - target.version > LATE_AFTER:
            due.append(key)
    return due


def missed_steps(namespace: NamespaceState, working: WorkingCopy, *, has_gradient: bool) -> tuple[Options, ...]:
    """The options of the steps with a gradient of zeros that the apply under way makes of a record: those that it missed, and
    without a gradient the apply's own."""
    if not namespace.is_exact:
        return ()
    assert working.identity is not None
    return namespace.log.missed(after=working.identity.version, until=namespace.applies - has_gradient)
