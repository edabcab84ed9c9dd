"""A ticket: the client's handle on one request. Poll it, wait for it, await it, cancel it.

- A ticket settles once, with a result or an error, and stays so; every wait returns the result or raises the error.
- A wait that times out raises WaitTimeout and cancels nothing: the ticket can be waited for again.
- An error that nobody asked for is logged when the ticket is dropped: it is never lost silently.
- A settling that was interrupted is done again: it gives no second result.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Generator
from functools import partial
from traceback import walk_tb
from typing import Any, Generic, Protocol, TypeVar

from paramstore.core.arguments import seconds
from paramstore.errors import ParamStoreError, TicketCancelled, WaitTimeout
from paramstore.wire.messages import Cancel, Message, Release

T = TypeVar("T")

_log = logging.getLogger(__name__)


class Reader(Protocol):
    """Reads answers and settles the tickets that they are for: the connection that sent the requests."""

    def drain(self) -> None:
        """Reads what is there without blocking."""

    def wait(self, ticket: Ticket[Any], timeout_s: float) -> bool:
        """Reads, or waits for the thread that reads, until `ticket` is settled; False when `timeout_s` is over first."""

    def post(self, message: Message) -> None:
        """Sends a message that has no answer."""

    def watch(self, loop: asyncio.AbstractEventLoop) -> None:
        """Lets `loop`, the running one, read from here on, until `unwatch` was called as often."""

    def unwatch(self, loop: asyncio.AbstractEventLoop) -> None:
        """Ends one `watch`."""


class Ticket(Generic[T]):
    """One request and what became of it. Made by the client; settled by whichever thread reads the answer.

    Owner of its outcome. `convert` and `on_settled` run on the reading thread: they only assign and append, and raise at most a
    ParamStoreError, which is the request's. Both are called again where an interrupt came: what they do is then done once.
    `on_settled` is given the error with which the request failed, None if the daemon has done it.
    """

    def __init__(
        self,
        reader: Reader,
        request_id: int,
        *,
        what: str,
        convert: Callable[[Any], T],
        timeout_s: float,
        on_settled: Callable[[ParamStoreError | None], None] | None,
        is_cancellable: bool,
    ) -> None:
        self._reader = reader
        self.request_id = request_id
        self.what = what
        self.timeout_s = timeout_s
        self.is_settled = False
        self._convert = convert
        self._on_settled = on_settled
        self.is_cancellable = is_cancellable
        self._is_wanted = True
        self._is_seen = False
        self._is_cancelling = False
        self._results: deque[T] = deque()
        """The result, once there is one: noted within the call of C that makes it, so that an interrupt loses none."""
        self._error: BaseException | None = None
        self._unheard: _Unheard | None = None
        self._failed_at: list[tuple[object, int]] = []
        """Code and lines through which an error of no ParamStoreError came out of the settling last."""
        self._wakers: list[Callable[[], None]] = []

    def done(self) -> bool:
        """True once a result or an error is there. Takes in what the daemon has sent so far; never blocks."""
        if not self.is_settled:
            self._reader.drain()
        return self.is_settled

    def wait(self, timeout_s: float | None = None) -> T:
        """The result, as soon as it is there. timeout_s: None means the request's own, mostly the daemon's `wait_timeout_s`.

        Raises the request's own error, or WaitTimeout, which cancels nothing; StoreUnavailable if the daemon went away.
        """
        limit_s = self.timeout_s if timeout_s is None else seconds("timeout_s", timeout_s)
        if not self.is_settled and not self._wait_in_thread(limit_s):
            raise self._timeout(limit_s)
        return self._outcome()

    def settled_within(self, timeout_s: float | None = None) -> bool:
        """Waits like `wait`, and says whether there is an outcome, which is left to be asked for, an error too."""
        limit_s = self.timeout_s if timeout_s is None else seconds("timeout_s", timeout_s)
        return self.is_settled or self._reader.wait(self, limit_s)

    def __await__(self) -> Generator[Any, None, T]:
        return self._wait_in_loop().__await__()

    def cancel(self) -> bool:
        """Asks the daemon to drop the request. True: asked, and a wait raises TicketCancelled unless it took effect first.

        False: it has its outcome already, or is one that cannot be cancelled (`apply`, `commit`).
        """
        if self.is_settled or not self.is_cancellable:
            return False
        self._is_cancelling = True
        self._reader.post(Cancel(self.request_id))
        return True

    @property
    def error(self) -> BaseException | None:
        """The error it settled with; None while it is open or when it succeeded."""
        if self.is_settled:
            self._note_seen()
        return self._error

    @property
    def bytes_moved(self) -> int:
        """Bytes that the request moved, as its result says; 0 while it is open and for requests that move none."""
        result = self._results[0] if self._results else None
        if not isinstance(result, dict):
            return 0
        return sum(int(result.get(name, 0)) for name in ("bytes", "bytes_read", "bytes_written"))

    def abandon(self) -> None:
        """Gives up the outcome: cancels the request if it can be, drops the result when it comes, releases a lease in it."""
        self._is_wanted = False
        self._note_seen()
        if self.is_settled:
            self._drop_result()
        elif self.cancel():
            # A lease may have been granted already, in an answer that nobody may ever read.
            self._reader.post(Release([self.request_id]))

    # --- the connection's side ---

    def settle(self, answer: object) -> None:
        """Takes the daemon's answer. Called by the thread that read it, again where that was interrupted."""
        if not self.is_settled and not self._results and self._error is None:
            self._attempt(lambda: self._results.extend(map(self._convert, (answer,))))
        self._finish(None)

    def settle_error(self, error: ParamStoreError, *, is_expected: bool = False) -> None:
        """Takes the error of the request, or of its connection, unless it has an outcome. is_expected: it need not be logged."""
        if not self.is_settled:
            self._results.clear()
            self._error = error
            self._is_seen = self._is_seen or is_expected
        self._finish(error)

    def _finish(self, refusal: ParamStoreError | None) -> None:
        if self._on_settled is not None and not self.is_settled:
            self._attempt(partial(self._on_settled, refusal))
        self.is_settled = True
        if not self._is_wanted or self._error is not None:
            self._drop_result()
        if self._error is not None and not self._is_seen and not (self._is_cancelling and isinstance(self._error, TicketCancelled)):
            self._unheard = self._unheard or _Unheard(self.what, self._error)
        for wake in tuple(self._wakers):
            wake()

    def _attempt(self, step: Callable[[], object]) -> None:
        """Does a step of the settling. What it raises belongs to whoever waits, not to the thread that happens to read: a
        ParamStoreError at once, another error where it comes from the same lines again, as one of a signal's handler does not."""
        try:
            step()
        except ParamStoreError as error:
            self._error = error
        except Exception as error:
            lines: list[tuple[object, int]] = [(frame.f_code, line) for frame, line in walk_tb(error.__traceback__)]
            if lines != self._failed_at:
                self._failed_at = lines
                raise
            self._error = error

    def _drop_result(self) -> None:
        for result in tuple(self._results):
            release = getattr(result, "release", None)
            if release is not None:
                release()
        self._results.clear()

    # --- waiting ---

    def _wait_in_thread(self, limit_s: float) -> bool:
        try:
            return self._reader.wait(self, limit_s)
        except KeyboardInterrupt:
            self._is_seen = True  # somebody waited for it, and will not again
            raise

    async def _wait_in_loop(self) -> T:
        if self.is_settled or self.done():
            return self._outcome()
        loop = asyncio.get_running_loop()
        woken = asyncio.Event()
        self._wakers.append(lambda: _wake(loop, woken))
        self._reader.watch(loop)
        try:
            async with asyncio.timeout(self.timeout_s):
                # What another thread read between `done` and `append` woke nobody: look again before sleeping.
                while not self.is_settled:
                    await woken.wait()
        except TimeoutError:
            if not self.is_settled:
                raise self._timeout(self.timeout_s) from None
        finally:
            self._reader.unwatch(loop)
        return self._outcome()

    def _outcome(self) -> T:
        self._note_seen()
        if self._error is not None:
            raise self._error
        return self._results[0] if self._results else None  # type: ignore[return-value]  # None: it was abandoned

    def _note_seen(self) -> None:
        self._is_seen = True
        if self._unheard is not None:
            self._unheard.is_seen = True

    def _timeout(self, limit_s: float) -> WaitTimeout:
        return WaitTimeout(f"{self.what}: no answer within {limit_s:g} s; it goes on, wait again or pass a longer timeout_s")

    def __repr__(self) -> str:
        outcome = "done" if self._error is None else f"failed: {self._error!r}"
        return f"<Ticket of {self.what}, {outcome if self.is_settled else 'under way'}>"


class _Unheard:
    """The error of a ticket that nobody has asked for so far: told in the log where it goes like that. Tickets have no `__del__` of
    their own: Python drops an interrupt that is raised in one, and most tickets have nothing to tell."""

    def __init__(self, what: str, error: BaseException) -> None:
        self.is_seen = False
        self._what = what
        self._error = error

    def __del__(self) -> None:
        if not self.is_seen:
            _log.warning("%s failed and nobody waited for it: %s: %s", self._what, type(self._error).__name__, self._error)


def _wake(loop: asyncio.AbstractEventLoop, woken: asyncio.Event) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(woken.set)
