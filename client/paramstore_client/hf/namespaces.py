"""The namespace of a model's experts: opened where it is committed, made and filled where it is not.

Under torchrun every rank of the node opens the same namespace; those that write do so as one group, named by the job's run and
restart, so that a restarted job fences what was left of the former one.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from paramstore.core.schema import Schema
from paramstore.errors import SchemaMismatch
from paramstore_client.client import Store
from paramstore_client.hf.layout import ExpertLayout
from paramstore_client.namespace import Namespace

Fill = Callable[[Namespace], object]
"""Gives a new namespace its first values; it may commit them."""

FIRST_STEP = 0


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process among those of the node that train one model. world_size 1: alone."""

    rank: int
    world_size: int
    group: str

    @classmethod
    def of_environment(cls) -> Ranks:
        """What torchrun says (LOCAL_RANK, LOCAL_WORLD_SIZE, and the names of the job's start)."""
        start = (os.environ.get("TORCHELASTIC_RUN_ID", ""), os.environ.get("TORCHELASTIC_RESTART_COUNT", ""))
        return cls(
            rank=int(os.environ.get("LOCAL_RANK", "0")),
            world_size=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
            group="/".join(part for part in start if part),
        )

    def arguments(self) -> dict[str, Any]:
        """For `open_namespace` and `create_namespace` as a writer."""
        if self.world_size == 1:
            return {}
        return {"rank": self.rank, "world_size": self.world_size, "group": self.group}


ALONE = Ranks(rank=0, world_size=1, group="")


def open_experts(
    store: Store, name: str, layout: ExpertLayout, schema: Schema, *, mode: str, fill: Fill, ranks: Ranks | None = None
) -> Namespace:
    """The namespace `name`, committed: as its writer (mode "train") or a reader of its newest step ("infer").

    One that has no commit yet is filled and committed as step 0 first; its schema is `schema`. ranks: None for the environment's.
    Raises SchemaMismatch where a namespace that is to be trained has another schema, and what opening and filling raise; then
    no handle is left open.
    """
    ranks = Ranks.of_environment() if ranks is None else ranks
    committed = {known["name"] for known in store.namespaces() if known["committed_step"] is not None}
    if mode == "infer":
        if name not in committed:
            _make(store, name, layout, schema, fill=fill, ranks=ALONE).close()
        return store.open_namespace(name)
    if name not in committed:
        return _make(store, name, layout, schema, fill=fill, ranks=ranks)
    namespace = store.open_namespace(name, mode="write", **ranks.arguments())
    described = namespace.schema.describe()
    if described != schema.describe():
        namespace.close()
        raise SchemaMismatch(f"namespace {name!r} has the schema {described}, asked was {schema.describe()}: give another name=")
    return namespace


def _make(store: Store, name: str, layout: ExpertLayout, schema: Schema, *, fill: Fill, ranks: Ranks) -> Namespace:
    """A new namespace, filled and committed, open as its writer."""
    namespace = store.create_namespace(name, schema, layers=layout.layers, experts=layout.experts, **ranks.arguments())
    try:
        fill(namespace)
        if namespace.committed_step is None:
            namespace.commit(FIRST_STEP).wait()
    except BaseException:
        namespace.close()
        raise
    return namespace
