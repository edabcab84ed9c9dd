"""What sessions are served with: the store, and the upkeep that goes on beside them. Ends both, the upkeep first."""

from __future__ import annotations

import asyncio

from paramstore.engine.records.extents import Extents
from paramstore.engine.store import Store
from paramstore.errors import StoreUnavailable
from paramstore.upkeep.patrol import Patrol
from paramstore.upkeep.scrubber import Scrubber
from paramstore.upkeep.sums_file import SumsFile
from paramstore.upkeep.warmth import Warmth


class Service:
    """Owner of the store and its upkeep. `paramstore.daemon.assembly` makes it; every method runs on the event loop."""

    def __init__(
        self, store: Store, scrubber: Scrubber, patrol: Patrol, warmth: Warmth, extents: Extents, sums_file: SumsFile
    ) -> None:
        self.store = store
        self.scrubber = scrubber
        self.patrol = patrol
        self.warmth = warmth
        self.extents = extents
        self.sums_file = sums_file

    async def stats(self) -> dict[str, object]:
        """Counters and sizes of everything, as `status` and the demo show them."""
        return {
            **await self.store.stats(), "extents": self.extents.stats(), "verify": self.scrubber.stats(),
            "patrol": self.patrol.stats(),
        }  # fmt: skip

    async def close(self) -> None:
        """Stops applies, ends the upkeep, and closes the store. See `Store.close`."""
        self.store.stop_applies()
        stopping = StoreUnavailable("the daemon is stopping")
        await asyncio.gather(self.scrubber.close(stopping), self.patrol.close(), self.warmth.close(), self.sums_file.close())
        await self.store.close()
