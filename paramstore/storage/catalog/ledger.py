"""The rules of one namespace's rows: what is in force at a step, what a commit or rollback changes. Pure.

- The row in force at step s is a key's newest one with first_step <= s.
- A step is visible while it is one of the newest that are retained, a snapshot, or one on which a reader stands.
- A prepared step is durable and not committed: nobody opens it, no step is dropped for it, the working state continues from it.
  There is at most one, above all others; it is committed later, or goes with a rollback.
- A draft is what an initialization has made durable so far: a step below all others, which nobody opens and in which keys may
  be missing. It is replaced by the next draft, and goes with the first commit, or with a rollback to before it.
- A row is visible while it is in force at some visible step; an invisible one is dropped, and its extent freed,
  in the transaction of the next commit.
- A step that only readers keep may have borrowed its room: see `visibility`.

The `plan_*` methods decide and change nothing; `settling` brings memory up to date once the catalog has made a plan durable. A
plan holds until the next `settle`. It takes microseconds per changed record and only reads, so it may be made on another
thread, as long as nothing settles meanwhile. Settling only replaces values, in slices.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter

from paramstore.core.apply_log import ApplyLog
from paramstore.core.key import ExpertKey
from paramstore.core.location import Extent, Located
from paramstore.core.slices import slices
from paramstore.errors import StepDropped, StepFailed, StepPrepared
from paramstore.limits import HELD_STEPS, RETAINED_STEPS
from paramstore.storage.catalog.base import DRAFT_STEP, NamespaceContents, NamespaceRow, Row, StepRow
from paramstore.storage.catalog.publication import Publication, publication_of
from paramstore.storage.catalog.roots import RootTable
from paramstore.storage.catalog.visibility import borrowed_rows, borrowing, in_force, rows_until
from paramstore.storage.format.apply_log import unpack_log

EMPTY: Mapping[ExpertKey, Row] = {}
_first_step = attrgetter("first_step")


class Ledger:
    """One namespace's rows and steps in memory. contents: belongs to the ledger from then on. retained_steps: how many of the
    newest steps stay even if nobody reads them. held_steps: how many older ones are entitled to room.
    """

    def __init__(self, contents: NamespaceContents, *, retained_steps: int = RETAINED_STEPS, held_steps: int = HELD_STEPS) -> None:
        self._contents = contents
        self._retained_steps = retained_steps
        self._held_steps = held_steps
        self._layered = frozenset(key for key, rows in contents.rows.items() if len(rows) > 1)
        """Keys with more than one row: a commit that does not change them may still hide a row of theirs."""
        older = self.borrowing_steps
        entitled = sorted(frozenset(contents.steps) - older)
        self.borrowed_rows = borrowed_rows((contents.rows[key] for key in self._layered), entitled) if older else 0
        """How many rows only those older steps see that are entitled to no room."""
        self._roots: RootTable | None = None
        """Roots of all records at the newest step; None until somebody asks."""
        self._next_roots: tuple[int, RootTable] | None = None
        """Sequence of the commit under way, and the roots of all records after it."""

    # --- looking ---

    @property
    def namespace(self) -> NamespaceRow:
        return self._contents.namespace

    @property
    def committed_step(self) -> int | None:
        """The newest committed step; None before the first commit."""
        return max(self.steps(), default=None)

    @property
    def borrowing_steps(self) -> frozenset[int]:
        """The steps that have borrowed their room."""
        return frozenset(self._borrowing(self.steps(), self.snapshots()))

    def _borrowing(self, committed: Iterable[int], snapshots: Iterable[int]) -> list[int]:
        return borrowing(committed, set(snapshots), retained_steps=self._retained_steps, held_steps=self._held_steps)

    @property
    def prepared_step(self) -> int | None:
        """The step that waits to be finalized; None if there is none."""
        newest = self.newest
        return newest.step if newest is not None and newest.is_prepared else None

    @property
    def newest(self) -> StepRow | None:
        """The row of the newest step, committed or prepared, else of the draft: the working state starts from it."""
        steps = self._contents.steps
        return steps[max(steps)] if steps else None

    @property
    def draft(self) -> StepRow | None:
        """The row of the draft; None if there is none: nothing of an initialization is durable, or it is over."""
        return self._contents.steps.get(DRAFT_STEP)

    def steps(self) -> list[int]:
        """The steps that can be opened, oldest first."""
        return sorted(step for step, row in self._contents.steps.items() if step != DRAFT_STEP and not row.is_prepared)

    def step(self, step: int) -> StepRow:
        """The row of a step that can be opened. Raises StepDropped if it is not there (any more), StepPrepared if not yet."""
        row = self._contents.steps.get(step)
        if row is not None and row.is_prepared:
            raise StepPrepared(f"step {step} of namespace {self.namespace.name!r} is prepared and not committed: finalize({step})")
        if row is None or step == DRAFT_STEP:
            raise StepDropped(
                f"step {step} of namespace {self.namespace.name!r} is not retained; "
                f"the steps are: {', '.join(map(str, self.steps())) or 'none'}{self._and_prepared()}"
            )
        return row

    def find(self, step: int) -> StepRow | None:
        """The row of a step, committed or prepared; None if there is none (any more)."""
        return self._contents.steps.get(step)

    def log_at(self, step: int) -> ApplyLog:
        """Apply log of an existing step: which applies its records may have missed."""
        return unpack_log(self._contents.steps[step].log)

    @property
    def newest_log(self) -> ApplyLog:
        """Apply log of the newest step, committed or prepared: the working state starts from it."""
        newest = self.newest
        return ApplyLog() if newest is None else unpack_log(newest.log)

    def _and_prepared(self) -> str:
        return "" if self.prepared_step is None else f"; step {self.prepared_step} is prepared"

    def at(self, key: ExpertKey, step: int) -> Located | None:
        """The record in force for `key` at `step`; None if the key had none then."""
        rows = self._contents.rows.get(key)
        if rows is None:
            return None
        position = bisect_right(rows, step, key=_first_step)
        return rows[position - 1].located if position else None

    @property
    def layered(self) -> frozenset[ExpertKey]:
        """Keys with more than one row. The others have the same record at every step that is there."""
        return self._layered

    def records_of(self, key: ExpertKey) -> tuple[int, int | None]:
        """(how many records of `key` lie on volumes, the step at which the newest came into force; None if there is none)."""
        rows = self._contents.rows.get(key)
        return (len(rows), rows[-1].first_step) if rows else (0, None)

    def extents(self) -> Iterator[Extent]:
        """Every extent that a row names, each once."""
        return (row.located.extent for _, row in self._all_rows())

    def note_slots(self) -> Iterator[int]:
        """Note slots of all steps."""
        return (row.note_slot for row in self._contents.steps.values())

    def snapshots(self) -> list[int]:
        """The steps that stay until they are dropped, oldest first."""
        return [step for step in self.steps() if self._contents.steps[step].is_snapshot]

    def visible_steps(
        self, held_steps: Iterable[int], *, published: int | None = None, without: int | None = None
    ) -> frozenset[int]:
        """The steps to keep: the newest ones retained, snapshots, those of `held_steps` that exist, and a prepared one. published:
        a step that counts as committed too. without: a step that counts as no snapshot."""
        steps = self.steps() if published is None else [*self.steps(), published]
        prepared = () if self.prepared_step is None else (self.prepared_step,)
        held, snapshots = frozenset(steps).intersection(held_steps), frozenset(self.snapshots()) - {without}
        return frozenset(steps[-self._retained_steps :]).union(snapshots, held, prepared)

    def borrowing_after(self, published: int, held_steps: Iterable[int]) -> list[int]:
        """The steps that stay for readers on `held_steps` once `published` is committed, and have borrowed their room then."""
        return self._borrowing(self.visible_steps(held_steps, published=published), self.snapshots())

    def rows_until(
        self, published: int, changed: Iterable[ExpertKey], held_steps: Iterable[int], older: Sequence[int]
    ) -> tuple[list[int], int]:
        """Counts the rows that stay for each of the `older` steps alone once `published` is committed with `changed` records, and
        those that nobody sees any more: see `visibility.rows_until`. older: as `borrowing_after` says. May be called on another
        thread, as plans are."""
        entitled, added = sorted(self.visible_steps(held_steps, published=published).difference(older)), frozenset(changed)
        rows = ((key, [row.first_step for row in self._contents.rows.get(key, ())]) for key in self._layered.union(added))
        return rows_until(([*firsts, published] if key in added else firsts for key, firsts in rows), entitled, older)

    def state_root(self, sequence: int, changed: Sequence[tuple[ExpertKey, int]]) -> int:
        """The combined root of all records at the step that the commit with `sequence` makes. changed: roots of the records it
        changes.

        To be asked once a commit; may be called on another thread, as plans are.
        """
        if self._roots is None or not self._roots.has(key for key, _ in changed):
            newest = {key: rows[-1].located.root for key, rows in self._contents.rows.items()}
            table = RootTable((newest | dict(changed)).items())
        else:
            table = self._roots.patched(changed)
        self._next_roots = (sequence, table)
        return table.combined()

    # --- plans ---

    def plan_publish(
        self, step_row: StepRow, changed: Mapping[ExpertKey, Located], held_steps: Iterable[int]
    ) -> Publication:
        """Plans to commit `step_row` with the `changed` records, or to prepare it: then no step is dropped. Its step and sequence
        must be above all earlier ones.

        held_steps: steps that readers or snapshots stand on; those that do not exist are ignored.
        """
        newest, step = self.newest, step_row.step
        assert newest is None or not newest.is_prepared, f"step {newest.step} is prepared: finalize it, or roll back"
        assert newest is None or step > newest.step, f"step {step} is not above {newest.step}"
        assert step_row.sequence > self.namespace.sequence, f"sequence {step_row.sequence} was used before"
        stay = self._contents.steps if step_row.is_prepared else self.visible_steps(held_steps, published=step)
        visible = sorted({*stay, step})
        added = {key: Row(step, located) for key, located in changed.items()}
        rows_after, dropped = self._thinned(added, visible)
        return self._publication(
            replace(self.namespace, sequence=step_row.sequence, applies=step_row.applies),
            added=added,
            added_steps=[step_row],
            dropped=dropped,
            dropped_steps=[row for row in self._contents.steps.values() if row.step not in visible],
            rows_after=rows_after,
        )

    def plan_draft(self, row: StepRow, added: Mapping[ExpertKey, Located]) -> Publication:
        """Plans a draft: adds the initial values `added` to those that are durable already; `row` becomes the draft. To be used
        before the first commit only."""
        assert self.committed_step is None
        assert row.step == DRAFT_STEP
        assert row.sequence > self.namespace.sequence, f"sequence {row.sequence} was used before"
        rows = {key: Row(DRAFT_STEP, located) for key, located in added.items()}
        publication = self._publication(
            replace(self.namespace, sequence=row.sequence, applies=row.applies),
            added=rows,
            added_steps=[row],
            rows_after={key: [new] for key, new in rows.items()},
        )
        older = [found.located.extent for key in rows for found in self._contents.rows.get(key, ())]
        slots = () if self.draft is None else (self.draft.note_slot,)
        return replace(publication, freed=older, freed_note_slots=slots)  # the new rows overwrite the older ones

    def plan_finalize(self, held_steps: Iterable[int], *, for_writer: bool = False) -> Publication:
        """Plans to commit the prepared step: it can be opened then, and what nobody sees any more is dropped. for_writer: a new
        writer goes on from it, in a new epoch.
        """
        prepared = self.newest
        assert prepared is not None
        assert prepared.is_prepared
        visible = self.visible_steps(held_steps, published=prepared.step)
        rows_after, dropped = self._thinned({}, sorted(visible))
        return self._publication(
            self._next_epoch(prepared) if for_writer else self.namespace,
            added_steps=[replace(prepared, is_prepared=False)],
            dropped=dropped,
            dropped_steps=[row for row in self._contents.steps.values() if row.step not in visible],
            rows_after=rows_after,
        )

    def _thinned(
        self, added: Mapping[ExpertKey, Row], visible: list[int]
    ) -> tuple[dict[ExpertKey, list[Row]], list[tuple[ExpertKey, Row]]]:
        """For every key that has several rows or is `added`: the rows that `visible` steps see, and the rows to drop."""
        rows_after: dict[ExpertKey, list[Row]] = {}
        dropped: list[tuple[ExpertKey, Row]] = []
        for key in self._layered.union(added):
            rows = self._contents.rows.get(key, [])
            if key in added:
                rows = [*rows, added[key]]
            rows_after[key] = kept = in_force(rows, visible)
            if len(kept) < len(rows):
                dropped.extend((key, row) for row in rows if row not in kept)
        return rows_after, dropped

    def plan_snapshot(self, step: int) -> Publication:
        """Plans to make `step` a snapshot. Raises StepDropped if there is no such step."""
        marked = replace(self.step(step), is_snapshot=True)
        rows_after = {key: self._contents.rows[key] for key in self._layered}
        return self._publication(self.namespace, added_steps=[marked], rows_after=rows_after)

    def plan_drop_snapshot(self, step: int, held_steps: Iterable[int]) -> Publication:
        """Plans to make the snapshot `step` an ordinary step, which may go at once. Raises StepDropped if it is no snapshot."""
        row = self.step(step)
        if not row.is_snapshot:
            raise StepDropped(f"step {step} of namespace {self.namespace.name!r} is no snapshot")
        visible = self.visible_steps(held_steps, without=step)
        rows_after, dropped = self._thinned({}, sorted(visible))
        stays = step in visible
        return self._publication(
            self.namespace,
            added_steps=[replace(row, is_snapshot=False)] if stays else [],
            dropped=dropped,
            dropped_steps=[other for other in self._contents.steps.values() if other.step not in visible],
            rows_after=rows_after,
        )

    def plan_give_back(self) -> Publication:
        """Plans to drop all steps that have borrowed their room."""
        older, steps = self.borrowing_steps, self._contents.steps
        rows_after, dropped = self._thinned({}, sorted(frozenset(steps) - older))
        dropped_steps = [steps[step] for step in older]
        return self._publication(self.namespace, dropped=dropped, dropped_steps=dropped_steps, rows_after=rows_after)

    def check_rollback(self, step: int) -> None:
        """Checks that a rollback to `step` is possible. Raises StepDropped if there is no such step, StepPrepared if it is not
        committed, StepFailed if a later one is a snapshot."""
        self.step(step)
        self._check_no_later_snapshot(step)

    def _check_no_later_snapshot(self, step: int | None) -> None:
        later = [snapshot for snapshot in self.snapshots() if step is None or snapshot > step]
        if later:
            raise StepFailed(
                f"rollback({step}) of namespace {self.namespace.name!r}: step {later[-1]} is a snapshot; "
                f"drop_snapshot({later[-1]}) first"
            )

    def plan_rollback(self, step: int | None) -> Publication:
        """Plans a rollback to `step`, which may be the prepared one or the draft; None: to before any value.

        The namespace gets a new epoch, and bounds by which records of earlier epochs beyond `step` no longer count.
        Raises StepDropped if there is no such step, StepFailed if a later one is a snapshot.
        """
        target = None
        if step is not None:
            target = self.newest if step in (self.prepared_step, DRAFT_STEP) else self.step(step)
            assert step != DRAFT_STEP or target is self.draft, "there is no draft any more"
        self._check_no_later_snapshot(step)
        dropped = [(key, row) for key, row in self._all_rows() if not _stands(row.first_step, target)]
        touched = self._layered.union(key for key, _ in dropped)
        return self._publication(
            self._next_epoch(target),
            dropped=dropped,
            dropped_steps=[row for row in self._contents.steps.values() if not _stands(row.step, target)],
            rows_after={
                key: [row for row in self._contents.rows[key] if _stands(row.first_step, target)] for key in touched
            },
        )

    def settling(self, publication: Publication) -> Iterator[None]:
        """Brings memory up to date with a publication that is durable, in slices, between which it yields. Row lists are replaced,
        never changed in place.

        Steps come and go at the end. Until then the record in force at a step that stays is the same, with and without its key's
        slice; steps that go must not be asked for any more.
        """
        contents, rows_after, keys_gone = self._contents, publication.rows_after, publication.keys_gone
        for number, keys in enumerate(slices(rows_after)):
            if number:
                yield
            for key in keys:
                if key in keys_gone:
                    del contents.rows[key]
                else:
                    contents.rows[key] = rows_after[key]
        if self._next_roots is not None and publication.namespace.sequence == self._next_roots[0]:
            self._roots, self._next_roots = self._next_roots[1], None
        elif publication.namespace.epoch != contents.namespace.epoch:  # a rollback drops rows that the table has
            self._roots = None
        contents.namespace = publication.namespace
        for _, step in publication.drop_steps:
            del contents.steps[step]
        for _, step_row in publication.put_steps:
            contents.steps[step_row.step] = step_row
        self._layered = publication.keys_layered
        self.borrowed_rows = publication.borrowed_rows

    def _publication(
        self, namespace: NamespaceRow, *, added: Mapping[ExpertKey, Row] = EMPTY, added_steps: Sequence[StepRow] = (),
        dropped: Sequence[tuple[ExpertKey, Row]] = (), dropped_steps: Sequence[StepRow] = (),
        rows_after: Mapping[ExpertKey, list[Row]],
    ) -> Publication:  # fmt: skip
        """Makes a publication. rows_after: those of every key that has several rows before or after, or whose rows change."""
        gone, put = {row.step for row in dropped_steps}, {row.step: row for row in added_steps}
        steps_after = {step: row for step, row in self._contents.steps.items() if step not in gone} | put
        committed = [step for step, row in steps_after.items() if step != DRAFT_STEP and not row.is_prepared]
        older = self._borrowing(committed, (step for step in committed if steps_after[step].is_snapshot))
        entitled = sorted(frozenset(steps_after).difference(older))
        borrowed = borrowed_rows(rows_after.values(), entitled) if older else 0
        return publication_of(
            namespace, added=added, added_steps=added_steps, dropped=dropped, dropped_steps=dropped_steps, rows_after=rows_after,
            borrowed_rows=borrowed,
        )  # fmt: skip

    def _all_rows(self) -> Iterator[tuple[ExpertKey, Row]]:
        return ((key, row) for key, rows in self._contents.rows.items() for row in rows)

    def _next_epoch(self, target: StepRow | None) -> NamespaceRow:
        """The namespace's row after a rollback. Epochs of which no record is left get no bound."""
        row = self.namespace
        last_sequence = target.sequence if target is not None else 0
        alive = {kept.located.identity.epoch for _, kept in self._all_rows() if _stands(kept.first_step, target)}
        bounds = {**dict(row.epoch_bounds), row.epoch: last_sequence}
        kept_bounds = [(epoch, min(bounds[epoch], last_sequence)) for epoch in sorted(alive)]
        applies = target.applies if target is not None else 0
        return replace(row, epoch=row.epoch + 1, epoch_bounds=tuple(kept_bounds), applies=applies)


def _stands(step: int, target: StepRow | None) -> bool:
    """Whether rows and steps that came with `step` outlive a rollback to `target`."""
    return target is not None and step <= target.step
