"""The acts of the simulation's clients: one function for each kind of request, in a table by name, share and role.

To add a request: write a function of (client, view) that sends it, tells the model in `arrived` and `done` what it means,
names the errors that it may meet, and decorate it with `operation`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import sqrt
from typing import Any

from paramstore.wire import messages as m
from paramstore_testkit.sim.client import SimClient
from paramstore_testkit.sim.holdings import PAGE_BYTES, ClientView
from paramstore_testkit.sim.model import Broken, Key, State

Act = Callable[[SimClient, ClientView], None]
TRAINER, READER, STRANGER = "trainer", "reader", "stranger"
EVERYBODY = (TRAINER, READER, STRANGER)


@dataclass(frozen=True, slots=True)
class Operation:
    """A kind of request. share: its weight among all that its roles do."""

    name: str
    share: float
    roles: tuple[str, ...]
    act: Act


OPERATIONS: dict[str, Operation] = {}
"""All kinds of requests, by name."""


def operation(name: str, share: float, *roles: str) -> Callable[[Act], Act]:
    def add(act: Act) -> Act:
        OPERATIONS[name] = Operation(name, share, roles or EVERYBODY, act)
        return act

    return add


def now_in(view: ClientView) -> int:
    """Counts the moments so far of what the view sees."""
    return len(view.model.history) if view.is_writer else len(view.steps)


def states_since(view: ClientView, moment: int) -> list[State]:
    """Lists what the view may see of a request made at `moment`: the state of then, and all later ones."""
    if view.is_writer:
        return view.model.history[moment - 1 :]
    return [view.model.states[step] for step in view.steps[moment - 1 :]]


def some_keys(c: SimClient, view: ClientView, most: int) -> list[Key]:
    keys = view.model.keys
    return c.random.sample(keys, c.random.randint(1, max(1, min(most, len(keys)))))


# --- leases


@operation("acquire", 60)
def acquire(c: SimClient, view: ClientView) -> None:
    room = view.slots - len({copy[0] for lease in c.leases.values() for copy in lease.copies})
    if room > 0:
        ask_lease(c, view, some_keys(c, view, min(3, room)), timeout_s=c.random.choice((60.0, 5.0, 0.01)))


@operation("acquire_much", 1.5, READER, STRANGER)
def acquire_much(c: SimClient, view: ClientView) -> None:
    """Asks for a lease up to and above the cap."""
    ask_lease(c, view, some_keys(c, view, view.slots + 2), timeout_s=c.random.choice((5.0, 0.01)))


def ask_lease(c: SimClient, view: ClientView, keys: list[Key], *, timeout_s: float) -> None:
    since = 0
    turn = 0

    def arrived() -> None:
        nonlocal since, turn
        since, turn = now_in(view), c.world.loop.turns

    def done(answer: Any) -> None:
        if answer.id in c.asked:
            raise Broken(f"{c}: {answer.id} is answered twice")
        c.leases[answer.id] = c.granted(view, keys, answer, states_since(view, since))
        if c.world.loop.turns != turn:
            c.world.mark("lease granted after a wait")

    c.ask(
        m.Acquire(c._id(), view.handle, keys, "param", timeout_s), arrived=arrived, done=done, view=view, timeout_s=timeout_s,
        allowed=("WaitTimeout", "LeaseError", "CapacityError", "TicketCancelled"),
    )  # fmt: skip


@operation("release", 60)
def release(c: SimClient, view: ClientView) -> None:
    if c.leases:
        count = c.random.choice((1, 1, 1, 2, len(c.leases)))
        c.release(c.random.sample(list(c.leases), min(count, len(c.leases))))


@operation("prefetch", 12)
def prefetch(c: SimClient, view: ClientView) -> None:
    keys, part = some_keys(c, view, 4), c.random.choice(("param", "param", "optim"))

    def done(result: Any) -> None:
        if result["loaded"] + result["resident"] + result["skipped"] != len(keys):
            raise Broken(f"{c}: a prefetch of {len(keys)} keys came to {result}")

    deadline_s = c.random.choice((None, 0.001, 1.0))
    message = m.Prefetch(c._id(), view.handle, keys, part, deadline_s)
    c.ask(message, done=done, view=view, allowed=("TicketCancelled", "StepFailed"))  # StepFailed: after a rollback


@operation("cancel", 4)
def cancel(c: SimClient, view: ClientView) -> None:
    targets = [number for number, asked in c.asked.items() if asked.kind in ("Acquire", "Prefetch", "Verify")]
    if targets:
        c.tell(m.Cancel(c.random.choice(targets)))


@operation("protect", 1.5)
def protect(c: SimClient, view: ClientView) -> None:
    c.ask(m.Protect(c._id(), view.handle, some_keys(c, view, 3), c.random.random() < 0.5), view=view)


@operation("schedule", 0.5)
def declare_schedule(c: SimClient, view: ClientView) -> None:
    cycles = ((), ((0, "routed"), (0, "repeated"), (0, "updated")), ((0, "routed"), (0, "repeated"), (0, "replaced")))
    c.ask(m.DeclareSchedule(c._id(), view.handle, c.random.choice(cycles), c.random.choice(((), ((0, "gathered"),)))), view=view)


@operation("device", 1)
def device(c: SimClient, view: ClientView) -> None:
    keys = some_keys(c, view, 3)
    c.tell(m.DeviceReport(view.handle, keys, keys, 4096 * len(keys)))


# --- a reader's


@operation("refresh", 4, READER, STRANGER)
def refresh(c: SimClient, view: ClientView) -> None:
    if view.is_writer:
        return

    def done(step: Any) -> None:
        view.model.observe_committed(step, is_resolved=False)
        view.steps.append(step)

    c.ask(m.Refresh(c._id(), view.handle), done=done, view=view, is_exclusive=True)


@operation("pause", 1, READER, STRANGER)
def pause(c: SimClient, view: ClientView) -> None:
    """Stops reading answers for a while."""
    assert c.sock is not None
    if not view.is_writer and all(asked.kind == "Acquire" for asked in c.asked.values()):
        sock = c.sock
        sock.is_reading = False
        c.world.mark("client that does not read")
        for asked in c.asked.values():
            asked.due_s += 60.0
        c.world.loop.call_later(c.random.random(), sock.read_again)


# --- a writer's


@operation("push", 14, TRAINER, STRANGER)
def push(c: SimClient, view: ClientView) -> None:
    if not view.is_writer or c.upload is None:
        return
    model, upload, gradient = view.model, c.upload, c.world.gradient
    keys = [key for key in some_keys(c, view, 4) if key not in upload.pushed]
    entries, values = [], {}
    for key in keys:
        page = upload.take(gradient)
        if page is None:
            break
        upload.pushed[key] = page
        values[key] = c.random.choice((-2.0, -1.0, -0.5, 0.5, 1.0, 3.0))
        gradient.fill(upload.view(page, gradient), values[key])
        entries.append((*key, upload.segment, page * PAGE_BYTES))
    if not entries:
        return

    is_told = False

    def arrived() -> None:
        nonlocal is_told
        is_told = model.writer is view
        if is_told:
            model.pending.update(values)

    def failed(_: str) -> None:
        for key in values:
            if is_told:
                model.pending.pop(key, None)
            page = upload.pushed.pop(key, None)
            if page is not None:
                upload.give_back(page, gradient)
        c.wants_rollback = True

    c.ask(m.Push(c._id(), view.handle, entries), arrived=arrived, failed=failed, view=view)


class Taken:
    """Pages of pushed gradients, from the request that consumes them to its answer."""

    def __init__(self, c: SimClient) -> None:
        self._gradient = c.world.gradient
        self._upload = c.upload
        self._pages: dict[Key, int] = {}
        if c.upload is not None:
            self._pages, c.upload.pushed = c.upload.pushed, {}

    def free(self) -> None:
        """Frees the pages, which were consumed."""
        if self._upload is not None:
            for page in self._pages.values():
                self._upload.give_back(page, self._gradient)

    def give_back(self) -> None:
        """Gives the pages back: the request was refused, so what was pushed is still pending."""
        if self._upload is not None:
            self._upload.pushed.update(self._pages)


@operation("apply", 5, TRAINER, STRANGER)
def apply(c: SimClient, view: ClientView) -> None:
    if not view.is_writer:
        return
    model, lr, scale = view.model, c.random.choice((1.0, 0.5)), c.random.choice((1.0, 1.0, 0.5))
    taken = Taken(c)
    claimed: tuple[dict[Key, float], int] | None = None
    turn = 0

    def arrived() -> None:
        nonlocal claimed, turn
        turn = c.world.loop.turns
        if model.writer is view:
            claimed = model.claim(scale, lr)

    def done(result: Any) -> None:
        taken.free()
        if claimed is None or result["records"] != len(claimed[0]):
            raise Broken(f"{c}: an apply of {claimed} says {result}")
        if c.world.machine.store.namespaces[model.name].steps.cut is not None:
            c.world.mark("commit beside apply")

    def failed(error: str) -> None:
        if c.world.loop.turns == turn:
            taken.give_back()
            if claimed is not None:
                model.unclaim(*claimed)
        else:
            taken.free()
            model.is_broken = True
            c.world.mark("apply failed half-way")
        c.wants_rollback = True

    c.ask(m.Apply(c._id(), view.handle, lr, 0.9, 0.999, 1e-8, 0.0, scale), arrived=arrived, done=done, failed=failed, view=view)


@operation("abort", 0.7, TRAINER)
def abort(c: SimClient, view: ClientView) -> None:
    model, taken, count = view.model, Taken(c), 0

    def arrived() -> None:
        nonlocal count
        if model.writer is view:
            count, model.pending = len(model.pending), {}

    def done(result: Any) -> None:
        taken.free()
        if result != count:
            raise Broken(f"{c}: an abort dropped {result} gradients of {count}")

    c.ask(m.Abort(c._id(), view.handle), arrived=arrived, done=done, failed=lambda _: taken.free(), view=view)


@operation("norm", 0.7, TRAINER)
def norm(c: SimClient, view: ClientView) -> None:
    model, expected = view.model, 0.0

    def arrived() -> None:
        nonlocal expected
        elements = sum(field.elements for field in c.world.gradient.fields)
        expected = sqrt(sum(elements * value * value for value in model.pending.values()))

    def done(result: Any) -> None:
        if result != expected:
            raise Broken(f"{c}: the norm of what is pending is {result}, not {expected}")

    c.ask(m.GradientNorm(c._id(), view.handle), arrived=arrived, done=done, view=view, is_exclusive=True)


@operation("write_back", 1.5, TRAINER)
def write_back(c: SimClient, view: ClientView) -> None:
    keys = None if c.random.random() < 0.3 else some_keys(c, view, 3)
    c.ask(m.WriteBack(c._id(), view.handle, keys), view=view)


@operation("evict", 3)
def evict(c: SimClient, view: ClientView) -> None:
    keys = None if c.random.random() < 0.2 else some_keys(c, view, 4)
    part = c.random.choice((None, "param", "optim"))
    leased = {copy[0] for lease in c.leases.values() if lease.view is view for copy in lease.copies}

    def done(result: Any) -> None:
        skipped = {tuple(key) for key in result["skipped"]}
        if skipped & leased & {copy[0] for lease in c.leases.values() for copy in lease.copies}:
            c.world.mark("eviction refused by a lease")

    c.ask(m.Evict(c._id(), view.handle, keys, part), done=done, view=view)
