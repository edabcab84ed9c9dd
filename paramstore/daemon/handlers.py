"""The one table from messages to the store and its parts: what each request of a known client runs.

A handler gives its result at once, or a coroutine that gives it. A call that the ranks of a group make together goes to
`Ranks`, which runs it once for all of them; with one rank it is the part's own.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any

from paramstore.daemon.channel import Channel
from paramstore.daemon.service import Service
from paramstore.daemon.uploads import Uploads
from paramstore.engine.ranks import Arrival
from paramstore.engine.report import residency
from paramstore.engine.tables.arena import SegmentMemory
from paramstore.engine.tables.collective import Argument, Call, check_rank
from paramstore.engine.tables.namespace import View
from paramstore.errors import CapacityError, ConfigError, LeaseError, TicketCancelled
from paramstore.wire import messages as m
from paramstore.wire.options import options_of

Handler = Callable[[Any], object]
"""A function of a request that gives its result at once, or a coroutine that gives it."""
COLLECTIVE: dict[type[m.Message], str] = {
    m.CreateRank: "create_namespace", m.OpenRank: "open_namespace", m.InitializeBegin: "initialize",
    m.InitializeEnd: "initialize, its end", m.GradientNorm: "gradient_norm", m.Apply: "apply",
    m.BeginApply: "begin_apply", m.EndApply: "end_apply", m.Abort: "abort", m.Commit: "commit",
    m.Prepare: "prepare", m.Finalize: "finalize", m.Rollback: "rollback",
}  # fmt: skip
"""Requests that all ranks of a group make together, with the name by which users know the call."""
OPENING = frozenset({m.CreateRank, m.OpenRank})
ORDERED = frozenset(
    {
        *COLLECTIVE, m.Acquire, m.Prefetch, m.Push, m.EndLayers, m.AwaitRoom, m.Read, m.WriteBack, m.Evict, m.InitializePut,
        m.InitializeSave,
    }
) - OPENING  # fmt: skip
"""Requests on a handle that keep their order: if a rank sends one after a collective call, it takes effect after that call."""
NOT_COMPARED = frozenset({"id", "handle", "rank"})


class Sent:
    """Result of a handler that has sent its answer itself."""


class Handlers:
    """The requests of one session. `views`, `uploads` and `cancels` belong to the session.

    client: names the session to the store. cancels: by request id, a function that ends the request while it is under way.
    """

    def __init__(
        self, service: Service, channel: Channel, *, client: object, views: dict[int, View], uploads: Uploads,
        cancels: dict[int, Callable[[], None]],
    ) -> None:  # fmt: skip
        self._service = service
        self._store = service.store
        self._channel = channel
        self._client = client
        self._views = views
        self._uploads = uploads
        self._cancels = cancels

    def table(self) -> dict[type[m.Message], Handler]:
        store, view = self._store, self.view
        return {
            m.Namespaces: lambda _: store.admission.list_namespaces(),
            m.Refresh: lambda r: (store.refresh_counted if r.is_counted else store.refresh)(view(r), r.step),
            m.AwaitStep: self._await_step,
            m.OpenUpload: self._open_upload,
            m.InitializeBegin: lambda r: self._together(
                r, lambda one: store.initializer.begin(one, is_resumed=r.is_resumed, heat=r.heat)
            ),
            m.InitializePut: self._initialize_put,
            m.InitializeSave: lambda r: store.committer.save_draft(view(r), r.extra),
            m.InitializeEnd: lambda r: self._together(r, store.initializer.end),
            m.Prefetch: self._prefetch,
            m.Push: self._push,
            m.GradientNorm: lambda r: self._together(r, store.applies.norm),
            m.Apply: lambda r: self._together(r, lambda one: store.applies.apply(one, options_of(r), r.grad_scale)),
            m.BeginApply: lambda r: self._together(r, lambda one: store.applies.begin(one, options_of(r), r.grad_scale)),
            m.EndLayers: lambda r: store.applies.end_layers(view(r), r.layers),
            m.AwaitRoom: lambda r: store.applies.await_room(view(r), r.keys, r.timeout_s),
            m.EndApply: lambda r: self._together(r, store.applies.end),
            m.Abort: lambda r: self._together(r, store.applies.abort),
            m.WriteBack: lambda r: store.write_back(view(r), r.keys),
            m.Evict: lambda r: store.evict(view(r), r.keys, r.part),
            m.Protect: lambda r: store.protect(view(r), r.keys, is_wanted=r.is_wanted),
            m.DeclareSchedule: lambda r: store.declare_schedule(view(r), r.param_visits, r.optim_visits),
            m.Commit: lambda r: self._together(r, lambda one: store.committer.commit(one, r.step, r.extra)),
            m.Prepare: lambda r: self._together(r, lambda one: store.committer.prepare(one, r.step, r.extra)),
            m.Finalize: lambda r: self._together(r, lambda one: store.history.finalize(one, r.step)),
            m.Steps: lambda r: view(r).namespace.steps.ledger.steps(),
            m.Extra: lambda r: view(r).namespace.steps.ledger.step(r.step).extra,
            m.Rollback: lambda r: self._together(r, lambda one: store.rollback(one, r.step)),
            m.Snapshot: lambda r: store.admission.snapshot(view(r), r.step),
            m.DropSnapshot: lambda r: store.admission.drop_snapshot(view(r), r.step),
            m.Snapshots: lambda r: view(r).namespace.steps.ledger.snapshots(),
            m.Read: self._read,
            m.Residency: lambda r: residency(view(r).namespace),
            m.Stats: lambda _: self._service.stats(),
            m.Verify: self._verify,
            m.TraceBegin: lambda _: store.transfers.log.listen(self._client),
            m.TraceEnd: lambda _: store.transfers.log.end(self._client),
        }

    def view(self, request: Any) -> View:
        """Finds the view that the request's handle stands for. Raises LeaseError."""
        view = self._views.get(request.handle)
        if view is None:
            raise LeaseError(f"namespace handle {request.handle} is not open in this session")
        return view

    # --- ranks

    def _together(self, r: Any, begin: Callable[[View], object]) -> object:
        """Runs `begin` with the request's view. If there are several ranks, it runs once for all of them, when all have called."""
        view = self.view(r)
        if not view.is_ranked:
            return begin(view)
        return _result(self._store.ranks.call(view, call_of(r), begin))

    def opening(self, r: Any) -> Coroutine[Any, Any, View]:
        """Opens or creates the namespace that the request names; gives its view. Raises ConfigError."""
        open_one: Callable[..., Coroutine[Any, Any, View]]
        if isinstance(r, m.CreateNamespace):
            create = self._store.admission.create
            open_one = partial(create, r.name, r.schema, layers=r.layers, experts=r.experts, host_bytes=r.host_bytes)
        else:
            open_one = partial(
                self._store.admission.open, r.name, mode=r.mode, at=r.at, host_bytes=r.host_bytes,
                min_lease_slots=r.min_lease_slots,
                max_lease_slots=r.max_lease_slots if isinstance(r, m.OpenNamespace) else None,
            )  # fmt: skip
        if not isinstance(r, m.CreateRank | m.OpenRank):
            return open_one()
        check_rank(r.rank, r.world_size, r.group)
        if r.world_size == 1:
            return open_one()
        if isinstance(r, m.OpenRank) and r.mode != "write":
            raise ConfigError(f"mode={r.mode!r}: ranks open a namespace together with mode='write'; readers open it one by one")
        arrival = Arrival(r.name, r.group, r.rank, r.world_size)
        future = self._store.ranks.open(arrival, call_of(r), lambda group: open_one(group=group))
        self._cancels[r.id] = partial(self._store.ranks.withdraw, arrival)
        return _view_of(future, r.rank)

    # --- requests with memory

    def _prefetch(self, r: m.Prefetch) -> object:
        store = self._store
        request = store.access.prefetch(self.view(r), r.keys, r.part, r.deadline_s)
        self._cancels[r.id] = partial(store.transfers.cancel_prefetch, request)
        return store.access.wait_prefetch(request)

    def _await_step(self, r: m.AwaitStep) -> object:
        followers = self._store.followers
        if sum(len(view.awaited) for view in self._views.values()) >= m.STEP_WAITS_MAX:
            raise CapacityError(f"{m.STEP_WAITS_MAX} waits for a step are under way in this session, which is the limit")
        request = followers.begin(self.view(r), r.after, r.sequence)
        self._cancels[r.id] = partial(followers.cancel, request)
        return followers.wait(request, r.timeout_s)

    def _verify(self, r: m.Verify) -> object:
        scrubber = self._service.scrubber
        scrub = scrubber.start(r.namespace, r.keys, r.bytes_per_s)
        self._cancels[r.id] = partial(scrubber.cancel, scrub, TicketCancelled("the verify was cancelled"))
        return scrubber.wait(scrub)

    def _open_upload(self, r: m.OpenUpload) -> object:
        segment, memory = self._store.uploads.open(self._client, r.size_bytes, list(self._views.values()))
        self._uploads.add(segment, memory)
        return self._sent_upload(r.id, segment, memory)

    async def _sent_upload(self, request_id: int, segment: int, memory: SegmentMemory) -> object:
        assert memory.fd is not None
        self._channel.send(m.Uploaded(request_id, segment, memory.length_bytes), [memory.fd])
        return Sent()

    def _initialize_put(self, r: m.InitializePut) -> object:
        view = self.view(r)
        length_bytes = view.namespace.schema.initial_bytes
        memory = self._uploads.holding(r.segment, r.offset_bytes, length_bytes)
        return self._store.initializer.put(view, r.key, memory.view(r.offset_bytes, length_bytes))

    def _push(self, r: m.Push) -> None:
        view = self.view(r)
        ranges = self._uploads.ranges(r.entries, view.namespace.schema.gradient_bytes)
        self._store.applies.push(view, ranges, is_last=r.is_last)

    def _read(self, r: m.Read) -> object:
        view = self.view(r)
        length_bytes = view.namespace.schema.record_bytes
        memory = self._uploads.holding(r.segment, r.offset_bytes, length_bytes)
        return self._read_record(view, r, memory.view(r.offset_bytes, length_bytes))

    async def _read_record(self, view: View, r: m.Read, target: memoryview) -> dict[str, int]:
        identity = await self._store.reading.read(view, r.key, target)
        return {"epoch": identity.epoch, "version": identity.version}


def call_of(request: m.Message) -> Call:
    """The name and arguments of a collective request, as they are compared between ranks."""
    names = [name for name in request.__struct_fields__ if name not in NOT_COMPARED]
    return Call(COLLECTIVE[type(request)], tuple(Argument(name, getattr(request, name)) for name in names))


async def _result(future: Awaitable[object]) -> object:
    return await future


async def _view_of(future: Awaitable[dict[int, View]], rank: int) -> View:
    return (await future)[rank]
