"""What a view may change now: every reason for which a writer's call is refused, in one place."""

from __future__ import annotations

from paramstore.engine.chain import prepared_error
from paramstore.engine.leases import LeasePlanner
from paramstore.engine.namespace import NamespaceState, View
from paramstore.errors import SchemaMismatch, StepFailed, StepOutOfOrder


def check_writing(view: View) -> NamespaceState:
    """The namespace, if the view is its writer's; what rolls back may do so on a broken one.

    Raises LeaseError, WriterFenced, SchemaMismatch for a reader, RankLost.
    """
    if view.group is not None:
        view.group.check_whole()
    LeasePlanner.check_view(view)
    if not view.is_writer:
        raise SchemaMismatch(f"namespace {view.namespace.name!r} is open for reading: open it with mode='write'")
    return view.namespace


def check_writer(view: View) -> NamespaceState:
    """As `check_writing`; raises StepFailed too, on a broken namespace."""
    namespace = check_writing(view)
    if namespace.broken is not None:
        raise StepFailed(f"namespace {namespace.name!r}: {namespace.broken}; rollback() is the way on")
    return namespace


def check_pushing(view: View) -> NamespaceState:
    """As `check_writer`; raises StepMismatch too, while the view's ranks are out of step."""
    namespace = check_writer(view)
    assert view.group is not None
    view.group.check_in_step()
    return namespace


def check_closed(namespace: NamespaceState, *, what: str) -> NamespaceState:
    """Raises StepOutOfOrder while an apply is open: what it has claimed is half-way."""
    if namespace.open_apply is not None:
        raise StepOutOfOrder(f"{what} on {namespace.name!r}: an apply is open (begin_apply): call end_apply first")
    return namespace


def check_unclaimed(namespace: NamespaceState, *, what: str) -> None:
    """Raises StepOutOfOrder where the open apply has claimed a record: `what` would wait for its end."""
    if namespace.open_apply is not None and namespace.open_apply.gradients:
        check_closed(namespace, what=what)


def check_changing(view: View) -> NamespaceState:
    """As `check_writer`; raises StepPrepared too, while no record may change, and StepFailed while first values are given: a key
    may have none yet."""
    namespace = check_writer(view)
    if namespace.is_initializing and namespace.committed_step is None:
        raise StepFailed(f"namespace {namespace.name!r} is being initialized: end that first")
    if namespace.prepared_step is not None:
        raise prepared_error(namespace, what="apply or prepare")
    return check_closed(namespace, what="apply or prepare")
