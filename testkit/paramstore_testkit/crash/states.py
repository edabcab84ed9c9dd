"""Enumerates every crash of a life: at each event all states that a power cut may leave, and the crashes of the lives after that.

A state is right if the real recovery opens it, last acknowledged step <= reopened step <= last started, the acknowledged step
before is there too, and every record of every step is the model's (`check`). On some states a daemon is really started;
a writer opens the store, trains and commits; its own writes are enumerated in turn, which gives crashes during recovery.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random

from paramstore_testkit.crash.check import Checker, Figures, Verdict
from paramstore_testkit.crash.initialization import begin, initialize
from paramstore_testkit.crash.life import ACTS, VOLUME_BYTES, Act, Life, machine_of, new_machine
from paramstore_testkit.disks.crash_disk import FULL, SMALL, CrashDisk, Depth, NumberedCatalog, State, copied
from paramstore_testkit.disks.journal import Event, Noted
from paramstore_testkit.trial import one_thread, telling

AFTER_RECOVERY = "after recovery: "
"""Begins the kinds of states that a daemon left which recovered from a crash."""
LIMIT_S = 600.0
RESUMED_ACTS = ("train few", "commit", "train few", "commit")


@dataclass(frozen=True, slots=True)
class Plan:
    """Extent of the tests of one seed. resume_share: share of the events at which a daemon is really started on a state.

    acts: the acts of the life, or how many the seed draws.
    """

    acts: int | tuple[Act, ...] = 24
    volume_count: int = 2
    depth: Depth = FULL
    resumed_depth: Depth = SMALL
    resume_share: float = 0.08
    resume_levels: int = 1
    with_drafts: bool = False
    """Whether the namespace is initialised in two attempts."""
    updates: str = "touched"
    """The namespace's update rule."""
    with_creation: bool = True
    """Whether crashes before the namespace exists are tried too; of several seeds, the first does so."""


@dataclass(slots=True)
class Promise:
    """What a store may reopen with at this point of a life, as the run was told."""

    is_created: bool = False
    started: int | None = None
    acknowledged: tuple[int, ...] = ()
    kept: frozenset[int] = frozenset()
    """Steps kept as snapshots."""
    prepared: frozenset[int | None] = frozenset((None,))
    """Steps that may be the prepared one; None: there may be none."""
    finalizing: int | None = None
    """A step under finalize: it is prepared still, or committed."""
    drafted: int = 0
    drafting: int = 0
    """Number of the last draft that was acknowledged (`drafted`), and that was started (`drafting`)."""

    def hear(self, event: Event) -> None:
        match event:
            case Noted("created"):
                self.is_created = True
            case Noted("started", step):
                self.started = step
            case Noted("acknowledged", step):
                self.acknowledged = (*self.acknowledged, step)
                self.prepared, self.finalizing = frozenset((None,)), None
            case Noted("drafting", step):
                self.drafting = step
            case Noted("drafted", step):
                self.drafted = step
            case Noted("preparing", step):
                self.prepared = frozenset((None, step))
            case Noted("prepared", step):
                self.prepared = frozenset((step,))
            case Noted("finalizing", step):
                self.started = self.finalizing = step
            case Noted("kept", step):
                self.kept |= {step}
            case Noted("dropping", step):
                self.kept -= {step}
            case Noted("rolling back", step):
                self.acknowledged = (step,)
                self.prepared |= {None}
            case Noted("rolled back", step):
                self.started = step
                self.prepared = frozenset((None,))
            case _:
                pass

    def check(self, verdict: Verdict) -> None:
        least = self.acknowledged[-1] if self.acknowledged else None
        assert verdict.has_namespace or not self.is_created, "an acknowledged namespace is gone"
        step = verdict.step
        assert least is None or (step is not None and step >= least), f"reopens at step {step}, {least} was acknowledged"
        assert step is None or (self.started is not None and step <= self.started), f"reopens at {step}, beyond {self.started}"
        draft = verdict.draft
        assert step is None or not draft, f"draft {draft} is there beside step {step}"
        is_drafted = self.drafted <= draft <= self.drafting
        assert step is not None or is_drafted, f"reopens with draft {draft}: {self.drafted} was saved, {self.drafting} started"
        is_finalized = step is not None and step == self.finalizing and verdict.prepared is None
        assert is_finalized or verdict.prepared in self.prepared, f"step {verdict.prepared} is prepared, not of {self.prepared}"
        if step is not None:
            assert self.kept.issubset(verdict.steps), f"snapshots {sorted(self.kept)} are gone: {verdict.steps}"
            before = [acknowledged for acknowledged in self.acknowledged if acknowledged < step]
            assert not before or before[-1] in verdict.steps, f"step {before[-1]} is not retained: {verdict.steps}"


