"""How many slots of a `param` arena a handle is promised when it opens, and who has how many: arithmetic over a namespace's views.

- A promise never changes. A handle that leases no more slots than that is never refused, nor does it wait for another's leases.
- Writers and readers of a training namespace have a share each, which is kept for them even while there are none; an inference
  namespace has one share for all. Together the shares are all slots less a reserve, which nobody is promised.
- Slots that are still held by views which take no more leases (fenced, or their session is gone) come off their share first; where
  those are more than the share, since some were lent, the rest comes off the other share.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from paramstore.engine.tables.namespace import NamespaceState, View, WriterGroup
from paramstore.errors import CapacityError

HOLDERS_NAMED = 6
"""Handles that a message names at most; it counts the others."""


def reserve_of(slots: int) -> int:
    """How many of `slots` nobody is promised: they are room for prefetches and for the copies that an apply makes."""
    return max(1, slots // 16) if slots > 1 else 0


def slots_promising(key_count: int) -> int:
    """The fewest slots of which `key_count` can be promised."""
    return next(slots for slots in range(key_count, 2 * key_count + 2) if slots - reserve_of(slots) >= key_count)


def share_of(slots: int, *, is_writer: bool, is_trainable: bool = True, reader_slots: int | None = None) -> int:
    """The share of `slots` of writers, or of readers. reader_slots: the setting; at least one slot is left to writers."""
    usable = slots - reserve_of(slots)
    if not is_trainable:
        return usable
    wanted = (slots // 4 if slots >= 8 else 0) if reader_slots is None else reader_slots
    readers = min(wanted, max(usable - 1, 0))
    return usable - readers if is_writer else readers


@dataclass(frozen=True, slots=True)
class Opening:
    """What a handle that opens asks for. group: the writers that open with it; None for a reader. least, most: of the slots that it
    is promised, or each of the writers."""

    group: WriterGroup | None = None
    least: int = 0
    most: int | None = None

    @property
    def is_writer(self) -> bool:
        return self.group is not None

    @property
    def world_size(self) -> int:
        return 1 if self.group is None else self.group.world_size


def promise(namespace: NamespaceState, opening: Opening, *, reader_slots: int | None = None) -> int:
    """How many slots a handle that opens now is promised, or each of the ranks that open together. A writer of a training namespace
    gets all that is left of its share; any other handle half of what is left. It is no more than `most`, but no less than `least`.

    Raises CapacityError naming the holders, where `least` is more than is left.
    """
    is_writer, world_size, least, most = opening.is_writer, opening.world_size, opening.least, opening.most
    slots, is_trainable = namespace.memory.param.planned_slots, namespace.is_trainable()
    share = share_of(slots, is_writer=is_writer, is_trainable=is_trainable, reader_slots=reader_slots)
    rivals = [view for view in namespace.views if view.is_writer == is_writer or not is_trainable]
    # Opening to write fences earlier writers: these keep only what they hold.
    ended = [view for view in rivals if view.is_fenced or (is_writer and view.is_writer)]
    promised = sum(view.lease_slots for view in rivals if view not in ended)
    left = max(0, share - promised - held_by(ended))
    if others := [view for view in namespace.views if view not in rivals]:
        others_share = share_of(slots, is_writer=not is_writer, reader_slots=reader_slots)
        gone = [view for view in others if view.is_fenced]
        held = held_by(gone) + sum(view.lease_slots for view in others if view not in gone)
        left = max(0, left - max(0, held - others_share))
    if least > left // world_size:
        ways = ["close one", *(["ask for less"] if left >= world_size else []), *ways_to_more(namespace, is_writer=is_writer)]
        raise CapacityError(
            f"namespace {namespace.name!r}: min_lease_slots={least}, but {left // world_size} of its {slots} slots are left for a "
            f"{'writer' if is_writer else 'reader'}: {holders(namespace)}; {either(ways)}"
        )
    offered = left if is_writer and is_trainable else max(left // 2, min(left, 1))
    offered //= world_size
    return max(offered if most is None else min(offered, max(most, 0)), least)


def held_by(views: Iterable[View]) -> int:
    """Slots that these views still hold together; several may hold the same copy."""
    return len({copy for view in views for copy in view.leased})


def holders(namespace: NamespaceState) -> str:
    """Text for a message that says who keeps how many slots from others, those with the most first."""
    views = sorted(filter(_kept_slots, namespace.views), key=_kept_slots, reverse=True)
    named = [_kept(view) for view in views[:HOLDERS_NAMED]]
    if others := views[HOLDERS_NAMED:]:
        named.append(f"{len(others)} others keep {sum(map(_kept_slots, others))}")
    return ", ".join(named) or "nobody keeps any"


def ways_to_more(namespace: NamespaceState, *, is_writer: bool) -> list[str]:
    """Settings that leave more slots to who opens, for a message."""
    ways = ["raise reader_slots"] if namespace.is_trainable() and not is_writer else []  # else there is one share, or no setting
    # An arena never gets more slots than two for each key, so a larger budget would not help beyond that.
    if namespace.memory.param.planned_slots < 2 * len(namespace.keys):
        ways += ["raise host_budget (host_bytes, where it was opened with them)"]
    return ways


def either(ways: Sequence[str]) -> str:
    """Text for a message: one of these ways out."""
    return ", ".join([*ways[:-1], f"or {ways[-1]}"]) if len(ways) > 1 else ways[0]


def _kept_slots(view: View) -> int:
    """Slots that this view keeps from others: its promise and its loan, or those it still holds where it takes no more leases."""
    return len(view.leased) if view.is_fenced else view.lease_slots + view.loan.count


def _kept(view: View) -> str:
    mode = "writer" if view.is_writer else "reader"
    who = f"a {mode}" if view.client is None else f"the {mode} {view.client.name}"
    if view.is_fenced:
        return f"{who} still holds {len(view.leased)}"
    return f"{who} was promised {view.lease_slots}" + (f" and lent {view.loan.count}" if view.loan.count else "")
