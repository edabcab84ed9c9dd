"""The namespace of a model's experts: opened where it is committed, made and filled where it is not.

Under torchrun every rank of the node opens the same namespace, and those that train write it together.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from paramstore.core.schema import Schema
from paramstore.errors import SchemaMismatch
from paramstore_client.client import Store
from paramstore_client.hf.layout import ExpertLayout
from paramstore_client.namespace import Namespace
from paramstore_client.training import launched

Fill = Callable[[Namespace], object]
"""Gives a new namespace its first values; it may commit them."""

FIRST_STEP = 0


def open_experts(store: Store, name: str, layout: ExpertLayout, schema: Schema, *, mode: str, fill: Fill) -> Namespace:
    """The namespace `name`, committed: as its writer (mode "train") or a reader of its newest step ("infer").

    One that has no commit yet is filled and committed as step 0 first; its schema is `schema`. Raises SchemaMismatch where one
    that is to be trained has another schema, and what opening and filling raise; then no handle is left open.
    """
    ranks = _ranks()
    committed = {known["name"] for known in store.namespaces() if known["committed_step"] is not None}
    if mode == "infer":
        if name not in committed:
            _make(store, name, layout, schema, fill=fill, ranks={}).close()
        return store.open_namespace(name)
    if name not in committed:
        return _make(store, name, layout, schema, fill=fill, ranks=ranks)
    namespace = store.open_namespace(name, mode="write", **ranks)
    described = namespace.schema.describe()
    if described != schema.describe():
        namespace.close()
        raise SchemaMismatch(f"namespace {name!r} has the schema {described}, asked was {schema.describe()}: give another name=")
    return namespace


def _make(
    store: Store, name: str, layout: ExpertLayout, schema: Schema, *, fill: Fill, ranks: dict[str, Any]
) -> Namespace:
    """A new namespace, filled and committed, open as its writer."""
    namespace = store.create_namespace(name, schema, layers=layout.layers, experts=layout.experts, **ranks)
    try:
        fill(namespace)
        if namespace.committed_step is None:
            namespace.commit(FIRST_STEP).wait()
    except BaseException:
        namespace.close()
        raise
    return namespace


def _ranks() -> dict[str, Any]:
    """This process among those of its node, for a writer's opening; nothing where it is alone."""
    launch = launched()
    return dict(launch) if launch["world_size"] > 1 else {}
