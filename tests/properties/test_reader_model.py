"""Readers on their steps beside a writer: whatever happens, every byte they see is of their step, and the steps that stay are
exactly those that should."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from itertools import count
from typing import Any, TypeVar

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from paramstore.core.key import ExpertKey
from paramstore.core.residency import Copy
from paramstore.engine.tables.copies import ParamCopy
from paramstore.engine.tables.namespace import LeaseRequest
from paramstore.errors import CapacityError, LeaseError, StepDropped, StepFailed, StepPrepared
from paramstore.optim.tensors import field_tensor
from paramstore_testkit.disks.machine import Machine, PlainSegment
from paramstore_testkit.stores import small_store
from paramstore_testkit.stores.small_store import EXPERTS, OPTIONS, SCHEMA, read_record
from paramstore_testkit.trials.reader_model import Lease, Reader, State, expected
from paramstore_testkit.trials.state_machines import run_new

KEYS = [(0, expert) for expert in range(EXPERTS)]
KEY = st.sampled_from(KEYS)
SOME = st.lists(KEY, min_size=1, max_size=2, unique=True)
PICK = st.integers(0, 11)
READERS_MAX = 4
SNAPSHOTS_MAX = 3
LIMIT_S = 20.0
IDLE_TURNS = 20
T = TypeVar("T")


class ReaderMachine(RuleBasedStateMachine):
    """`steps` is the model: each step that stays, with all its records. `working` is what the writer would commit."""

    @initialize(
        retained=st.integers(2, 3), held=st.integers(0, 2), volumes=st.integers(1, 2), is_lru=st.booleans(), slots=st.integers(4, 8)
    )
    def start(self, retained: int, held: int, volumes: int, is_lru: bool, slots: int) -> None:
        self.loop = asyncio.new_event_loop()
        self.unseen: list[dict[str, Any]] = []
        self.loop.set_exception_handler(lambda _, context: self.unseen.append(context))
        self.retained, self.held, self.slots = retained, held, slots
        self.machine = Machine(
            seed=retained, volume_count=volumes, policy="lru" if is_lru else "decayed_lfu", retained_steps=retained,
            held_steps=held, host_budget_bytes=12 << 20, reader_slots=slots,
        )  # fmt: skip
        self.working: State = dict.fromkeys(KEYS, ())
        self.steps: dict[int, State] = {0: dict(self.working)}
        self.snapshots: set[int] = set()
        self.readers: list[Reader] = []
        self.updates = 0
        self.lease_ids = count(1)
        self.commit: tuple[asyncio.Task[dict[str, object]], int, State] | None = None
        self.prepared: tuple[int, State] | None = None
        """A step that is durable and not committed: nobody reads it, and nothing changes until it is, or is not to be."""
        self.seen: list[tuple[ParamCopy, Reader, int]] = []
        """Copies that were there after the last rule, with who saw them, at which step."""
        self.run(self._open(is_new=True))

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Until it is over; an error that reached only the loop fails it too."""
        result = self.loop.run_until_complete(asyncio.wait_for(coroutine, LIMIT_S))
        assert not self.unseen, self.unseen
        return result

    async def _open(self, *, is_new: bool = False) -> None:
        self.store = self.machine.start()
        if is_new:
            self.writer = await small_store.create(self.store)
        else:
            at = self.prepared[0] if self.prepared is not None else None
            self.writer = await self.store.admission.open("moe", mode="write", at=at, host_bytes=None)
        self._take_slots()

    def _take_slots(self) -> None:
        """The arena has fewer slots than there are copies that somebody wants."""
        arena = self.writer.namespace.memory.param
        arena.planned_slots = self.slots
        while arena.slots.free_count > self.slots:
            arena.slots.take()

    async def _crash(self) -> None:
        crashing = asyncio.current_task()
        assert crashing is not None
        self.machine._bystanders.add(crashing)
        await self.machine.crash()

    # --- the writer

    @precondition(lambda self: self.prepared is None)
    @rule(keys=st.sets(KEY, min_size=1), gradient=st.sampled_from([1, -2, 5]))
    def train(self, keys: set[ExpertKey], gradient: int) -> None:
        memory = PlainSegment(SCHEMA.gradient_bytes)
        for each in SCHEMA.gradient_fields():
            field_tensor(memory.view(0, SCHEMA.gradient_bytes), each).fill_(gradient)
        self.store.applies.push(self.writer, [(key, memory, 0) for key in sorted(keys)])
        self.run(self.store.applies.apply(self.writer, OPTIONS, 1.0))
        self.updates += 1
        for key in keys:
            self.working[key] = (*self.working[key], (gradient, self.updates))

    @precondition(lambda self: self.commit is None and self.prepared is None)
    @rule(gap=st.integers(1, 3))
    def prepare(self, gap: int) -> None:
        """No step goes for one that may not come."""
        step = max(self.steps) + gap
        assert self.run(self.store.committer.prepare(self.writer, step, str(step).encode()))["step"] == step
        self.prepared = step, dict(self.working)

    @precondition(lambda self: self.prepared is not None)
    @rule()
    def finalize(self) -> None:
        self.run(self.store.history.finalize(self.writer, self._prepared_step()))
        self._settle_prepared()

    def _prepared_step(self) -> int:
        assert self.prepared is not None
        return self.prepared[0]

    def _settle_prepared(self) -> None:
        assert self.prepared is not None
        (step, state), self.prepared = self.prepared, None
        self.steps[step] = state
        self._keep()

    @precondition(lambda self: self.commit is None and self.prepared is None)
    @rule(gap=st.integers(1, 3), turns=st.integers(0, 60))
    def begin_commit(self, gap: int, turns: int) -> None:
        """It goes on beside what comes next, `turns` of the loop ahead."""
        step = max(self.steps) + gap
        task = self.loop.create_task(self.store.committer.commit(self.writer, step, str(step).encode()))
        self.commit = task, step, dict(self.working)
        self.run(small_store.turns(1 + turns))  # the cut is made in the first: what is trained later is not of this step

    def end_commit(self) -> None:
        if self.commit is None:
            return
        (task, step, state), self.commit = self.commit, None
        assert self.run(asyncio.wait_for(task, LIMIT_S))["step"] == step
        self.steps[step] = state
        self._keep()

    @precondition(lambda self: self.commit is not None)
    @rule()
    def wait_for_the_commit(self) -> None:
        self.end_commit()

    def _keep(self) -> None:
        """The newest steps stay, snapshots, and of those that readers hold the newest: as many as are set, and as there is room for
        beside these, which is the store's to say."""
        kept = {*sorted(self.steps)[-self.retained :], *self.snapshots}
        old = sorted({reader.step for reader in self.readers if not reader.is_dropped} - kept)
        stayed = len(set(old).intersection(self.writer.namespace.steps.ledger.steps()))
        assert stayed >= min(len(old), self.held)
        self._only(kept.union(old[len(old) - stayed :]))

    def _only(self, kept: set[int]) -> None:
        self.steps = {step: state for step, state in self.steps.items() if step in kept}
        for reader in self.readers:
            reader.is_dropped = reader.is_dropped or reader.step not in self.steps

    @rule(pick=PICK)
    def roll_back(self, pick: int) -> None:
        self.end_commit()
        step = sorted(self.steps, reverse=True)[pick % min(2, len(self.steps))]
        if any(snapshot > step for snapshot in self.snapshots):
            with pytest.raises(StepFailed):
                self.run(self.store.rollback(self.writer, step))
            return
        self.run(self.store.rollback(self.writer, step))
        self._back_to(step)

    def _back_to(self, step: int) -> None:
        self.working, self.prepared = dict(self.steps[step]), None
        self._only({kept for kept in self.steps if kept <= step})

    @rule(pick=PICK)
    def snapshot(self, pick: int) -> None:
        self.end_commit()
        if len(self.snapshots) < SNAPSHOTS_MAX:
            step = sorted(self.steps)[pick % len(self.steps)]
            self.run(self.store.admission.snapshot(self.writer, step))
            self.snapshots.add(step)

    @precondition(lambda self: self.snapshots)
    @rule(pick=PICK)
    def drop_snapshot(self, pick: int) -> None:
        self.end_commit()
        step = sorted(self.snapshots)[pick % len(self.snapshots)]
        self.run(self.store.admission.drop_snapshot(self.writer, step))
        self.snapshots.remove(step)
        kept = {*sorted(self.steps)[-self.retained :], *self.snapshots}
        self._only(kept | {reader.step for reader in self.readers if not reader.is_dropped})

    @rule(keys=SOME, is_evicted=st.booleans())
    def clean(self, keys: list[ExpertKey], is_evicted: bool) -> None:
        self.run(self.store.evict(self.writer, keys, None) if is_evicted else self.store.write_back(self.writer, keys))

    @rule(pick=PICK, is_crash=st.booleans())
    def begin_anew(self, pick: int, is_crash: bool) -> None:
        """Another writer, at the prepared step or any other; or, rarely, another daemon after a power cut, and no readers."""
        if pick >= 4:
            return
        self.end_commit()
        if is_crash and pick == 0:
            self.loop.run_until_complete(self._crash())
            self.readers, self.seen = [], []
            self.run(self._open())
            if self.prepared is not None:
                self._settle_prepared()
            self.working = dict(self.steps[max(self.steps)])
            return
        self.open_writer(pick)

    def open_writer(self, pick: int) -> None:
        ways = [*sorted(self.steps, reverse=True)[:2], None, *([] if self.prepared is None else [self.prepared[0]])]
        at = ways[pick % len(ways)]
        if at in self.steps and any(snapshot > at for snapshot in self.snapshots):
            return  # refused, and the writer fenced: `roll_back` has the refusal
        opening = self.store.admission.open("moe", mode="write", at=at, host_bytes=None)
        if at is None and self.prepared is not None:
            with pytest.raises(StepPrepared):
                self.run(opening)
            return
        self.store.close_view(self.writer)
        self.writer = self.run(opening)
        if self.prepared is not None and at == self.prepared[0]:
            self._settle_prepared()
            self.working = dict(self.steps[max(self.steps)])
        else:
            self._back_to(max(self.steps) if at is None else at)

    # --- the readers

    @precondition(lambda self: len(self.readers) < READERS_MAX)
    @rule(pick=PICK)
    def open_reader(self, pick: int) -> None:
        """On any step; while a commit goes on, on one that will stay."""
        steps = sorted(self.steps)
        step = steps[pick % len(steps)] if self.commit is None else steps[-1]
        view = self.run(self.store.admission.open("moe", mode="read", at=step, host_bytes=None))
        assert view.step == step
        self.readers.append(Reader(view, step))

    @precondition(lambda self: self.readers)
    @rule(pick=PICK)
    def refresh(self, pick: int) -> None:
        self.end_commit()
        reader = self.readers[pick % len(self.readers)]
        reader.step, reader.is_dropped = self.store.refresh(reader.view), False
        assert reader.step == max(self.steps)

    @precondition(lambda self: self.readers)
    @rule(pick=PICK)
    def close_reader(self, pick: int) -> None:
        self.end_commit()  # whose step stays is decided when it ends
        self.store.close_view(self.readers.pop(pick % len(self.readers)).view)

    @precondition(lambda self: self.readers)
    @rule(pick=PICK, keys=SOME)
    def acquire(self, pick: int, keys: list[ExpertKey]) -> None:
        reader = self.readers[pick % len(self.readers)]
        if reader.view.is_dropped:
            with pytest.raises(StepDropped):
                self.run(small_store.lease(self.store, reader.view, keys))
            return
        content = self.steps[reader.step]
        leased = {each for lease in reader.leases for each in lease.state.items()}
        wanted = leased.union((key, content[key]) for key in keys)
        try:
            request = self.store.access.acquire(reader.view, next(self.lease_ids), keys, "param")
        except (CapacityError, LeaseError):
            assert len(wanted) > self.store.describe_view(reader.view)["lease_slots"]  # type: ignore[operator]
            return
        self.run(self._until_idle(or_finished=request))
        assert request.is_finished, "what it was promised is there, whoever else reads"
        assert request.error is None
        reader.leases.append(Lease(request, {key: content[key] for key in keys}))

    acquire_more = acquire

    @precondition(lambda self: any(reader.leases for reader in self.readers))
    @rule(pick=PICK)
    def release(self, pick: int) -> None:
        reader = [reader for reader in self.readers if reader.leases][pick % sum(bool(reader.leases) for reader in self.readers)]
        lease = reader.leases.pop(pick % len(reader.leases))
        self.store.access.release(reader.view, lease.request.lease_id)

    @rule(pick=PICK, key=KEY)
    def read(self, pick: int, key: ExpertKey) -> None:
        """A whole record: the writer's own, or that of a reader's step."""
        reader = self.readers[pick % len(self.readers)] if self.readers and pick % 3 else None
        if reader is not None and reader.view.is_dropped:
            with pytest.raises(StepDropped):
                self.run(read_record(self.store, reader.view, key))
            return
        _, found = self.run(read_record(self.store, reader.view if reader is not None else self.writer, key))
        updates = (self.steps[reader.step] if reader is not None else self.working)[key]
        for name, value in found.items():
            assert torch.equal(value, expected(key, updates, name)), (key, name)

    # --- what holds after every rule

    @invariant()
    def every_leased_byte_is_of_the_step_it_was_leased_at(self) -> None:
        part, arena = SCHEMA.part("param"), self.writer.namespace.memory.param
        assert arena is not None
        for lease in [lease for reader in self.readers for lease in reader.leases]:
            for key, copy in zip(lease.state, lease.request.copies, strict=True):
                for each in part.fields:
                    seen = field_tensor(arena.view(copy.slot), each).flatten()
                    assert torch.equal(seen, expected(key, lease.state[key], f"master/{each.name}").flatten()), (key, each.name)

    @invariant()
    def a_copy_stays_for_as_long_as_somebody_sees_it_and_no_longer(self) -> None:
        """It may be evicted; but it retires only if nobody sees its bytes, and then it does."""
        for copy, reader, step in self.seen:
            if reader in self.readers and reader.step == step and not (reader.is_dropped or reader.view.is_dropped):
                assert copy.state is not Copy.RETIRED, f"{copy.key} of step {step}"
        namespace = self.writer.namespace
        copies = [copy for found in namespace.residency.copies.values() for copy in found if copy.state is not Copy.RETIRED]
        views = [(reader, reader.view) for reader in self.readers]
        seen = [(copy, reader) for reader, view in views for copy in copies if view.locate(copy.key)[0] == copy.identity]
        if self.commit is None:
            kept = {copy for copy, _ in seen} | {
                copy for copy in copies if namespace.residency.working[copy.key].target == copy.identity
            }
            assert kept.issuperset(copies)
        self.seen = [(copy, reader, reader.step) for copy, reader in seen]

    @invariant()
    def the_steps_that_stay_are_those_that_should(self) -> None:
        if self.commit is None:
            assert self.writer.namespace.steps.ledger.steps() == sorted(self.steps)
            assert self.writer.namespace.steps.ledger.snapshots() == sorted(self.snapshots)
            assert [reader.view.is_dropped for reader in self.readers] == [reader.is_dropped for reader in self.readers]
            for step in self.steps:
                assert self.writer.namespace.steps.ledger.step(step).extra == (str(step).encode() if step else b"")

    def teardown(self) -> None:
        """All leave: what is held of the volumes is what the steps that stay need, once each, and no slot is leased."""
        if not hasattr(self, "store"):
            return
        try:
            self.end_commit()
            self.run(self.store.rollback(self.writer, max(self.steps)))
            for reader in self.readers:
                self.store.close_view(reader.view)
            namespace = self.writer.namespace
            self.store.close_view(self.writer)
            self.run(self._until_idle())
            needed = {(key, updates) for state in self.steps.values() for key, updates in state.items()}
            assert self.store.transfers._planner.space.held_bytes("moe") == len(needed) * SCHEMA.record_bytes
            assert not any(copy.leases for copies in namespace.residency.copies.values() for copy in copies)
        finally:
            self.loop.run_until_complete(self._crash())
            self.loop.close()

    async def _until_idle(self, *, or_finished: LeaseRequest | None = None) -> None:
        """Nothing is under way, nor about to be."""
        idle_turns = 0
        while idle_turns < IDLE_TURNS and not (or_finished is not None and or_finished.is_finished):
            idle_turns = idle_turns + 1 if self.store.transfers.runner.is_idle else 0
            await asyncio.sleep(0)


@pytest.mark.slow
def test_a_reader_sees_its_step_and_nothing_else_whatever_the_writer_does(run_fixed: Callable[..., None]) -> None:
    run_fixed(ReaderMachine)


@pytest.mark.slow
def test_the_same_in_lives_that_no_run_had_before(capsys: pytest.CaptureFixture[str]) -> None:
    run_new(ReaderMachine, capsys)
