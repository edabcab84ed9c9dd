"""Which keys stand in the slots of a cache: what a visit finds there, what is loaded for it or ahead of it, and what goes.

A *visit* is one dispatch of a layer: its keys are all known, since the router has run, and in use until it ends. A key may also
be *loaded ahead* of its visit. The plan decides and counts; whoever carries it out copies, and tells when bytes have come.

- A hit is a key whose bytes were there when its visit began. One that is still under way then is *late*.
- What a visit uses is never evicted. What was loaded ahead, or is still under way, is spared until its layer is visited: it gives
  room to a visit that finds nothing else, and never to another load ahead. What that visit does not use was guessed wrong.
- A visit of more keys than may stand at once passes by: it takes free slots, evicts nobody for more than the few slots that the
  rest runs through, and so leaves what is there for the visits after it. What was loaded ahead for it runs through as well. What
  passes by stays where its slot is needed neither by that visit nor, later, by a load ahead.

A policy ranks what stands: buffering of experts ("Towards MoE Deployment", arXiv 2303.06182, section VI) has `LifoInactive`, ring
memory (SE-MoE, arXiv 2205.10034, section 3.3.2) `RingOrder`. Both papers give each layer slots of its own; here all share.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence

from paramstore.errors import CapacityError, LeaseError
from paramstore.policy.base import Policy, layer_of
from paramstore.policy.slot_visit import Held, SlotCounts, SlotVisit

UNTOLD_MAX = 64
"""Visits of which the policy is told together: a decision tells it first, so that only time is saved."""
PASSING_SLOTS = 4, 8
"""Slots for the rest of a visit that does not fit: a quarter up to the first, an eighth up to the second, as the daemon reads."""
LEFT_TO_OTHERS = 8
"""One of so many slots, at least one, is no visit's that can also do with less: another thread's goes on with it."""


class SlotPlan:
    """Owner of what stands in `slots` slots, of who uses it, and of the counts. Pure: it copies nothing and never waits. The number
    of slots may change (`grow`, `shrink`).

    passing_slots: most slots that a visit which does not fit runs its rest through; default PASSING_SLOTS. held_most: most slots
    that one visit which may pass takes; None: all.
    """

    def __init__(
        self, slots: int, policy: Policy, *, passing_slots: int | None = None, held_most: int | None = None
    ) -> None:  # fmt: skip
        self.slots = slots
        self.counts = SlotCounts()
        self._policy = policy
        few = max(1, min(PASSING_SLOTS[0], slots // 4), min(PASSING_SLOTS[1], slots // 8))
        self._passing_slots = few if passing_slots is None else passing_slots
        self.held_most = slots if held_most is None else held_most
        self._held: dict[Hashable, Held] = {}
        self._fast: dict[Hashable, Held] = {}
        """Those of `_held` that are ready and not ahead: a visit of such alone decides nothing."""
        self._lingering = 0
        """Slots of what is gone and still used."""
        self._passing: list[SlotVisit] = []
        """Visits under way that do not fit."""
        self._untold: list[Sequence[Held]] = []

    @property
    def free(self) -> int:
        """Slots that nothing stands in, and through which no visit runs the rest of its keys."""
        kept = sum(visit.passing_slots for visit in self._passing)
        return self.slots - len(self._held) - self._lingering - kept

    @property
    def is_passing(self) -> bool:
        """Whether a visit under way does not fit: loads ahead leave it what it needs by evicting nothing."""
        return bool(self._passing)

    @property
    def held(self) -> list[Held]:
        """What stands, or is on its way, in the order of arrival."""
        return list(self._held.values())

    def grow(self, count: int) -> None:
        """Has `count` slots more, between two visits or within one; the next one that does not fit takes as many more."""
        self.slots += count
        self.held_most = max(1, self.held_most + count)

    def shrink(self, count: int) -> int:
        """Has `count` slots fewer: free ones, then those of what no visit uses or waits for, loads ahead last. Returns how many
        fewer: not all where visits under way need the others. One slot stays, and one for each visit that still waits."""
        self._tell()
        waited = {key for visit in self._passing for key in visit.waiting}
        idle = [key for key, held in self._held.items() if not held.users]
        slotless = sum(bool(visit.waiting) and not visit.passing_slots for visit in self._passing)
        needed = max(slotless, sum(key in waited for key in idle))
        given = max(0, min(count, self.slots - 1, self.free + len(idle) - needed))
        for key in self._choose(given - self.free, lambda key: key in waited or self._held[key].users > 0, spares_ahead=True):
            self._evict(key)
        self.grow(-given)
        return given

    def find(self, key: Hashable) -> Held | None:
        """What stands for `key`, ready or not."""
        return self._held.get(key)

    # --- visits ---

    def visit(self, keys: Sequence[Hashable], *, may_pass: bool = False) -> SlotVisit:
        """Begins a visit of `keys`, which differ. may_pass: keys that find no slot may pass by; else all stand at once.

        Raises CapacityError on more keys than slots that may not pass, LeaseError where visits under way use too many of the
        slots; then nothing has changed.
        """
        visit = None if may_pass and len(keys) > self.held_most else self.visit_ready(keys)
        return self._decide(keys, may_pass=may_pass) if visit is None else visit

    def visit_ready(self, keys: Sequence[Hashable]) -> SlotVisit | None:
        """Begins a visit of `keys`, which differ, if the bytes of all of them stand already; else changes nothing."""
        fast = self._fast
        try:
            held = [fast[key] for key in keys]
        except (KeyError, TypeError):  # the latter: what is no key at all
            return None
        for one in held:
            one.users += 1
        self.counts.hits += len(held)
        self._untold.append(held)
        if len(self._untold) >= UNTOLD_MAX:
            self._tell()
        return SlotVisit(held)

    def end_visit(self, visit: SlotVisit) -> bool:
        """Ends a visit, and lets go of what still passes by for it; a second call does nothing. Whether what is gone may have lost
        its last user."""
        if visit.is_over:
            return False
        visit.is_over = True
        leaves = bool(visit.through)
        if visit in self._passing:
            self._passing.remove(visit)
        self.counts.passed -= len(visit.waiting)  # they never came
        visit.waiting.clear()
        for held in list(visit.through):
            self.let_out(visit, held)
        visit.passing_slots = 0
        for held in visit.held:
            held.users -= 1
            if held.is_gone:
                leaves = True
                self._lingering -= not held.users
        return leaves

    def let_in(self, visit: SlotVisit, *, due: Hashable = None) -> Held | None:
        """Gives the next key that passes by a slot, to be loaded unless it stands. None where it gets none yet, or none is left.
        due: used next, so that it gets one beside those loaded ahead for later. Raises LeaseError where others use all slots."""
        if not visit.waiting or (len(visit.through) >= self._passing_slots and visit.waiting[0] != due):
            return None
        held = self._held.get(visit.waiting[0])
        if held is None and not visit.passing_slots:
            if visit.through and visit.waiting[0] != due:
                return None
            self._keep_one(visit)
        key = visit.waiting.popleft()
        if held is None:
            held = self._held[key] = Held(key, is_ahead=False)
            held.is_passing = True
            visit.passing_slots -= 1
        else:
            self.counts.useful += held.is_ahead
            held.is_ahead = held.is_awaited = False
            self.counts.passed -= 1
            self.counts.hits += held.is_ready
            self.counts.late += not held.is_ready
        held.users += 1
        visit.through.append(held)
        taken = len(visit.held) + len(visit.through) + visit.passing_slots
        spare = min(visit.passing_slots, max(0, taken - self.held_most) if visit.waiting else visit.passing_slots)
        visit.passing_slots -= spare  # what stood already has taken the place of a kept slot
        return held

    def _keep_one(self, visit: SlotVisit) -> None:
        """Keeps a slot for a visit that has none left, since another visit has evicted what this one had found."""
        self._tell()
        victims = self._choose(1 - self.free, lambda key: self._held[key].users > 0, spares_ahead=True)
        for key in victims:
            self._evict(key)
        visit.passing_slots += 1

    def let_out(self, visit: SlotVisit, held: Held) -> None:
        """Ends the use of what has passed by: its slot is for the next key of the visit, or free where none is left. Where another
        slot is free for the next key it stays."""
        visit.through.remove(held)
        is_leaving = held.is_passing and not held.is_gone and held.users == 1
        held.users -= 1
        if held.is_gone:
            self._lingering -= not held.users
        if not is_leaving:
            return
        if visit.waiting and self.free > 0:
            held.is_passing, held.is_spare = False, True
            self._policy.hold(held.key)
            if held.is_ready:
                self._fast[held.key] = held
        else:
            self._remove(held)
        if visit.waiting:
            visit.passing_slots += 1

    def _decide(self, keys: Sequence[Hashable], *, may_pass: bool) -> SlotVisit:
        self._tell()
        found = {key: held for key in keys if (held := self._held.get(key)) is not None}
        missing = [key for key in keys if key not in found]
        idle = sum(not held.users for held in self._held.values())
        others = idle - sum(not held.users for held in found.values())
        passing_slots, given = 0, list[Hashable]()
        does_pass = len(missing) > self.free + others or (may_pass and len(keys) > self.held_most)
        if does_pass:
            if not may_pass:
                raise self._no_room(len(keys), len(missing), others)
            passing_slots = min(self._passing_slots, self.free + idle, len(missing))
            if missing and not passing_slots:
                raise self._no_room(min(len(keys), self.slots), len(missing), others)
            given = self._choose(passing_slots - self.free - others, lambda key: key not in found or found[key].users > 0)
            loaded = missing[: max(0, self.free - passing_slots)]
            needed = passing_slots - self.free - len(given)
        else:
            loaded, needed = missing, len(missing) - self.free
        victims = self._choose(needed, lambda key: key in found or self._held[key].users > 0, spares_ahead=True)
        evicted = tuple(self._evict(key) for key in (*given, *victims))
        there = {key: held for key, held in found.items() if not held.is_gone}
        visit = SlotVisit([], passing_slots=passing_slots, evicted=evicted)
        self._begin(visit, keys, there, set(loaded), passes=does_pass)
        return visit

    def _begin(
        self, visit: SlotVisit, keys: Sequence[Hashable], found: dict[Hashable, Held], loaded: set[Hashable], *, passes: bool
    ) -> None:
        held, loads, passing = list[Held](), list[Held](), list[Hashable]()
        for key in keys:
            one = found.get(key)
            is_beyond = passes and len(held) + len(visit.through) + visit.passing_slots >= self.held_most
            if is_beyond or (one is None and key not in loaded):
                passing.append(key)
                continue
            if one is None:
                one = self._held[key] = Held(key, is_ahead=False)
                loads.append(one)
            else:
                self._find(visit, one, passes=passes)
            one.users += 1
            (visit.through if one.is_passing else held).append(one)
        self.counts.misses += len(loads)
        self.counts.passed += len(passing)
        if passing or visit.through:
            self._passing.append(visit)
        if not passing:
            visit.passing_slots = 0
        visit.held, visit.loads, visit.passing = held, tuple(loads), tuple(passing)
        visit.waiting.extend(passing)
        self._note_use(keys)
        self._await_no_more(set(map(layer_of, keys)))
        for key in (*passing, *(one.key for one in visit.through)):
            if key not in self._held or self._held[key].is_passing:
                self._policy.forget(key)

    def _find(self, visit: SlotVisit, one: Held, *, passes: bool) -> None:
        """Counts a key that stands already, or is on its way."""
        self.counts.useful += one.is_ahead
        visit.ahead_ready += one.is_awaited and one.is_ready
        visit.ahead_late += one.is_awaited and not one.is_ready
        one.is_passing = passes and one.is_ahead and not one.users
        one.is_unproven = one.is_ahead and one.is_ready
        one.is_ahead = one.is_awaited = False
        self.counts.hits += one.is_ready
        self.counts.late += not one.is_ready
        if one.is_ready and not one.is_passing:
            self._fast[one.key] = one

    def skip(self, layers: Iterable[object]) -> None:
        """These layers are not visited this time: what was loaded ahead for them is spared no more."""
        self._tell()
        self._await_no_more(set(layers))

    # --- loads ---

    def ahead(
        self, keys: Iterable[Hashable], *, most: int | None = None, evicting: int | None = None
    ) -> tuple[list[Held], list[Held]]:
        """Decides which of `keys` are loaded ahead now, the first ones first, at most `most`. Returns them, and what was evicted
        for them: where `evicting` is given at most so many besides what is spare, which goes first."""
        self._tell()
        wanted = list(dict.fromkeys(keys))
        new = [key for key in wanted if key not in self._held]
        for held in filter(None, map(self._held.get, wanted)):
            held.is_awaited = held.is_ahead
        spared = {held.key for held in self._held.values() if held.users or _is_spared(held)} | set(wanted)
        idle = sum(key not in spared for key in self._held)
        spare = {key for key, held in self._held.items() if held.is_spare and key not in spared} if evicting is not None else set()
        room = max(0, self.free) + (idle if evicting is None else min(idle, evicting + len(spare)))
        new = new[: room if most is None else min(room, most)]
        first = self._choose(min(len(new) - self.free, len(spare)), lambda key: key not in spare)
        victims = first + self._choose(len(new) - self.free - len(first), lambda key: key in spare or key in spared)
        evicted = [self._evict(key) for key in victims]
        loads = []
        for key in new:
            held = self._held[key] = Held(key, is_ahead=True)
            self._policy.hold(key)
            loads.append(held)
        self.counts.ahead += len(loads)
        return loads, evicted

    def arrive(self, held: Held) -> None:
        """The bytes of `held` are in its slot."""
        held.is_ready = True
        if self._held.get(held.key) is held and not held.is_ahead and not held.is_passing:
            self._fast[held.key] = held

    def fail(self, held: Held) -> None:
        """The load of `held` has failed: its slot is free, once no visit uses it. Nothing to do where it is gone already."""
        if not held.is_gone:
            self.counts.failed += 1
            self._remove(held)

    def drop(self, held: Held) -> None:
        """What stands there is stale: it is found no more, and its slot is free once no visit uses it."""
        if not held.is_gone:
            self.counts.dropped += 1
            self._remove(held)

    def clear(self) -> None:
        """Forgets all that stands, as if it had never been there: the counts stay."""
        for held in list(self._held.values()):
            held.is_ahead = False  # nobody can say that it was wasted
            self._remove(held)

    # --- what goes ---

    def _choose(self, count: int, protected: Callable[[Hashable], bool], *, spares_ahead: bool = False) -> list[Hashable]:
        """`count` victims; the caller knows that there are so many. spares_ahead: what is spared goes last, and not never."""
        if count <= 0:
            return []
        if spares_ahead and (spared := {key for key, held in self._held.items() if _is_spared(held) and not protected(key)}):
            others = sum(not protected(key) for key in self._held) - len(spared)
            first = self._choose(min(count, others), lambda key: key in spared or protected(key))
            return first + self._choose(count - len(first), lambda key: key not in spared or protected(key))
        victims = self._policy.victims(count, protected)
        if victims is None:
            raise LeaseError(f"the policy has no {count} victims among {len(self._held)} keys")
        return victims

    def _evict(self, key: Hashable) -> Held:
        held = self._held[key]
        self.counts.evicted += 1
        self._remove(held)
        return held

    def _remove(self, held: Held) -> None:
        self.counts.wasted += held.is_ahead
        held.is_gone = True
        del self._held[held.key]
        self._fast.pop(held.key, None)
        self._policy.forget(held.key)
        self._lingering += held.users > 0

    def _tell(self) -> None:
        """Tells the policy of the visits that decided nothing."""
        untold, self._untold = self._untold, []
        self._await_no_more({layer_of(held.key) for visit in untold for held in visit})
        for visit in untold:
            self._note_use([held.key for held in visit])
            for held in visit:
                if held.is_gone and ((now := self._held.get(held.key)) is None or now.is_passing):
                    self._policy.forget(held.key)

    def _await_no_more(self, layers: set[object]) -> None:
        """Spares no more what was loaded ahead for `layers`; a name of no layer waits for its own visit."""
        for held in self._held.values():
            if held.is_awaited and (layer := layer_of(held.key)) is not None and layer in layers:
                held.is_awaited = False

    def _note_use(self, keys: Sequence[Hashable]) -> None:
        self._policy.begin_visit(keys)
        self._policy.record_all(keys)

    def _no_room(self, asked: int, missing: int, others: int) -> CapacityError | LeaseError:
        if asked > self.slots:
            return CapacityError(f"{asked} keys asked of {self.slots} slots: ask in parts, or give more slots")
        return LeaseError(
            f"{missing} of {asked} keys need a slot: {self.free + others} of {self.slots} can be had, and what is in use or on its "
            "way holds the others; release leases first, or give more slots"
        )


def _is_spared(held: Held) -> bool:
    return held.is_awaited or not held.is_ready


def most_for_one(slots: int) -> int:
    """Most of `slots` that one visit which may pass takes, so that others go on (`held_most`)."""
    return max(1, slots - max(1, slots // LEFT_TO_OTHERS))
