"""Checks whether a view may change records now: every reason that does not depend on what the call brings, in one place."""

from __future__ import annotations

from paramstore.engine.tables.namespace import NamespaceState, View
from paramstore.errors import SchemaMismatch, StepFailed, StepOutOfOrder, StepPrepared


def check_writing(view: View) -> NamespaceState:
    """Returns the view's namespace if the view may write. A broken namespace passes, so that calls which roll back are allowed.

    Raises LeaseError, WriterFenced, SchemaMismatch for a reader, RankLost.
    """
    if view.group is not None:
        view.group.check_whole()
    view.check_open()
    if not view.is_writer:
        raise SchemaMismatch(f"namespace {view.namespace.name!r} is open for reading: open it with mode='write'")
    return view.namespace


def check_writer(view: View) -> NamespaceState:
    """Does what `check_writing` does; raises StepFailed too, on a broken namespace."""
    namespace = check_writing(view)
    if namespace.writing.broken is not None:
        raise StepFailed(f"namespace {namespace.name!r}: {namespace.writing.broken}; rollback() is the way on")
    return namespace


def check_pushing(view: View) -> NamespaceState:
    """Does what `check_writer` does; raises StepMismatch too, while the view's ranks are out of step."""
    namespace = check_writer(view)
    assert view.group is not None
    view.group.check_in_step()
    return namespace


def check_closed(namespace: NamespaceState, *, what: str) -> NamespaceState:
    """Raises StepOutOfOrder while an apply is open: what it has claimed is half-way."""
    if namespace.writing.open_apply is not None:
        raise StepOutOfOrder(f"{what} on {namespace.name!r}: an apply is open (begin_apply): call end_apply first")
    return namespace


def check_unclaimed(namespace: NamespaceState, *, what: str) -> None:
    """Raises StepOutOfOrder where the open apply has claimed a record: `what` would wait for its end."""
    if namespace.writing.open_apply is not None and namespace.writing.open_apply.gradients:
        check_closed(namespace, what=what)


def check_changing(view: View) -> NamespaceState:
    """Does what `check_writer` does, for calls that change records. Raises StepPrepared too, while a step is prepared, StepFailed
    while initial values are given, since a key may have none yet, and StepOutOfOrder while an apply is open."""
    namespace = check_writer(view)
    if namespace.writing.is_initializing and namespace.steps.committed_step is None:
        raise StepFailed(f"namespace {namespace.name!r} is being initialized: end that first")
    if namespace.steps.prepared_step is not None:
        raise prepared_error(namespace, what="apply or prepare")
    return check_closed(namespace, what="apply or prepare")


def prepared_error(namespace: NamespaceState, *, what: str) -> StepPrepared:
    """Makes the error that says why `what` is refused while a step is prepared, or is being prepared."""
    return StepPrepared(
        f"{what} on {namespace.name!r}: step {namespace.steps.prepared_step} is prepared: finalize it, or go back to "
        f"{namespace.steps.committed_step}, first (a new writer does either with at=)"
    )
