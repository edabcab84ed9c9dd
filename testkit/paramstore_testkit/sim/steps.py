"""Acts of the simulation's clients that concern steps: commits at once and in two halves, rollbacks, snapshots, questions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from paramstore.wire import messages as m
from paramstore_testkit.sim.client import SimClient
from paramstore_testkit.sim.holdings import ClientView
from paramstore_testkit.sim.model import Broken, Prepared
from paramstore_testkit.sim.operations import STRANGER, TRAINER, Taken, apply, operation, push


@operation("commit", 2.5, TRAINER, STRANGER)
def commit(c: SimClient, view: ClientView) -> None:
    if not view.is_writer:
        return
    model, world = view.model, c.world
    step = world.next_step(model)

    def arrived() -> None:
        if model.writer is view:
            model.commit_asked(step)

    def done(result: Any) -> None:
        if result["step"] != step:
            raise Broken(f"{c}: commit({step}) answers {result}")
        model.commit_done(step)
        if any(asked.kind == "Apply" and asked.turn >= 0 for asked in c.asked.values()):
            world.mark("commit beside apply")

    def failed(error: str) -> None:
        c.wants_rollback = True
        if not world.is_unsure:
            model.commit_failed(step)

    c.ask(m.Commit(c._id(), view.handle, step, str(step).encode()), arrived=arrived, done=done, failed=failed, view=view)


@operation("commit_again", 0.3, TRAINER)
def commit_again(c: SimClient, view: ClientView) -> None:
    """Commits the committed step once more, with nothing between."""
    model = view.model
    if c.asked or (c.upload and c.upload.pushed) or model.committed is None or model.working != model.states[model.committed]:
        return

    def done(result: Any) -> None:
        if result["records"]:
            raise Broken(f"{c}: the same step with nothing changed wrote {result}")
        c.world.mark("step committed again")

    c.ask(m.Commit(c._id(), view.handle, model.committed), done=done, view=view, is_exclusive=True)


@operation("rollback", 1.0, TRAINER)
def rollback(c: SimClient, view: ClientView) -> None:
    if not view.is_writer:
        return
    model, world = view.model, c.world
    steps = sorted(model.must_have())
    if not steps:
        return
    step = c.random.choice((steps[-1], steps[-1], steps[0]))
    taken = Taken(c)
    was_there = is_target = False

    def arrived() -> None:
        nonlocal was_there, is_target
        if model.writer is view:
            was_there, is_target = step in model.must_have(), step not in model.targets
            model.targets[step] = None
            if world.machine.store.namespaces[model.name].steps.cut is not None:
                world.mark("rollback during a commit")

    def done(epoch: Any) -> None:
        taken.free()
        model.rolled_back(step)
        model.stand_at(model.states[step], epoch)
        c.wants_rollback = False

    def failed(error: str) -> None:
        taken.give_back()
        if is_target and not world.is_unsure and step not in model.opening.values():  # unless somebody else goes back there
            model.targets.pop(step, None)
        if error == "StepDropped" and was_there and step in model.must_have() and not model.started and not model.opening:
            raise Broken(f"{c}: rollback to {step} is refused, and it must be there")

    allowed = ("StepDropped", "StepFailed")  # a commit under way may drop it; a snapshot may lie beyond
    c.ask(
        m.Rollback(c._id(), view.handle, step), arrived=arrived, done=done, failed=failed, view=view, allowed=allowed,
        is_exclusive=True,
    )  # fmt: skip


@operation("regret", 0.7, TRAINER)
def regret(c: SimClient, view: ClientView) -> None:
    """Starts an apply of many records, and a rollback before it is over."""
    for _ in range(4):
        push(c, view)
    apply(c, view)

    def later() -> None:
        if c.views.get(view.handle) is view and not c.is_exclusive:
            rollback(c, view)

    c.world.later(c.random.random() * 6 * c.world.plan.io_s, later)


# --- a group's commit


@operation("prepare", 0.6, TRAINER)
def prepare(c: SimClient, view: ClientView) -> None:
    """Makes a step in two halves; now and then its writer dies between them."""
    if c.asked or not view.is_writer or view.model.writer is not view:
        return
    model, world = view.model, c.world
    step = world.next_step(model)

    def settled(_: str) -> None:
        c.wants_rollback = True
        if not world.is_unsure:
            model.prepared.steps.pop(step, None)

    def done(_: object) -> None:
        model.prepared.is_sure = True
        if c.random.random() < 0.3:
            world.mark("writer died with a prepared step")
            world.loop.call_soon(lambda: c.disconnect(is_dead=True))
        else:
            finalize(c, view, step)

    message = m.Prepare(c._id(), view.handle, step, str(step).encode())
    c.ask(message, arrived=lambda: model.prepare_asked(step), done=done, failed=settled, view=view, is_exclusive=True)


def finalize(c: SimClient, view: ClientView, step: int) -> None:
    model = view.model

    def arrived() -> None:
        model.started[step] = None

    def done(_: object) -> None:
        model.commit_done(step)
        model.prepared = Prepared()
        c.world.mark("step prepared and finalized")

    def failed(_: str) -> None:
        """Dies: the step stays prepared, and another writer may go on from there."""
        if not c.world.is_unsure:
            model.started.pop(step, None)
        c.world.loop.call_soon(lambda: c.disconnect(is_dead=True))

    c.ask(m.Finalize(c._id(), view.handle, step), arrived=arrived, done=done, failed=failed, view=view, is_exclusive=True)


# --- which there are


@operation("steps", 1)
def steps(c: SimClient, view: ClientView) -> None:
    c.ask(m.Steps(c._id(), view.handle), done=view.model.check_steps, view=view)


@operation("snapshots", 0.3)
def snapshots(c: SimClient, view: ClientView) -> None:
    c.ask(m.Snapshots(c._id(), view.handle), done=view.model.check_snapshots, view=view)


@operation("extra", 0.7)
def extra(c: SimClient, view: ClientView) -> None:
    model = view.model
    if model.committed is None:
        return
    step = model.committed

    def done(result: Any) -> None:
        if result != str(step).encode():
            raise Broken(f"{c}: extra of step {step} is {result!r}")

    c.ask(m.Extra(c._id(), view.handle, step), done=done, view=view, allowed=("StepDropped",))


def ask_snapshot(c: SimClient, view: ClientView, message: Any, step: int, settle: Callable[[], None]) -> None:
    model = view.model

    def arrived() -> None:
        model.snapshots.unsure[step] = None

    def done(_: object) -> None:
        model.snapshots.unsure.pop(step, None)
        settle()

    def failed(_: str) -> None:
        if not c.world.is_unsure:
            model.snapshots.unsure.pop(step, None)

    c.ask(
        message, arrived=arrived, done=done, failed=failed, view=view, is_exclusive=True, allowed=("StepDropped", "CapacityError")
    )


@operation("snapshot", 0.3, TRAINER)
def snapshot(c: SimClient, view: ClientView) -> None:
    model = view.model
    if len(model.snapshots.kept) < 2 and model.steps:
        step = model.steps[-1]
        ask_snapshot(c, view, m.Snapshot(c._id(), view.handle, step), step, lambda: model.snapshots.kept.update({step: None}))


@operation("drop_snapshot", 0.4, TRAINER)
def drop_snapshot(c: SimClient, view: ClientView) -> None:
    model = view.model
    if model.snapshots.kept:
        step = c.random.choice(list(model.snapshots.kept))
        ask_snapshot(c, view, m.DropSnapshot(c._id(), view.handle, step), step, lambda: model.snapshots.kept.pop(step, None))
