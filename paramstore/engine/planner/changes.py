"""Which commit publishes a changed record: the next one, the cut under way once the record is written, or one that is over."""

from __future__ import annotations

from paramstore.core.location import Located
from paramstore.engine.tables.copies import Cut, WorkingCopy
from paramstore.engine.tables.namespace import NamespaceState


def note_change(namespace: NamespaceState, working: WorkingCopy) -> None:
    """Notes that the next commit is to publish its newest identity."""
    steps = namespace.steps
    if working.publish_in != steps.sequence + 1:
        working.publish_in = steps.sequence + 1
        steps.changed.append(working)


def keep_in_cut(cut: Cut, working: WorkingCopy, located: Located) -> None:
    """Keeps what the cut has waited for: the record is whole in `located`, whose extent stays until the cut is settled."""
    working.publish_in, working.cut_record = None, located
    cut.unwritten -= 1
    while cut.passed < len(cut.records) and not cut.awaits(cut.records[cut.passed]):
        cut.passed += 1
