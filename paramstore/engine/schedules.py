"""Whose declared order of visits a namespace's arenas go by.

Each view may declare one, and it ends with the view. The writer's counts before any reader's, since what a trainer misses
costs more; of several the one declared last. Every view's uses are counted, whoever's order it is.
"""

from __future__ import annotations

from paramstore.core.visits import Visits
from paramstore.engine.namespace import Declared, NamespaceState, View
from paramstore.policy.schedule import Schedule


def declare_schedule(view: View, *, param: Visits, optim: Visits) -> None:
    """`view` visits its layers in these cycles from now on; both empty: it takes back what it declared."""
    number = 1 + max((other.declared.number for other in view.namespace.views if other.declared is not None), default=0)
    view.declared = Declared(number, param, optim) if param or optim else None
    choose_schedule(view.namespace)


def choose_schedule(namespace: NamespaceState) -> None:
    """After a view came, went, was fenced or declared: tells the arenas' policies which order is in force, if any."""
    standing = [view for view in namespace.views if view.declared is not None and not (view.is_fenced or view.is_closed)]
    chosen = max(standing, key=lambda view: (view.is_writer, view.declared and view.declared.number), default=None)
    declared = chosen.declared if chosen is not None else None
    param, working = namespace.param_arena, namespace.working_arena
    if param is not None and isinstance(param.policy, Schedule):
        param.policy.declare(declared.param if declared is not None else ())
    if working is not None and working is not param and isinstance(working.policy, Schedule):
        working.policy.declare(declared.optim if declared is not None else ())
