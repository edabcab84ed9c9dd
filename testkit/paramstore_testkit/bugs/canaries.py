"""Bugs planted on purpose, to see that the tests find them. One switch, PARAMSTORE_BUG, that every real daemon refuses.

A canary patches the product's own classes in this process and takes the patch away again: nothing in the product knows of it. As a
pytest plugin (`-p paramstore_testkit.bugs.canaries`) this module plants the bug that the variable names before a test is imported.
Each canary names the suite that must fail because of it (`tests/crash/test_canaries.py` runs them).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import paramstore.engine.records.update
import paramstore.engine.transfers.arithmetic
import paramstore.engine.transfers.record_reads
import paramstore.storage.format.structures
from paramstore.config import BUG_VARIABLE
from paramstore.core.checksums import header_root
from paramstore.core.residency import Working
from paramstore.daemon.peer import Peer
from paramstore.engine.planner import working_copies
from paramstore.engine.planner.param_copies import CopyPlanner
from paramstore.engine.planner.working_copies import WorkingPlanner
from paramstore.engine.records import update as records_update
from paramstore.engine.steps import commit
from paramstore.engine.steps.commit import Committer
from paramstore.engine.steps.history import History
from paramstore.engine.steps.proof import Prover
from paramstore.engine.steps.transactions import Transactions
from paramstore.engine.tables.namespace import NamespaceState
from paramstore.engine.tables.steps import StepTable
from paramstore.engine.transfers.transfers import Transfers
from paramstore.errors import ConfigError, CorruptRecord, VolumeError
from paramstore.storage.catalog.ledger import Ledger
from paramstore.storage.format.structures import unpack_header
from paramstore.storage.space.extents import Space
from paramstore.storage.space.note_slots import NoteSlots
from paramstore.storage.volume.backing_file import BackingFile
from paramstore.testing.volumes import WrappedVolume

Patch = tuple[Any, str, Any]
"""Owner, attribute, and its replacement. Any: the patched classes have nothing in common."""
CRASH_STATES, STORE_MODEL, DAMAGE = "crash states", "store model", "damage"
PLAIN_ACTS = (
    "train few", "commit", "train few", "write back", "commit beside training", "train", "commit beside training", "train few",
    "rollback", "train few", "commit", "reopen", "train few", "commit", "train", "commit",
)  # fmt: skip
"""A life in which each bug that needs no fault has its chance to show."""
FLUSH_FAILS = ("train", "failing flush", "train few", "failing flush", "commit")
WRITE_FAILS = ("failing write",)
TRANSACTION_IS_LOST = ("train few", "commit", "lost transaction")
IN_TWO_HALVES = ("train", "commit", "prepare", "train few", "commit", "prepare", "prepare")
ROLLS_BACK = ("train", "commit", "train few", "rollback", "train few", "commit")


@dataclass(frozen=True, slots=True)
class Canary:
    """One planted bug. suite: CRASH_STATES, STORE_MODEL, DAMAGE, or a test of the tree as pytest names it. acts: those of the life
    whose crash states are tried."""

    name: str
    what: str
    suite: str
    patches: Callable[[], list[Patch]]
    acts: tuple[str, ...] = PLAIN_ACTS


class _Volume(WrappedVolume):
    """A volume whose flush does something else."""

    def __init__(self, inner: Any, flush: Callable[[Any], None]) -> None:
        super().__init__(inner)
        self._flush = flush

    def flush(self) -> None:
        self._flush(self.inner)


def nothing(*_: object, **__: object) -> None:
    """Does nothing, in the place of a function that should do something."""


def _prover_sees(flush_of: Callable[[int, int], Callable[[Any], None] | None]) -> list[Patch]:
    """Patches volumes as the prover sees them. flush_of: (volume, number of volumes) -> its flush, None: the real one."""
    made = Prover.__init__

    def init(self: Prover, *parts: Any, volumes: Mapping[int, Any], **others: Any) -> None:
        seen = {}
        for index, volume in volumes.items():
            flush = flush_of(index, len(volumes))
            seen[index] = volume if flush is None else _Volume(volume, flush)
        made(self, *parts, volumes=seen, **others)

    return [(Prover, "__init__", init)]


def _skip_flush() -> list[Patch]:
    return _prover_sees(lambda index, count: nothing)


def _forget_one_volume() -> list[Patch]:
    return _prover_sees(lambda index, count: nothing if index == count - 1 else None)


def _publish_before_flush() -> list[Patch]:
    late: list[Any] = []
    publish = Transactions.publish

    async def publish_first(*arguments: Any, **others: Any) -> Any:
        publication = await publish(*arguments, **others)
        while late:
            late.pop().flush()
        return publication

    return [*_prover_sees(lambda index, count: late.append), (Transactions, "publish", publish_first)]


def _believe_the_second_flush() -> list[Patch]:
    def flush(volume: Any) -> None:
        try:
            volume.flush()
        except VolumeError:
            volume.flush()

    return _prover_sees(lambda index, count: flush)


def _trust_after_a_failed_flush() -> list[Patch]:
    return [(Prover, "_distrust", nothing)]


def _publish_before_written() -> list[Patch]:
    async def write_nothing(self: Committer, *_: object) -> None:
        """Leaves the records that were dirty at the cut as they are."""

    return [(Committer, "_write_unwritten", write_nothing), (commit, "_written", lambda cut: cut.located())]


def _ignore_failed_write() -> list[Patch]:
    settle = Transfers._settle_write

    def believe(self: Transfers, move: Any, write: Any, transfer: Any) -> None:
        transfer.error = None
        settle(self, move, write, transfer)

    return [(Transfers, "_settle_write", believe)]


def _reuse_extent_at_once() -> list[Patch]:
    plan_publish = Ledger.plan_publish
    early: set[tuple[Any, int]] = set()
    """(key, first step) of rows whose extents are free too early."""

    def plan(self: Ledger, step_row: Any, changed: Any, held_steps: Any) -> Any:
        publication = plan_publish(self, step_row, changed, held_steps)
        dropped = {(key, first_step) for _, key, first_step in publication.drop_rows}
        freed = [
            extent for (_, key, first_step), extent in zip(publication.drop_rows, publication.freed, strict=True)
            if (key, first_step) not in early
        ]  # fmt: skip
        for _, key, _ in publication.put_rows:
            for row in self._contents.rows.get(key, [])[-1:]:  # the step before this one still needs it
                if (key, row.first_step) not in dropped:
                    early.add((key, row.first_step))
                    freed.append(row.located.extent)
        return replace(publication, freed=freed)

    return [(Ledger, "plan_publish", plan)]


def _reuse_note_slot() -> list[Patch]:
    settling, free = History.settling, NoteSlots.free

    def settling_and_freeing(self: History, namespace: NamespaceState, publication: Any) -> Iterator[None]:
        yield from settling(self, namespace, publication)
        for _, row in publication.put_steps:
            self._note_slots.free(row.note_slot)

    def free_taken(self: NoteSlots, slot: int) -> None:
        if slot in self._taken:
            free(self, slot)

    return [(History, "settling", settling_and_freeing), (NoteSlots, "free", free_taken)]


def _believe_unknown_transaction() -> list[Patch]:
    async def happened(self: Transactions, *_: object) -> bool:
        self._catalog.reopen()
        self._catalog.load()
        return True

    return [(Transactions, "_happened", happened)]


def _retain_one_step() -> list[Patch]:
    def newest(self: Ledger, held_steps: object, *, published: int | None = None) -> frozenset[int]:
        return frozenset([*self.steps(), *([] if published is None else [published])][-1:])

    return [(Ledger, "visible_steps", newest)]


def _disown_nothing() -> list[Patch]:
    next_epoch = Ledger._next_epoch
    return [(Ledger, "_next_epoch", lambda self, target: replace(next_epoch(self, target), epoch_bounds=()))]


def _update_past_the_cut() -> list[Patch]:
    def may_update(_: NamespaceState, working: Any) -> bool:
        return working.state in (Working.CLEAN, Working.DIRTY) and working.holders == 1

    note_change = StepTable.note_change

    def note(steps: StepTable, working: Any) -> None:
        if not steps.is_cut(working):  # the cut gets what comes of the update
            note_change(steps, working)

    return [(StepTable, "note_change", note), *((module, "may_update", may_update) for module in (working_copies, records_update))]


def _apply_twice() -> list[Patch]:
    update = paramstore.engine.transfers.arithmetic.update

    def update_twice(*arguments: Any, **options: Any) -> Any:
        update(*arguments, **options)
        return update(*arguments, **options)

    return [(paramstore.engine.records.update, "update", update_twice)]


def _load_older() -> list[Patch]:
    def committed(self: NamespaceState, key: Any) -> Any:
        step = self.steps.ledger.committed_step
        return self.steps.ledger.at(key, step) if step is not None else self.residency.working[key].uncommitted

    def misled(load: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            with patch.object(NamespaceState, "on_volume", committed):  # for loads alone: a cut that is misled never ends
                return load(*arguments, **options)

        return call

    return [(WorkingPlanner, "_load", misled(WorkingPlanner._load)), (CopyPlanner, "feed", misled(CopyPlanner.feed))]


def _skip_header_checks() -> list[Patch]:
    return [(paramstore.engine.transfers.record_reads, "check_header", lambda data, *, part, **_: unpack_header(data, part))]


def _drop_at_prepare() -> list[Patch]:
    plan_publish = Ledger.plan_publish

    def plan(self: Ledger, step_row: Any, changed: Any, held_steps: Any) -> Any:
        publication = plan_publish(self, replace(step_row, is_prepared=False), changed, held_steps)
        return replace(publication, put_steps=tuple((name, step_row) for name, _ in publication.put_steps))

    return [(Ledger, "plan_publish", plan)]


def _finalize_in_memory() -> list[Patch]:
    async def finalize(self: History, namespace: NamespaceState, *, for_writer: bool) -> None:
        for _ in self.settling(namespace, namespace.steps.ledger.plan_finalize((), for_writer=for_writer)):
            pass

    return [(History, "_finalize", finalize)]


def _skip_root_check() -> list[Patch]:
    check_header = paramstore.storage.format.structures.check_header

    def check_but_root(data: Any, *, part: Any, root: int, **named: Any) -> Any:
        found = header_root(memoryview(data)[: part.header_bytes])
        return check_header(data, part=part, root=found, **named)

    return [(paramstore.engine.transfers.record_reads, "check_header", check_but_root)]


def _skip_identity_check() -> list[Patch]:
    def check_root_only(data: Any, *, part: Any, root: int, **_: Any) -> Any:
        header = unpack_header(data, part)
        if header_root(memoryview(data)[: part.header_bytes]) != root:
            raise CorruptRecord("header root")
        return header

    return [(paramstore.storage.format.structures, "check_header", check_root_only)]


def _skip_chunk_checks() -> list[Patch]:
    return [(paramstore.engine.transfers.record_reads, "check_pieces", nothing)]


def _ignore_short_write() -> list[Patch]:
    def write(self: BackingFile, offset_bytes: int, data: Any) -> None:
        os.pwritev(self._descriptor, data, offset_bytes)

    return [(BackingFile, "write", write)]


def _reuse_slot_on_hang_up() -> list[Patch]:
    return [(Peer, "is_watched", property(lambda self: False))]


def _borrow_anyway() -> list[Patch]:
    return [(Space, "may_borrow", lambda *_, **__: True)]


def _keep_borrowed_room() -> list[Patch]:
    async def find_room(*_: Any) -> bool:
        return False

    return [*_borrow_anyway(), (History, "find_room", find_room)]


def _forget_what_is_borrowed() -> list[Patch]:
    return [(Space, "borrow", nothing)]


_BORROWED = "tests/engine/steps/test_borrowed.py::"
_SESSION_END = "tests/daemon/test_session_end.py::test_a_lease_lives_as_long_as_its_process_not_its_connection"
_FORMAT = "tests/storage/format/test_structures.py::test_header_of_another_record_names_what_differs"
_SHORT = "tests/storage/volume/test_backing_file.py::test_short_transfers_are_continued"

CANARIES = (
    Canary("skip_flush", "no volume is flushed before the transaction", CRASH_STATES, _skip_flush),
    Canary("forget_one_volume", "all volumes but the last are flushed", CRASH_STATES, _forget_one_volume),
    Canary("publish_before_flush", "the transaction comes first, the flushes after", CRASH_STATES, _publish_before_flush),
    Canary("publish_before_written", "the transaction does not wait for the records", CRASH_STATES, _publish_before_written),
    Canary("believe_second_flush", "a failed flush is repeated and believed", CRASH_STATES, _believe_the_second_flush, FLUSH_FAILS),
    Canary("trust_failed_flush", "a failed flush breaks no namespace", CRASH_STATES, _trust_after_a_failed_flush, FLUSH_FAILS),
    Canary("ignore_failed_write", "a record whose write failed counts", CRASH_STATES, _ignore_failed_write, WRITE_FAILS),
    Canary("reuse_extent_at_once", "a superseded extent is free while a step needs it", CRASH_STATES, _reuse_extent_at_once),
    Canary("reuse_note_slot", "the newest step's note is overwritten", CRASH_STATES, _reuse_note_slot),
    Canary("believe_unknown", "a transaction that raised counts", CRASH_STATES, _believe_unknown_transaction, TRANSACTION_IS_LOST),
    Canary("retain_one_step", "the step before the newest is dropped", CRASH_STATES, _retain_one_step),
    Canary("disown_nothing", "a rollback sets no bounds for older epochs", CRASH_STATES, _disown_nothing, ROLLS_BACK),
    Canary("update_past_cut", "a record is updated before the cut has it", CRASH_STATES, _update_past_the_cut),
    Canary("drop_at_prepare", "a prepared step hides what a committed one would", CRASH_STATES, _drop_at_prepare, IN_TWO_HALVES),
    Canary("finalize_in_memory", "finalize makes nothing durable", CRASH_STATES, _finalize_in_memory, IN_TWO_HALVES),
    Canary("apply_twice", "a gradient is applied twice", STORE_MODEL, _apply_twice),
    Canary("load_older", "a load takes the committed record, not the newer one", STORE_MODEL, _load_older),
    Canary("skip_header_checks", "any whole header will do", DAMAGE, _skip_header_checks),
    Canary("skip_root_check", "the header's root is not compared with the catalog's", DAMAGE, _skip_root_check),
    Canary("skip_chunk_checks", "the bytes are not compared with the header's table", DAMAGE, _skip_chunk_checks),
    Canary("skip_identity_check", "a header's store, namespace, key and version are not compared", _FORMAT, _skip_identity_check),
    Canary("ignore_short_write", "what a short write left over is not written", _SHORT, _ignore_short_write),
    Canary(
        "borrow_anyway", "older steps keep room that somebody is entitled to",
        _BORROWED + "test_as_many_older_steps_stay_as_there_is_room_for_and_the_oldest_goes_first[0-0]", _borrow_anyway,
    ),
    Canary(
        "keep_borrowed_room", "older steps keep room that somebody is entitled to, and give none back",
        _BORROWED + "test_two_namespaces_on_tight_volumes_never_lack_what_they_are_entitled_to[0]", _keep_borrowed_room,
    ),
    Canary(
        "forget_borrowed", "borrowed room counts as taken of what its namespace is entitled to",
        _BORROWED + "test_a_new_namespace_and_a_snapshot_get_back_what_older_steps_have_borrowed", _forget_what_is_borrowed,
    ),
    Canary("reuse_slot_on_hang_up", "a lease ends with its connection", _SESSION_END, _reuse_slot_on_hang_up),
)


def canary(name: str) -> Canary:
    """Finds a canary by its name. Raises ConfigError that names all there are."""
    for known in CANARIES:
        if known.name == name:
            return known
    raise ConfigError(f"{BUG_VARIABLE}={name!r}: there are {', '.join(known.name for known in CANARIES)}")


@contextmanager
def planted(name: str) -> Iterator[None]:
    """Plants the bug for as long as the block runs."""
    with ExitStack() as stack:
        for owner, attribute, replacement in canary(name).patches():
            stack.callback(setattr, owner, attribute, vars(owner)[attribute])
            setattr(owner, attribute, replacement)
        yield


def plant(name: str) -> None:
    """Plants the bug in this process, for good."""
    for owner, attribute, replacement in canary(name).patches():
        setattr(owner, attribute, replacement)


def pytest_configure() -> None:
    """Plants the bug that the environment names, for the life of this process."""
    if name := os.environ.get(BUG_VARIABLE):
        plant(name)
