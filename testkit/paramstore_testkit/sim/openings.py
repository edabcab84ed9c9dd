"""How clients of the simulation come and go: they make namespaces, open them for writing or reading at any step, close them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from paramstore.wire import messages as m
from paramstore_testkit.sim.client import SimClient
from paramstore_testkit.sim.holdings import PAGE_BYTES, ClientView, Upload
from paramstore_testkit.sim.model import Broken, NamespaceModel, Prepared
from paramstore_testkit.sim.operations import operation

UPLOAD_PAGES = 96


def open_upload(c: SimClient, then: Callable[[], None] | None = None) -> None:
    """Asks for a new upload segment; a session has room for one only while a namespace is open in it."""

    def done(answer: Any) -> None:
        segment, memory = answer
        c.upload = Upload(segment, memory, list(range(memory.length_bytes // PAGE_BYTES)))
        if then is not None:
            then()

    def failed(_: str) -> None:
        """Dies, since it has had too many segments: they go with the connection."""
        c.world.loop.call_soon(lambda: c.disconnect(is_dead=True))

    message = m.OpenUpload(c._id(), UPLOAD_PAGES * PAGE_BYTES)
    c.ask(message, done=done, failed=failed, is_exclusive=True, allowed=("CapacityError",))


class Opening:
    """A writer's opening under way: `arrived` and `over` are told when it reaches the core, and when it is answered."""

    def __init__(self, model: NamespaceModel, at: int | None = None) -> None:
        self._model = model
        self._at = at
        self._number = 0

    def arrived(self) -> None:
        self._number = self._model.opening_asked(self._at)

    def over(self) -> None:
        self._model.opening.pop(self._number, None)


def opened(c: SimClient, model: NamespaceModel, result: Any) -> ClientView:
    steps = [] if result["view_step"] is None else [result["view_step"]]
    view = ClientView(result["handle"], model, steps, result["lease_slots"], model.openings, bool(model.opening))
    if view.is_writer:
        model.writer = view
    c.views[view.handle] = view
    return view


def create(c: SimClient, model: NamespaceModel) -> None:
    """Makes the namespace, puts its initial values, one after the other, and commits its first step."""
    world, plan, opening = c.world, c.world.plan, Opening(model)

    def done(result: Any) -> None:
        opening.over()
        view = opened(c, model, result)
        step = result["committed_step"]
        if step is None:
            model.stand_at({}, result["epoch"])
            open_upload(c, lambda: begin(view))
        else:  # a commit of the writer before was still under way
            model.observe_committed(step, is_resolved=True)
            model.stand_at(model.states[step], result["epoch"])

    def begin(view: ClientView) -> None:
        def begun(_: object) -> None:
            model.stand_at({}, model.epoch + 1)
            put(view, 0)

        c.ask(m.InitializeBegin(c._id(), view.handle), done=begun, view=view, is_exclusive=True)

    def put(view: ClientView, index: int) -> None:
        if index == len(model.keys):
            c.ask(m.InitializeEnd(c._id(), view.handle), done=lambda _: None, view=view, is_exclusive=True)
            c.wants_commit = True
            return
        key = model.keys[index]
        assert c.upload is not None
        upload, page = c.upload, c.upload.take(world.initial)
        assert page is not None
        world.initial.fill(upload.view(page, world.initial), model.initial(key).master)

        def put_done(_: object) -> None:
            upload.give_back(page, world.initial)
            model.initialize(key)
            put(view, index + 1)

        message = m.InitializePut(c._id(), view.handle, key, upload.segment, page * PAGE_BYTES)
        c.ask(message, done=put_done, view=view, is_exclusive=True)

    message = m.CreateNamespace(
        c._id(), model.name, world.machine.schema.describe(), list(range(plan.layers)), plan.experts, world.machine.host_bytes()
    )
    c.ask(
        message, arrived=opening.arrived, done=done, failed=lambda _: opening.over(), is_exclusive=True,
        allowed=("NamespaceExists", "CapacityError"),
    )  # fmt: skip


def open_writer(c: SimClient, model: NamespaceModel) -> None:
    """Opens as writer. If a step is prepared: at that step, which commits it, or at the one before, which drops it."""
    at, c.opens_at = c.opens_at, None
    opening = Opening(model, at)

    def arrived() -> None:
        if c.world.machine.store.namespaces[model.name].steps.cut is not None:
            c.world.mark("writer came during a commit")
        opening.arrived()
        if at is not None:
            model.targets[at] = None
            model.prepared.is_dropped |= at not in model.prepared.steps  # even if a drop fails: it may have happened

    def failed(error: str) -> None:
        opening.over()
        if at is not None and error in ("StepDropped", "StepFailed", "StepPrepared"):  # any other may have come half-way
            model.targets.pop(at, None)
        if error == "StepPrepared":
            c.opens_at = c.random.choice((*model.prepared.steps, model.committed))
            c.world.mark("writer met a prepared step")

    def done(result: Any) -> None:
        opening.over()
        if at in model.prepared.steps:
            c.world.mark("prepared step committed by the next writer")
        if at is not None and at != result["committed_step"]:
            raise Broken(f"{c}: opened at {at}, got {result}")
        model.prepared = Prepared()
        model.observe_committed(result["committed_step"], is_resolved=True)
        if model.writer is not None:
            c.world.mark("writer fenced the one before")
        opened(c, model, result)
        model.stand_at(model.states[result["committed_step"]], result["epoch"])

    c.ask(
        m.OpenNamespace(c._id(), model.name, "write", at, c.world.machine.host_bytes()), arrived=arrived, done=done,
        failed=failed, is_exclusive=True,
        allowed=("CapacityError", "UnknownNamespace", "StepFailed", "StepPrepared", "StepDropped"),
    )  # fmt: skip


def open_reader(c: SimClient, model: NamespaceModel) -> None:
    steps = sorted(model.must_have())
    at = c.random.choice(steps) if steps and c.random.random() < 0.4 else None

    def done(result: Any) -> None:
        if at is None:
            model.observe_committed(result["view_step"], is_resolved=False)
        elif result["view_step"] != at:
            raise Broken(f"{c}: asked for step {at}, got {result}")
        opened(c, model, result)
        if at is not None and at != model.committed:
            c.world.mark("reader on an old step")

    def failed(error: str) -> None:
        if error == "StepDropped" and at in model.must_have() and not model.started and not model.targets:
            raise Broken(f"{c}: step {at} cannot be opened, and it must be there")

    c.ask(
        m.OpenNamespace(c._id(), model.name, "read", at, c.world.machine.host_bytes()), done=done, failed=failed,
        is_exclusive=True, allowed=("CapacityError", "UnknownNamespace", "StepFailed", "StepDropped"),
    )  # fmt: skip


@operation("close", 0.8)
def close(c: SimClient, view: ClientView) -> None:
    """Closes a view; its leases end with it."""
    mine = [lease_id for lease_id, lease in c.leases.items() if lease.view is view]
    c.check_leases([c.leases[lease_id] for lease_id in mine])
    for lease_id in mine:
        del c.leases[lease_id]
    if view.is_writer:
        c.upload = None  # a new one is opened, since applies may read what it pushed until they are answered
    view.is_lost = True

    def done(_: object) -> None:
        c.views.pop(view.handle, None)
        for lease_id in [lease_id for lease_id, lease in c.leases.items() if lease.view is view]:
            del c.leases[lease_id]  # granted while the close was on its way

    message = m.CloseNamespace(c._id(), view.handle)
    c.ask(message, arrived=lambda: c.stops_writing(view), done=done, view=view, is_exclusive=True)
