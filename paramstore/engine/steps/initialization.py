"""The initial values of a namespace: given once each, in any order, over as many runs of client and daemon as it takes.

- Until the first commit only a writer can open the namespace, and no commit is taken while a key has no value: so a half-finished
  initialization is never taken for a whole namespace.
- A *draft* makes durable what was given so far. It is written like a commit, at a step that nobody can open
  (`paramstore.storage.catalog.base.DRAFT_STEP`); an initialization that resumes goes on from it, any other drops it.
"""

from __future__ import annotations

from functools import partial

from paramstore.core.heat import NO_HEAT, unpack_heat
from paramstore.core.key import ExpertKey
from paramstore.engine.planner.permission import check_writer, check_writing
from paramstore.engine.ranks import Ranks
from paramstore.engine.records.cleaner import Cleaner
from paramstore.engine.records.update import Updater
from paramstore.engine.steps.history import History, check_uncommitted
from paramstore.engine.tables.namespace import NamespaceState, View
from paramstore.engine.transfers.runner import CPU_LANE
from paramstore.engine.transfers.transfers import Transfers
from paramstore.errors import StepFailed


class Initializer:
    """Carries out the calls by which a writer gives a namespace its initial values, before the first commit."""

    def __init__(self, transfers: Transfers, history: History, updater: Updater, cleaner: Cleaner, ranks: Ranks) -> None:
        self._transfers = transfers
        self._history = history
        self._updater = updater
        self._cleaner = cleaner
        self._ranks = ranks

    async def begin(self, view: View, *, is_resumed: bool = False, heat: bytes = b"") -> dict[str, object]:
        """Begins an initialization. is_resumed: the draft's values stay; else no key has a value, and there is no draft.
        heat: how much the records are to be used, as `pack_heat` packs it.

        Returns {present, extra}: a bit for each key in key order, the first key's the lowest of the first byte, that says whether
        it has its value; and what was kept with the draft, None without one. Raises StepOutOfOrder once a step is committed,
        ProtocolError.
        """
        unpack = partial(unpack_heat, heat, view.namespace.keys)
        given = await self._transfers.runner.call(CPU_LANE, unpack) if heat else NO_HEAT
        namespace = check_writing(view)
        check_uncommitted(namespace)
        if is_resumed:
            await self._history.rollback(namespace)
            check_uncommitted(namespace)  # a commit called before this may have run while the rollback waited
        else:
            await self._history.start_over(namespace)
        with self._transfers.deciding() as planner:
            planner.begin_initialization(namespace, given)
        draft = namespace.steps.ledger.draft
        return {"present": _present(namespace), "extra": None if draft is None else draft.extra}

    async def put(self, view: View, key: ExpertKey, initial: memoryview) -> None:
        """Takes one key's value; `initial` is not needed any more on return. Other ranks that wait for this one wait on."""
        self._ranks.note_progress(view)
        await self._updater.fill(check_writer(view), key, initial)

    async def end(self, view: View) -> None:
        """Ends the initialization: every key has a whole record on a volume. Raises StepFailed naming a key without a value."""
        namespace = check_writer(view)
        if (
            missing := next((key for key, working in namespace.residency.working.items() if working.identity is None), None)
        ) is not None:
            raise StepFailed(f"initialize on {namespace.name!r}: {missing} was never given a value")
        await self._cleaner.write_back(namespace, None)
        with self._transfers.deciding() as planner:
            planner.end_initialization(namespace)


def _present(namespace: NamespaceState) -> bytes:
    """Bit field in key order that says which keys have a value."""
    bits = bytearray(-(-len(namespace.keys) // 8))
    for number, key in enumerate(namespace.keys):
        if namespace.residency.working[key].identity is not None:
            bits[number >> 3] |= 1 << (number & 7)
    return bytes(bits)
