"""`connect` and the store it returns: one session with one daemon.

A store may be used from any thread and any event loop of the process that connected, never in a forked child. When the
daemon goes away everything raises StoreUnavailable until `reconnect`; handles opened before stay stale.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from paramstore.clock import MonotonicClock
from paramstore.config import Config
from paramstore.core.arguments import choice, flag, instance, seconds, whole_number, wrong
from paramstore.core.key import ExpertKey, KeySpace, check_name
from paramstore.core.schema import Schema
from paramstore.errors import ParamStoreError, StoreUnavailable, WaitTimeout
from paramstore.sizes import format_size, parse_size
from paramstore.wire.messages import (
    LABEL_MAX,
    MAGIC,
    PREPARE_MINOR,
    PROTOCOL_MAJOR,
    PROTOCOL_MINOR,
    TRAINING_MINOR,
    VERIFY_MINOR,
    CreateNamespace,
    CreateRank,
    Hello,
    Namespaces,
    OpenNamespace,
    OpenRank,
    Request,
    Stats,
    TraceBegin,
    TraceEnd,
    Verify,
)  # fmt: skip
from paramstore_client.connection import answers
from paramstore_client.connection.address import Address, default_path, nobody_listens, parse_address, try_connect, url
from paramstore_client.connection.answers import Opened, Result, Welcome
from paramstore_client.connection.autostart import ServeOptions, connect_or_start
from paramstore_client.connection.shared_socket import Connection
from paramstore_client.connection.ticket import Ticket
from paramstore_client.gradients.upload_area import UploadArea
from paramstore_client.handle.base import ANSWER_GRACE_S, lease_bounds, plain_keys
from paramstore_client.handle.ranks import ALONE, Rank, this_rank
from paramstore_client.namespace import Namespace

T = TypeVar("T")

DEBUG_VARIABLE = "PARAMSTORE_DEBUG"
RECONNECT_TIMEOUT_S = 10.0

_log = logging.getLogger(__name__)

Dial = Callable[[float], socket.socket]
"""timeout_s -> a connected socket, or StoreUnavailable."""


def connect(
    address: Address | None = None, autostart: ServeOptions | bool = False, timeout_s: float = 10.0, *, debug: bool = False
) -> Store:
    """Opens a session with the node's daemon.

    address: `unix:///path`, the path, or the store's directory. None: where `autostart`'s daemon listens, else
    PARAMSTORE_ADDRESS, else the default.
    autostart: starts a daemon if none listens there; it outlives this process. One that runs keeps its host budget: the log says
    so where that is another than was asked for. timeout_s: for the whole call.
    debug: every use of a tensor whose lease was released raises LeaseError (also PARAMSTORE_DEBUG=1).
    Raises StoreUnavailable, VersionMismatch, ConfigError.
    """
    timeout_s = seconds("timeout_s", timeout_s)
    if not isinstance(autostart, bool | ServeOptions):
        raise wrong("autostart", autostart, "True, False or ps.ServeOptions(...)")
    options = ServeOptions() if autostart is True else autostart or None
    if address is not None:
        path = parse_address(address)
    elif options is not None:
        path = parse_address(options.socket_path())
    else:
        path = default_path()
    is_debug = flag("debug", debug) or os.environ.get(DEBUG_VARIABLE, "0") not in ("", "0")
    store = Store(path, _dial(path, options), timeout_s=timeout_s, is_debug=is_debug)
    if options is not None and options.host_budget is not None:
        with suppress(ParamStoreError):  # the first call raises what is wrong
            _tell_of_budget(store, parse_size(options.host_budget))
    return store


class Store:
    """One session with a daemon. Owner of the connection and of its upload area. A context manager.

    `connect` makes it. dial: opens the socket, now and at `reconnect`.
    """

    def __init__(self, path: Path, dial: Dial, *, timeout_s: float, is_debug: bool) -> None:
        self._path = path
        self._dial = dial
        self._is_debug = is_debug
        self._connection = greet(dial, timeout_s=timeout_s)
        self._area = UploadArea(self._connection)

    @property
    def address(self) -> str:
        """`unix:///path` of the daemon."""
        return url(self._path)

    @property
    def wait_timeout_s(self) -> float:
        """Timeout in seconds that `timeout_s=None` means."""
        return self._connection.timeout_s

    @property
    def waited_s(self) -> float:
        """Seconds that this process has waited for answers of the daemon in this session, all threads together."""
        return self._connection.role.waited_s

    def create_namespace(
        self, name: str, schema: Schema, *, layers: int | Iterable[int], experts: int, host_bytes: int | str | None = None,
        rank: int = 0, world_size: int = 1, group: str = "",
    ) -> Namespace:  # fmt: skip
        """Creates a namespace, or takes an equal one that has no commit yet, and opens it as its writer.

        layers: a count, or the indices of the layers that have experts. host_bytes: its share of the host budget.
        rank, world_size, group: as for `open_namespace`.
        Raises NamespaceExists, CapacityError naming the missing bytes, SchemaMismatch, ConfigError; StepMismatch with several
        ranks; VersionMismatch on a daemon that is too old for the schema.
        """
        instance("schema", schema, Schema, "a schema, as ps.adamw_schema(...) makes one")
        if schema.updates != "touched" or schema.state_dtype != "float32":  # an older daemon would ignore these
            what = f"create_namespace(updates={schema.updates!r}, state_dtype={schema.state_dtype!r})"
            self._connection.check_minor(TRAINING_MINOR, what)
        space, ours = KeySpace.of(layers, experts), this_rank(rank, world_size, group)
        arguments = (
            self._connection.next_id(), check_name(name), schema.describe(), list(space.layers), space.experts,
            _size("host_bytes", host_bytes),
        )  # fmt: skip
        message = CreateNamespace(*arguments) if ours.is_alone else CreateRank(*arguments, ours.rank, ours.world_size, ours.group)
        return self._open(message, f"create_namespace {name!r}", mode="write", ours=ours)

    def open_namespace(
        self, name: str, mode: str = "read", at: int | None = None, rank: int = 0, world_size: int = 1, group: str = "", *,
        host_bytes: int | str | None = None, min_lease_slots: int = 0, max_lease_slots: int | None = None,
    ) -> Namespace:  # fmt: skip
        """Opens a reader that stands on step `at`, or the writer, which fences earlier writers and goes on from `at`: later steps
        are gone. at: None means the newest committed step; a writer that gives the prepared step commits it.

        rank, world_size: of the processes of this node that write together. All open it with equal arguments, and it is opened
        once, when the last has come, which must be within `wait_timeout_s`. Their later calls are collective: see docs/ranks.md.
        Readers open one by one, whatever their rank. group: names this start of the job; "" means torchrun's run and restart count.
        min_lease_slots: the least that `lease_slots` may be; a reader is promised half of what is left to readers, or this.
        max_lease_slots: the most that a reader's `lease_slots` is to be: what it does not use is left to others, to each one who
        opens. None: no bound. A daemon before protocol 1.8 knows none.
        Raises UnknownNamespace, StepDropped, ConfigError; CapacityError, also where fewer slots are left, naming who has them;
        StepPrepared to a writer without `at` while a step is prepared; StepFailed to a reader before the first commit,
        and to a writer while a snapshot is later than `at`; StepMismatch to ranks that did not come together.
        """
        choice("mode", mode, ("read", "write"))
        at = None if at is None else whole_number("at", at)
        if mode == "write" and at is not None:
            self._connection.check_minor(PREPARE_MINOR, "open_namespace(mode='write', at=...)")
        least, most = lease_bounds(self._connection, "open_namespace", min_lease_slots, max_lease_slots)
        if mode == "write" and max_lease_slots is not None:
            raise wrong("max_lease_slots", max_lease_slots, "it for mode='read' alone: a writer is promised all that is left")
        ours = this_rank(rank, world_size, group)
        arguments = self._connection.next_id(), check_name(name), mode, at, _size("host_bytes", host_bytes)
        if mode == "read" or ours.is_alone:
            return self._open(OpenNamespace(*arguments, least, most), f"open_namespace {name!r}", mode=mode)
        message = OpenRank(*arguments, ours.rank, ours.world_size, ours.group, least)
        return self._open(message, f"open_namespace {name!r}", mode=mode, ours=ours)

    def namespaces(self) -> list[Result]:
        """One mapping {name, schema, layers, experts, committed_step, prepared_step, epoch} per namespace."""
        return self._ask(Namespaces(self._connection.next_id()), "namespaces", answers.mappings)

    def stats(self) -> Result:
        """The daemon's counters and sizes: tiers, hits and misses, bytes, queues, leases, waste."""
        return self._ask(Stats(self._connection.next_id()), "stats", answers.mapping)

    def verify(
        self, namespace: str | None = None, keys: Iterable[ExpertKey] | None = None, bytes_per_s: int | str | None = None
    ) -> Ticket[Result]:
        """Has the daemon read and check records where they lie, beside all other work; `stats()["verify"]` tells how far it is.

        namespace, keys: None means all. bytes_per_s: the most it reads, as in "100MB"; None means as much as nobody else needs.
        The result, once all are checked: {records, bytes_read, superseded, found, findings, ...}; each finding has namespace, key,
        steps, epoch, version, volume, offset_bytes and reason. Damage raises nothing. `cancel` ends it, and so does `close`.
        Raises VersionMismatch on an older daemon. The ticket raises UnknownNamespace, UnknownKey, ConfigError, and CapacityError
        while another runs.
        """
        self._connection.check_minor(VERIFY_MINOR, "verify")
        chosen = None if keys is None else plain_keys(keys)
        what = "verify" if namespace is None else f"verify {check_name(namespace)!r}"
        message = Verify(self._connection.next_id(), namespace, chosen, _size("bytes_per_s", bytes_per_s))
        return self._connection.request(message, what=what, convert=answers.mapping)

    def trace_begin(self) -> None:
        """Has the daemon keep, for this session's `trace_end`, a row of every transfer from now on. A second call starts anew."""
        self._connection.check_minor(TRAINING_MINOR, "trace_begin")
        self._ask(TraceBegin(self._connection.next_id()), "trace_begin", answers.nothing)

    def trace_end(self) -> Result:
        """Transfers since `trace_begin`: {transfers, dropped, now_s}, a transfer being [kind, namespace, layer, expert, urgency,
        bytes, submitted_s, started_s, ended_s] by this node's `time.monotonic`. dropped: rows there was no room for."""
        self._connection.check_minor(TRAINING_MINOR, "trace_end")
        return self._ask(TraceEnd(self._connection.next_id()), "trace_end", answers.mapping)

    def reconnect(self, timeout_s: float = RECONNECT_TIMEOUT_S) -> None:
        """Opens a new session at the same address, for a daemon that was restarted. Open the namespaces again after it.

        Raises StoreUnavailable; then the store is as unusable as before, and it may be tried again.
        """
        timeout_s = seconds("timeout_s", timeout_s)
        self._connection.close("it was opened before store.reconnect()")
        self._connection = greet(self._dial, timeout_s=timeout_s)
        self._area = UploadArea(self._connection)

    def close(self) -> None:
        """Ends the session: its leases, its pending gradients and its upload area. Idempotent."""
        self._connection.close("the store was closed by this client")

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # Requests under way fail with the session; after an error that ended the block this needs no warning of its own.
        self._connection.close("the store was closed by this client", is_expected=kind is not None)

    def __repr__(self) -> str:
        return f"<Store {self.address}{', closed' if self._connection.is_failed else ''}>"

    def _open(self, message: Request, what: str, *, mode: str, ours: Rank = ALONE) -> Namespace:
        connection, area = self._connection, self._area
        limit_s = None
        if not ours.is_alone:
            connection.check_minor(TRAINING_MINOR, f"{what} of several ranks")
            limit_s = connection.timeout_s + ANSWER_GRACE_S
        convert = partial(answers.result_of, kind=Opened)
        ticket = connection.request(message, what=what, convert=convert, timeout_s=limit_s)
        try:
            opened = ticket.wait()
        except BaseException:
            if not ours.is_alone:
                ticket.abandon()  # the daemon must not open it for the other ranks and one that has given up
            raise
        return Namespace(connection, area, opened, mode=mode, is_debug=self._is_debug, ours=ours)

    def _ask(self, message: Request, what: str, convert: Callable[[Any], T]) -> T:
        return self._connection.request(message, what=what, convert=convert).wait()


