"""Chooses the records of an exact namespace that an apply updates although they have no gradient: they catch up. Pure functions.

Each apply looks at a few keys in turn, so that every key is looked at once in MISSED_MAX / 2 applies, and includes those that have
missed more than MISSED_MAX / 2 steps. So no record ever misses more than MISSED_MAX, no apply gets a burst of such records, and a
record that is updated more often is never included.
"""

from __future__ import annotations

from paramstore.core.apply_log import MISSED_MAX
from paramstore.core.key import ExpertKey
from paramstore.core.optimizers import Options
from paramstore.engine.namespace import NamespaceState, WorkingCopy

LATE_AFTER = MISSED_MAX // 2
"""An apply that looks at a record includes it if it has missed more steps than this."""


def due_keys(namespace: NamespaceState) -> list[ExpertKey]:
    """The keys that the newest apply includes even where they have no gradient."""
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
    """Options of the zero-gradient steps that the apply under way makes on a record: one for each step that the record missed, and
    for a record without a gradient one for the apply itself."""
    if not namespace.is_exact:
        return ()
    assert working.identity is not None
    return namespace.log.missed(after=working.identity.version, until=namespace.applies - has_gradient)
