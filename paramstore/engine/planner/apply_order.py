"""What an apply does in which order: its records, what it has written back ahead of itself, and who catches up. Pure functions.

In an exact namespace each apply looks at a few keys in turn, so that every key is looked at once in MISSED_MAX / 2 applies, and
includes those that have missed more than MISSED_MAX / 2 steps, although they have no gradient. So no record ever misses more than
MISSED_MAX, no apply gets a burst of such records, and a record that is updated more often is never included.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Sequence
from itertools import islice

from paramstore.core.apply_log import MISSED_MAX
from paramstore.core.key import ExpertKey
from paramstore.core.optimizers import Options
from paramstore.core.residency import Working
from paramstore.engine.tables.copies import WorkingCopy
from paramstore.engine.tables.namespace import NamespaceState

LATE_AFTER = MISSED_MAX // 2
"""An apply that looks at a record includes it if it has missed more steps than this."""
HOT_SHARE = 0.5
"""An open apply awaits records in memory with at least this share of the heat of the hottest one."""
LOOKAHEAD_DEPTHS = 8
"""How far ahead an apply looks for keys that need a slot, in multiples of its pipeline's depth."""


def update_order(
    keys: Iterable[ExpertKey], resident: Container[ExpertKey], *, given_up: int
) -> tuple[list[ExpertKey], list[ExpertKey]]:
    """Returns all of `keys` in the order in which to update them, and those that must not be evicted before their turn.

    Absent records pass through a few slots. So first come as many resident records as must give up theirs, `given_up`; then the
    absent ones with the other residents evenly among them, so that the volumes are busy from the first record to the last.
    Each part is in backward order, last layer first: the `param` copies made last are those that the next forward needs first.
    """
    present, absent = backward_order(keys, resident)
    if not absent:
        return present, []
    return [*present[:given_up], *_mixed(absent, present[given_up:])], present[given_up:]


def backward_order(keys: Iterable[ExpertKey], resident: Container[ExpertKey]) -> tuple[list[ExpertKey], list[ExpertKey]]:
    """Splits `keys` into resident ones and absent ones, each in the order in which a backward pass visits them."""
    present: list[ExpertKey] = []
    absent: list[ExpertKey] = []
    for key in sorted(keys, reverse=True):
        (present if key in resident else absent).append(key)
    return present, absent


def _mixed(first: Sequence[ExpertKey], second: Sequence[ExpertKey]) -> list[ExpertKey]:
    """Merges two sequences, each in its order, evenly spread."""
    parts = enumerate((first, second))
    placed = [((index + 0.5) / len(part), number, key) for number, part in parts for index, key in enumerate(part)]
    return [key for _, _, key in sorted(placed)]


def absent_ahead(queue: Iterable[ExpertKey], resident: Container[ExpertKey], *, depth: int) -> int:
    """How many slots, `depth` at most, the next keys in `queue` will ask for. It looks LOOKAHEAD_DEPTHS * depth keys ahead."""
    near = (key for key in islice(queue, LOOKAHEAD_DEPTHS * depth) if key not in resident)
    return sum(1 for _ in islice(near, depth))


def slots_to_clean(namespace: NamespaceState, wanted_slots: int, spared: Collection[ExpertKey] = ()) -> int:
    """How many dirty records must be written so that `wanted_slots` slots are free, clean or being written, without `spared`."""
    arena = namespace.memory.working
    missing = wanted_slots - arena.slots.free_count
    for state in (Working.WRITING, Working.CLEAN):
        if missing > 0:
            newest = reversed(namespace.residency.in_state[state])  # these are likely not spared
            missing -= sum(1 for _ in islice((working for working in newest if working.key not in spared), missing))
    return max(0, missing)


def due_keys(namespace: NamespaceState) -> list[ExpertKey]:
    """The keys that the newest apply includes even where they have no gradient."""
    keys, apply = namespace.keys, namespace.writing.log.last
    count = -(-len(keys) // LATE_AFTER)
    due = []
    for position in range(apply * count, (apply + 1) * count):
        number = position % len(keys)
        key = (keys.layers[number // keys.experts], number % keys.experts)
        target = namespace.residency.working[key].target
        if target is not None and apply - target.version > LATE_AFTER:
            due.append(key)
    return due


def missed_steps(namespace: NamespaceState, working: WorkingCopy, *, has_gradient: bool) -> tuple[Options, ...]:
    """Options of the zero-gradient steps that the apply under way makes on a record: one for each step that the record missed, and
    for a record without a gradient one for the apply itself."""
    if not namespace.is_exact:
        return ()
    assert working.identity is not None
    return namespace.writing.log.missed(after=working.identity.version, until=namespace.writing.applies - has_gradient)


def awaited_keys(heat: dict[ExpertKey, float], limit: int) -> set[ExpertKey]:
    """Chooses the records that an open apply awaits: the hottest of those in memory, at most `limit`. heat: of each of these."""
    least = HOT_SHARE * max(heat.values(), default=0.0)
    hottest: Iterable[ExpertKey] = sorted((key for key in heat if heat[key] >= least), key=heat.__getitem__, reverse=True)
    return set(list(hottest)[: max(0, limit)])