def _tell_of_budget(store: Store, asked_bytes: int) -> None:
    """Logs where the daemon has another host budget than was asked for, as one does that ran before."""
    if (kept_bytes := store.stats()["tiers"]["host"]["budget_bytes"]) != asked_bytes:
        _log.warning(
            "the daemon that runs has host_budget %s, and keeps it: for the %s asked for, `paramstore stop %s`, then connect again",
            format_size(kept_bytes), format_size(asked_bytes), store.address,
        )  # fmt: skip


def _dial(path: Path, options: ServeOptions | None) -> Dial:
    def dial(timeout_s: float) -> socket.socket:
        if options is not None:
            return connect_or_start(path, options, timeout_s=timeout_s)
        sock = try_connect(path, timeout_s=timeout_s)
        if sock is None:
            raise nobody_listens(path)
        return sock

    return dial


def greet(dial: Dial, *, timeout_s: float) -> Connection:
    """Dials, says hello and returns the connection once it is welcomed. Raises StoreUnavailable or VersionMismatch."""
    clock = MonotonicClock()
    deadline_s = clock.now_s() + timeout_s
    connection = Connection(dial(timeout_s), timeout_s=Config().wait_timeout_s)
    label = Path(sys.argv[0] if sys.argv else "").name[:LABEL_MAX]
    hello = Hello(connection.next_id(), MAGIC, PROTOCOL_MAJOR, PROTOCOL_MINOR, os.getpid(), label)
    try:
        ticket = connection.request(hello, what="hello", convert=partial(answers.result_of, kind=Welcome), is_cancellable=False)
        welcome = ticket.wait(max(deadline_s - clock.now_s(), 0.0))
    except WaitTimeout as error:
        ticket.abandon()  # closing the connection fails it too: the error raised here says it all
        connection.close("it did not answer the hello")
        raise StoreUnavailable(f"the daemon did not answer the hello within {timeout_s:g} s") from error
    except BaseException:
        connection.close("it refused the hello")
        raise
    if welcome.wait_timeout_s is not None:
        connection.timeout_s = welcome.wait_timeout_s
    connection.minor = welcome.minor
    connection.store_uuid, connection.daemon_pid = welcome.store_uuid, welcome.pid
    return connection


def _size(name: str, size: int | str | None) -> int | None:
    return None if size is None else parse_size(size) if isinstance(size, str) else whole_number(name, size)