class Enumeration:
    """All crashes of one seed."""

    def __init__(self, seed: int, plan: Plan) -> None:
        self.seed = seed
        self.plan = plan
        self.random = Random(seed)
        self.checker = Checker()
        self.trace = hashlib.sha256()
        """Hash of what happened, without uuids: equal seeds give equal ones."""

    async def run(self) -> Figures:
        life = Life(new_machine(self.seed, volume_count=self.plan.volume_count), seed=self.seed, updates=self.plan.updates)
        disk = CrashDisk.blank(volume_count=self.plan.volume_count, volume_bytes=VOLUME_BYTES)
        return await self._run(life, disk)

    async def _run(self, life: Life, disk: CrashDisk) -> Figures:
        with telling(life.story):
            await begin(life, with_drafts=self.plan.with_drafts)
            acts = self.plan.acts
            await life.live_through([life.draw(ACTS) for _ in range(acts)] if isinstance(acts, int) else acts)
            self.checker.figures.acts.update(life.acts)
            await self._crash_everywhere(life, disk, Promise(), self.plan.depth, level=0)
        return self.checker.figures

    async def _crash_everywhere(self, life: Life, disk: CrashDisk, promise: Promise, depth: Depth, *, level: int) -> None:
        is_silent = level == 0 and not self.plan.with_creation
        for position, event in enumerate([None, *life.journal.events]):
            if event is not None:
                disk.advance(event)
                promise.hear(event)
                is_silent &= not promise.is_created
            if is_silent:
                continue
            self.checker.figures.events += 1
            states = list(disk.states(event, self.random, depth))
            chosen = self.random.randrange(len(states)) if self.random.random() < self.plan.resume_share else -1
            for number, state in enumerate(states):
                try:
                    verdict = self._crash(life, disk, promise, state, level=level)
                    if number == chosen and level < self.plan.resume_levels and promise.is_created:
                        await self._resume(life, disk, promise, state, verdict, level=level)
                except BaseException as error:
                    error.add_note(f"level {level}: crash after event {position} ({str(event)[:80]}), {state.kind} ({number})")
                    raise

    def _crash(self, life: Life, disk: CrashDisk, promise: Promise, state: State, *, level: int) -> Verdict:
        catalog = disk.catalog if state.is_applied else disk.before
        kind = state.kind if level == 0 else f"{AFTER_RECOVERY}{state.kind}"
        effect = disk.edit(state.edits)
        try:
            verdict = self.checker.check(disk, catalog, kind, effect, life.model.steps)
        finally:
            disk.restore(state.edits)
        promise.check(verdict)
        if level:
            self.checker.figures.crashes_during_recovery += 1
        self.trace.update(repr((state.kind, verdict)).encode())
        return verdict

    async def _resume(
        self, life: Life, disk: CrashDisk, promise: Promise, state: State, verdict: Verdict, *, level: int
    ) -> None:
        """Starts a daemon on what the crash left, and goes on; everything it does is crashed in turn."""
        catalog = disk.catalog if state.is_applied else disk.before
        effect = disk.edit(state.edits)
        try:
            seed = self.random.randrange(1 << 30)
            machine = machine_of(disk.image, catalog.contents, seed=seed)
            heir = Life(machine, seed=seed, steps=life.model.steps, updates=life.model.schema.updates)
            left = CrashDisk(
                {index: copied(image) for index, image in disk.image.items()},
                NumberedCatalog(catalog.number, catalog.contents), effect.digest,
            )  # fmt: skip
        finally:
            disk.restore(state.edits)
        self.checker.figures.resumed += 1
        await heir.resume()
        assert (heir.committed if verdict.has_namespace else None) in (verdict.step, verdict.prepared)
        if verdict.has_namespace and heir.committed is None:
            await initialize(heir, with_drafts=False)
            await heir.commit()
        if heir.can_train:
            await heir.live_through(RESUMED_ACTS)
        acknowledged = tuple(step for step in verdict.steps if step != verdict.step)
        after = Promise(
            verdict.has_namespace, verdict.step, (*acknowledged, verdict.step) if verdict.step is not None else (), promise.kept,
            frozenset((verdict.prepared,)), drafted=verdict.draft, drafting=verdict.draft,
        )  # fmt: skip
        await self._crash_everywhere(heir, left, after, self.plan.resumed_depth, level=level + 1)
        await heir.machine.crash()


def enumerate_seed(seed: int, plan: Plan) -> Figures:
    """Tries all crashes of one seed. Raises AssertionError, or what recovery raised, with a note on how to repeat it."""
    return asyncio.run(asyncio.wait_for(Enumeration(seed, plan).run(), LIMIT_S))


def enumerate_seeds(seeds: range, plan: Plan, *, tell: Callable[[str], None]) -> Figures:
    """Tries all crashes of all seeds, and tells a report."""
    figures = Figures()
    started_s, core_started_s = time.perf_counter(), time.process_time()
    with one_thread():
        for seed in seeds:
            figures.add(enumerate_seed(seed, replace(plan, with_creation=plan.with_creation and seed == seeds.start)))
    core_s = time.process_time() - core_started_s
    tell(report(figures, seeds=seeds, seconds=time.perf_counter() - started_s, core_s=core_s))
    return figures


def report(figures: Figures, *, seeds: range, seconds: float, core_s: float) -> str:
    """Reports what was tried, by kind of state. core_s: processor time; the rest went to others on the machine."""
    lines = [
        f"crash states: {figures.total} states, {figures.total_distinct} distinct (image, catalog) pairs, "
        f"{figures.read} read in full; {len(seeds)} seeds ({seeds.start} to {seeds.stop - 1}), {figures.events} events",
        f"after recovery by a real daemon: {figures.crashes_during_recovery} states of {figures.resumed} daemons",
        f"{seconds:.1f} s, {core_s:.1f} s of one core: {figures.total_distinct / core_s:.0f} distinct states a core-second",
        f"{'kind':<48}{'states':>10}{'distinct':>10}",
    ]
    lines += [f"{kind:<48}{number:>10}{figures.distinct.get(kind, 0):>10}" for kind, number in sorted(figures.states.items())]
    lines.append("acts: " + ", ".join(f"{name} {number}" for name, number in sorted(figures.acts.items())))
    return "\n".join(lines)
