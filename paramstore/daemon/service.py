"""What sessions are served with: the store, and the upkeep that goes on beside them. Ends both, the upkeep first."""

from __future__ import annotations

import asyncio

from paramstore.engine.store import Store
from paramstore.errors import StoreUnavailable
from paramstore.upkeep.patrol import Patrol
from paramstore.upkeep.scrubber import Scrubber


class Service:
    """Owner of the store and its upkeep. `paramstore.daemon.assembly` makes it; every method runs on the event loop."""

    def __init__(self, store: Store, scrubber: Scrubber, patrol: Patrol) -> None:
        self.store = store
        self.scrubber = scrubber
        self.patrol = patrol

    async def stats(self) -> dict[str, object]:
        """Counters and sizes of everything, as `status` and the demo show them."""
        return {**await self.store.stats(), "verify": self.scrubber.stats(), "patrol": self.patrol.stats()}

    async def close(self) -> None:
        """Stops applies, ends the upkeep, and closes the store. See `Store.close`."""
        self.store.stop_applies()
        await asyncio.gather(self.scrubber.close(StoreUnavailable("the daemon is stopping")), self.patrol.close())
        await self.store.close()
