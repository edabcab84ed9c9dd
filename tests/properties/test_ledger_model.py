"""The ledger against a model that keeps, for every visible step, the whole map of what is in force."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from paramstore.core.location import Extent, Identity, Located
from paramstore.errors import StepDropped, StepFailed
from paramstore.storage.catalog.base import Change, NamespaceContents, NamespaceRow, StepRow
from paramstore.storage.catalog.ledger import Ledger
from paramstore.storage.catalog.publication import Publication
from paramstore.storage.format.structures import combine_roots
from paramstore.testing.catalogs import MemoryCatalog
from paramstore_testkit.stores.settling import settle
from paramstore_testkit.trials.state_machines import run_new

KEYS = [(layer, expert) for layer in (0, 3) for expert in range(3)]
CHANGED = st.sets(st.sampled_from(KEYS))
HELD = st.sets(st.integers(0, 40), max_size=6)


class LedgerMachine(RuleBasedStateMachine):
    """`maps[step]` is the whole namespace at that step. The catalog follows, so that what is durable is checked too."""

    def __init__(self) -> None:
        super().__init__()
        self.retained_steps, self.held_steps = 2, 0
        self.snapshots: set[int] = set()
        row = NamespaceRow("moe", {}, (0, 3), 3, epoch=1, sequence=0)
        self.ledger = Ledger(NamespaceContents(row))
        self.catalog = MemoryCatalog()
        self.catalog.load()
        self.catalog.apply(Change(put_namespaces=(row,)))
        self.maps: dict[int, dict[tuple[int, int], Located]] = {}
        self.prepared: tuple[int, dict[tuple[int, int], Located]] | None = None
        """A step that is durable and not committed, and its whole map."""
        self.extents = self.sequence = 0
        self.used: set[Extent] = set()
        self.cuts: dict[Located, int] = {}
        """The sequence of the cut that each record came with."""
        self.undone: set[Located] = set()
        """Records that a rollback took back."""

    @initialize(retained_steps=st.integers(2, 4), held_steps=st.integers(0, 2))
    def retain(self, retained_steps: int, held_steps: int) -> None:
        self.retained_steps, self.held_steps = retained_steps, held_steps
        self.open_again()

    def _drop_unseen(self, held: set[int]) -> None:
        """What the model keeps: the newest steps, snapshots, and those held."""
        kept = {*sorted(self.maps)[-self.retained_steps :], *self.snapshots, *held}
        self.maps = {step: content for step, content in self.maps.items() if step in kept}

    def _publish(self, publication: Publication) -> None:
        assert len(set(publication.freed)) == len(publication.freed)
        self.catalog.apply(publication.change())
        settle(self.ledger, publication)
        self.used -= set(publication.freed)

    def _records(self, changed: set[tuple[int, int]]) -> dict[tuple[int, int], Located]:
        """New records of the next cut."""
        records = {}
        for key in changed:
            self.extents += 1
            extent = Extent(0, self.extents * 4096, 4096)
            records[key] = Located(extent, Identity(self.ledger.namespace.epoch, self.extents), self.extents)
            self.used.add(extent)
        self.sequence += 1
        self.cuts.update(dict.fromkeys(records.values(), self.sequence))
        return records

    def _make_step(
        self, gap: int, records: dict[tuple[int, int], Located], held: set[int], *, is_prepared: bool = False
    ) -> tuple[int, dict[tuple[int, int], Located], Publication]:
        """Number and whole map of the next step, and its plan."""
        step = max(self.maps, default=0) + gap
        newest = self.maps[max(self.maps)] if self.maps else {}
        content = {**newest, **records}
        roots = [(key, located.root) for key, located in records.items()]
        combined = combine_roots((key, located.root) for key, located in content.items())
        assert self.ledger.state_root(self.sequence, roots) == combined
        row = StepRow(
            step, self.sequence, note_slot=self.sequence, record_count=len(records), extra=b"", is_prepared=is_prepared
        )
        return step, content, self.ledger.plan_publish(row, records, held)

    def _borrowing(self, steps: set[int]) -> list[int]:
        """Those of `steps` that are entitled to no room, oldest first."""
        older = sorted(steps - set(sorted(steps)[-self.retained_steps :]) - self.snapshots)
        return older[: max(0, len(older) - self.held_steps)]

    def _seen(self, steps: set[int]) -> set[Extent]:
        prepared = {} if self.prepared is None else self.prepared[1]
        return {located.extent for content in (prepared, *map(self.maps.get, steps)) for located in (content or {}).values()}

    def _check_counts(self, step: int, changed: set[tuple[int, int]], held: set[int]) -> None:
        """What the ledger counts of the rows that go with each older step, before `step` is committed, whose map is there."""
        kept = {*sorted(self.maps)[-self.retained_steps :], *self.snapshots, *held.intersection(self.maps)}
        older = self.ledger.borrowing_after(step, held)
        assert older == self._borrowing(kept)
        rows, unseen = self.ledger.rows_until(step, changed, held, older)
        for gone in range(len(older) + 1):
            only_older = self._seen(kept - set(older[:gone])) - self._seen(kept - set(older))
            assert sum(rows[gone:]) == len(only_older)
        assert unseen == len(self.used - self._seen(kept))

    @precondition(lambda self: self.prepared is None)
    @rule(gap=st.integers(1, 3), changed=CHANGED, held=HELD)
    def commit(self, gap: int, changed: set[tuple[int, int]], held: set[int]) -> None:
        step, self.maps[step], publication = self._make_step(gap, self._records(changed), held)
        self._check_counts(step, changed, held)
        self._publish(publication)
        self._drop_unseen(held)

    @rule()
    def give_back(self) -> None:
        self._publish(self.ledger.plan_give_back())
        gone = self._borrowing(set(self.maps))
        self.maps = {step: content for step, content in self.maps.items() if step not in gone}

    @precondition(lambda self: self.prepared is None)
    @rule(gap=st.integers(1, 3), changed=CHANGED, held=HELD, is_prepared=st.booleans())
    def commit_that_fails(self, gap: int, changed: set[tuple[int, int]], held: set[int], is_prepared: bool) -> None:
        records = self._records(changed)
        self._make_step(gap, records, held, is_prepared=is_prepared)
        self.used -= {located.extent for located in records.values()}

    @precondition(lambda self: self.prepared is None and self.maps)
    @rule(gap=st.integers(1, 3), changed=CHANGED)
    def prepare(self, gap: int, changed: set[tuple[int, int]]) -> None:
        step, content, publication = self._make_step(gap, self._records(changed), set(), is_prepared=True)
        assert not publication.freed, "nothing goes for a step that may not come"
        self._publish(publication)
        self.prepared = (step, content)

    @precondition(lambda self: self.prepared is not None)
    @rule(held=HELD, for_writer=st.booleans())
    def finalize(self, held: set[int], for_writer: bool) -> None:
        assert self.prepared is not None
        epoch = self.ledger.namespace.epoch
        step, self.maps[step] = self.prepared
        self.prepared = None
        self._check_counts(step, set(), held)
        self._publish(self.ledger.plan_finalize(held, for_writer=for_writer))
        self._drop_unseen(held)
        assert self.ledger.namespace.epoch == epoch + for_writer

    @precondition(lambda self: self.prepared is not None)
    @rule()
    def reopen_at_the_prepared_step(self) -> None:
        """A new epoch begins, nothing goes."""
        assert self.prepared is not None
        self._publish(self.ledger.plan_rollback(self.prepared[0]))

    @rule(data=st.data())
    def roll_back(self, data: st.DataObject) -> None:
        step = data.draw(st.sampled_from([None, *self.maps]))
        if any(step is None or snapshot > step for snapshot in self.snapshots):
            with pytest.raises(StepFailed, match="is a snapshot"):
                self.ledger.plan_rollback(step)
            return
        epoch, newest = self.ledger.namespace.epoch, max(self.maps, default=0)
        gone = self.prepared[1] if self.prepared is not None else self.maps.get(newest, {})
        self.undone |= set(gone.values()) - set(self.maps.get(step, {}).values())
        self.prepared = None
        self._publish(self.ledger.plan_rollback(step))
        self.maps = {kept: content for kept, content in self.maps.items() if step is not None and kept <= step}
        assert self.ledger.namespace.epoch == epoch + 1

    @precondition(lambda self: self.maps)
    @rule(data=st.data())
    def snapshot(self, data: st.DataObject) -> None:
        step = data.draw(st.sampled_from(sorted(self.maps)))
        self._publish(self.ledger.plan_snapshot(step))
        self.snapshots.add(step)

    @precondition(lambda self: self.snapshots)
    @rule(data=st.data(), held=HELD)
    def drop_snapshot(self, data: st.DataObject, held: set[int]) -> None:
        step = data.draw(st.sampled_from(sorted(self.snapshots)))
        self._publish(self.ledger.plan_drop_snapshot(step, held))
        self.snapshots.remove(step)
        self._drop_unseen(held)

    @precondition(lambda self: self.maps)
    @rule(data=st.data())
    def drop_what_is_no_snapshot(self, data: st.DataObject) -> None:
        step = data.draw(st.sampled_from(sorted(self.maps)))
        if step not in self.snapshots:
            with pytest.raises(StepDropped, match="is no snapshot"):
                self.ledger.plan_drop_snapshot(step, ())

    @rule()
    def open_again(self) -> None:
        contents = self.catalog.load().namespaces["moe"]
        self.ledger = Ledger(contents, retained_steps=self.retained_steps, held_steps=self.held_steps)

    @invariant()
    def every_visible_step_is_whole(self) -> None:
        assert self.ledger.steps() == sorted(self.maps)
        assert self.ledger.prepared_step == (None if self.prepared is None else self.prepared[0])
        assert self.ledger.snapshots() == sorted(self.snapshots)
        for step, content in [*self.maps.items(), *([] if self.prepared is None else [self.prepared])]:
            assert {key: self.ledger.at(key, step) for key in KEYS} == {key: content.get(key) for key in KEYS}

    @invariant()
    def exactly_what_a_visible_step_sees_is_kept(self) -> None:
        prepared = {} if self.prepared is None else self.prepared[1]
        seen = {located.extent for content in (*self.maps.values(), prepared) for located in content.values()}
        assert set(self.ledger.extents()) == seen == self.used

    @invariant()
    def borrowed_is_what_no_step_sees_that_is_entitled_to_room(self) -> None:
        older = self._borrowing(set(self.maps))
        assert self.ledger.borrowing_steps == set(older)
        assert self.ledger.borrowed_rows == len(self.used - self._seen(set(self.maps) - set(older)))

    @invariant()
    def memory_and_catalog_agree(self) -> None:
        assert self.catalog.load().namespaces["moe"] == self.ledger._contents

    @invariant()
    def a_record_counts_exactly_if_its_epoch_s_bound_reaches_it(self) -> None:
        row = self.ledger.namespace
        bounds = {**dict(row.epoch_bounds), row.epoch: row.sequence}
        prepared = {} if self.prepared is None else self.prepared[1]
        for content in (*self.maps.values(), prepared):
            assert all(self.cuts[located] <= bounds[located.identity.epoch] for located in content.values())
        assert all(self.cuts[located] > bounds.get(located.identity.epoch, 0) for located in self.undone)


@pytest.mark.slow
def test_every_visible_step_is_whole_and_nothing_else_is_kept(run_fixed: Callable[..., None]) -> None:
    run_fixed(LedgerMachine)


@pytest.mark.slow
def test_the_same_in_lives_that_no_run_had_before(capsys: pytest.CaptureFixture[str]) -> None:
    run_new(LedgerMachine, capsys)
