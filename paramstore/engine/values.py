"""Whole records out: copies of what a view sees."""

from __future__ import annotations

from paramstore.core.key import ExpertKey
from paramstore.core.place import Identity
from paramstore.core.residency import MAY_MATERIALISE
from paramstore.engine.load import Loader
from paramstore.engine.namespace import NamespaceState, View
from paramstore.engine.planner import Planner
from paramstore.engine.runner import CPU_LANE, Runner
from paramstore.engine.transfers import Transfers
from paramstore.errors import StepDropped, StepFailed


class Values:
    """Reads of whole records, of all namespaces."""

    def __init__(self, planner: Planner, runner: Runner, transfers: Transfers, loader: Loader) -> None:
        self._planner = planner
        self._runner = runner
        self._transfers = transfers
        self._loader = loader

    async def read(self, view: View, key: ExpertKey, target: memoryview) -> Identity:
        """Copies the stored part's image, as `view` sees it, to `target` (record_bytes, page-aligned). Raises CorruptRecord."""
        namespace = view.namespace
        self._planner.leases.check_view(view)
        namespace.keys.check([key], namespace=namespace.name)
        if not view.is_writer:
            identity, located = view.locate(key)
            if identity is None or located is None:
                raise StepDropped(f"{key} of {namespace.name!r} has no record at step {view.step}")
            await self._transfers.read_into(namespace, key, located, target)
            return identity
        async with namespace.turn:
            return await self._read_working(namespace, key, target)

    async def _read_working(self, namespace: NamespaceState, key: ExpertKey, target: memoryview) -> Identity:
        working = namespace.working[key]
        if working.identity is None:
            raise StepFailed(f"{key} of {namespace.name!r} has no value yet: call initialize")
        identity = working.identity
        if working.state not in MAY_MATERIALISE:
            located = namespace.working_location(key)
            if located is None or located.identity != identity:  # an update tore the newest bytes
                raise StepFailed(f"{key} of {namespace.name!r}: {namespace.broken}; rollback() is the way on")
            await self._transfers.read_into(namespace, key, located, target)
            return located.identity
        held = await self._loader.hold(namespace, key)
        try:
            assert held.slot is not None
            assert namespace.working_arena is not None
            image = namespace.working_arena.view(held.slot)
            await self._runner.call(CPU_LANE, lambda: target.__setitem__(slice(None), image))
        finally:
            self._planner.working.unhold(namespace, held)
            self._transfers.drain()
        return identity
