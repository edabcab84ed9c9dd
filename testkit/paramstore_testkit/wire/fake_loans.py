"""What `FakeDaemon` lends one session: as many slots as a test says, asked back when a test says so."""

from __future__ import annotations

from paramstore.memory.words import PAGE_BYTES, Words
from paramstore.wire.messages import Borrow, Lent


class FakeLoans:
    """Owner of a session's page of words; a handle's word has its number. lent: slots of each handle."""

    def __init__(self) -> None:
        self.to_lend = 0
        self.lent: dict[int, int] = {}
        self._page: Words | None = None

    def lend(self, request: Borrow) -> tuple[Lent, list[int]]:
        """The answer to a request, and the descriptors that go with it."""
        handle, is_new = request.handle, self._page is None
        self._page = self._page or Words()
        self.lent[handle] = self._page[handle] = max(self.lent.get(handle, 0), min(request.count, self.to_lend))
        return Lent(request.id, self.lent[handle], handle, PAGE_BYTES if is_new else 0), [self._page.fd] if is_new else []

    def recall(self, handle: int, kept: int) -> None:
        """Asks back all but `kept` slots of a handle."""
        assert self._page is not None, "nothing was lent"
        self._page[handle] = kept

    def take_back(self, handle: int, kept: int) -> None:
        self.lent[handle] = min(self.lent.get(handle, 0), kept)

    def close(self) -> None:
        if self._page is not None:
            self._page.close()
