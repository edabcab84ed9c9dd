"""Chooses the declared order of visits by which a namespace's arenas rank victims.

Each view may declare one, and it ends with the view. A writer's goes before any reader's, since a miss costs a trainer more; among
equals the one declared last is chosen. The policies count every view's uses, whichever order is chosen.
"""

from __future__ import annotations

from paramstore.core.visits import Visits
from paramstore.engine.tables.namespace import Declared, NamespaceState, View
from paramstore.policy.schedule import Schedule


def declare_schedule(view: View, *, param: Visits, optim: Visits) -> None:
    """Declares that `view` visits its layers in these cycles from now on; both empty: takes back its declaration."""
    number = 1 + max((other.declared.number for other in view.namespace.views if other.declared is not None), default=0)
    view.declared = Declared(number, param, optim) if param or optim else None
    choose_schedule(view.namespace)


def choose_schedule(namespace: NamespaceState) -> None:
    """Tells the arenas' policies which order is in force, if any; to be called after a view came, went, was fenced or declared."""
    standing = [view for view in namespace.views if view.declared is not None and not (view.is_fenced or view.is_closed)]
    chosen = max(standing, key=lambda view: (view.is_writer, view.declared and view.declared.number), default=None)
    declared = chosen.declared if chosen is not None else None
    if not namespace.has_memory:
        return
    param, working = namespace.memory.param, namespace.memory.working
    if isinstance(param.policy, Schedule):
        param.policy.declare(declared.param if declared is not None else ())
    if working is not param and isinstance(working.policy, Schedule):
        working.policy.declare(declared.optim if declared is not None else ())
