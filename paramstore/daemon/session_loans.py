"""One session's borrowed slots: the page of words by which its client is told what it may keep, and which word is whose."""

from __future__ import annotations

from paramstore.daemon.channel import Channel
from paramstore.daemon.handlers import Sent
from paramstore.engine.store import Store
from paramstore.engine.tables.namespace import View
from paramstore.errors import CapacityError
from paramstore.memory.words import PAGE_BYTES, WORDS, Words
from paramstore.wire import messages as m


class SessionLoans:
    """Owner of the page, which is made when something is borrowed first, and of its words: one for each view that borrowed."""

    def __init__(self, store: Store, channel: Channel) -> None:
        self._store = store
        self._channel = channel
        self._page: Words | None = None
        self._is_sent = False
        """Whether the client has the page."""
        self._words: dict[View, int] = {}

    def borrow(self, view: View, r: m.Borrow) -> Sent:
        """Lends the view what it asks for, as far as there is something, and tells the client. Raises as `Store.lend`, and
        CapacityError where no page can be made or all its words are taken; then nothing is lent."""
        self._page = self._page or Words()
        if view not in self._words:
            if len(self._words) >= WORDS:
                raise CapacityError(f"{WORDS} handles of this session have borrowed lease slots, which is the limit")
            self._words[view] = min(set(range(len(self._words) + 1)).difference(self._words.values()))
        count = self._store.lend(view, r.count)
        self.tell(view)
        fds = [] if self._is_sent else [self._page.fd]
        self._channel.send(m.Lent(r.id, count, self._words[view], PAGE_BYTES if fds else 0), fds)
        self._is_sent = True
        return Sent()

    def take_back(self, view: View | None, kept: int) -> None:
        """Notes that the client keeps `kept` of the view's borrowed slots. Does nothing where the handle was closed meanwhile."""
        if view is not None:
            self._store.take_back(view, kept)
            self.tell(view)

    def tell(self, view: View) -> None:
        """Writes the view's word: how many of its borrowed slots it may keep."""
        if self._page is not None and view in self._words:
            self._page[self._words[view]] = view.loan.may_keep

    def forget(self, view: View) -> None:
        """Forgets the view, which is closed: its word is for another."""
        self._words.pop(view, None)

    def close(self) -> None:
        """Gives the page up, as the connection has ended."""
        if self._page is not None:
            self._page.close()
            self._page = None
