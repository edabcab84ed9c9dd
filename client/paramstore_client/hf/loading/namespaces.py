"""Opens the namespace of a model's experts where it is committed, makes and fills it where it is not.

Under torchrun every rank of the node opens the same namespace: those that train write it together, and so do those that only want
to read while they make it. A writer that would be refused is refused before it opens: opening fences the one that is at work.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from paramstore.core.schema import Schema
from paramstore.errors import CapacityError, SchemaMismatch, WriterFenced
from paramstore_client.client import Store
from paramstore_client.hf.model.layout import ExpertLayout
from paramstore_client.namespace import Namespace
from paramstore_client.training import launched

_log = logging.getLogger(__name__)

Fill = Callable[[Namespace], object]
"""Gives a new namespace its first values; it may commit them."""

Check = Callable[[Namespace], object]
"""Looks at a reader's handle of a committed namespace, and raises where that is not the one that is meant."""

LeaseBounds = tuple[int, int | None]
"""The least and the most lease slots, as `min_lease_slots` and `max_lease_slots` of `Store.open_namespace`."""

FIRST_STEP = 0


def open_experts(
    store: Store, name: str, layout: ExpertLayout, schema: Schema, *, mode: str, bounds: LeaseBounds = (0, None), fill: Fill,
    check: Check | None = None,
) -> Namespace:  # fmt: skip
    """Opens the namespace `name` as its writer (mode "train") or a reader of its newest step ("infer").

    One that has no commit yet is filled and committed as step 0 first; its schema is `schema`. Raises SchemaMismatch where one
    that is to be trained has another schema, layers or experts, CapacityError where no lease slot is left to one that is to be
    served, and what opening and filling raise; then no handle is left open. bounds: of the lease slots; a writer's the least alone.
    """
    least, _ = bounds
    ranks = _ranks()
    committed = {known["name"]: known for known in store.namespaces() if known["committed_step"] is not None}
    if name not in committed:
        made, check = _make(store, name, layout, schema, fill=fill, ranks=ranks), None
        if mode == "train" and made.lease_slots >= least:
            return made
        made.close()
    if mode == "infer":
        return _checked(_open_reader(store, name, bounds), check)
    if name in committed:
        _check_same(committed[name], layout, schema)
    if check is not None:
        _checked(store.open_namespace(name, max_lease_slots=0), check).close()
    return store.open_namespace(name, mode="write", min_lease_slots=least, **ranks)


def committed_schema(store: Store, name: str) -> Schema | None:
    """The schema of the namespace of that name; None where there is none with a committed step."""
    for known in store.namespaces():
        if known["name"] == name and known["committed_step"] is not None:
            return Schema.from_description(known["schema"])
    return None


def memory_slots(store: Store, name: str) -> int:
    """How many experts of an open namespace the daemon's memory is to hold."""
    param = store.stats()["namespaces"][name]["param"]
    return int(param.get("planned_slots", param["slots"]))  # an older daemon tells those that there are by now


def _open_reader(store: Store, name: str, bounds: LeaseBounds) -> Namespace:
    """A reader's handle that was promised a lease slot at least. Raises CapacityError where none is left, naming who has them."""
    least, most = bounds
    reader = store.open_namespace(name, min_lease_slots=least, max_lease_slots=most)
    if reader.lease_slots:
        return reader
    reader.close()
    try:
        return store.open_namespace(name, min_lease_slots=1, max_lease_slots=most)
    except CapacityError as error:
        raise CapacityError(f"a model that is served needs a lease slot: {error}") from error


def _checked(reader: Namespace, check: Check | None) -> Namespace:
    """Returns `reader` if `check` takes it; closes it where `check` raises."""
    if check is not None:
        try:
            check(reader)
        except BaseException:
            reader.close()
            raise
        _log.info("%r is committed at step %s: its experts are used", reader.name, reader.view_step)
    return reader


def _check_same(known: Mapping[str, Any], layout: ExpertLayout, schema: Schema) -> None:
    """Raises SchemaMismatch if the namespace that `Store.namespaces` told of is not of that layout and schema."""
    held = Schema.from_description(known["schema"])
    if schema.is_trainable and not held.is_trainable:
        raise SchemaMismatch(
            f"namespace {known['name']!r} was made to be served, without states of an optimizer: give mode='infer' to serve it, or "
            "another name= to train"
        )
    found = _facts(held, known["layers"], known["experts"])
    for what, asked in _facts(schema, layout.layers, layout.experts).items():
        if found[what] != asked:
            raise SchemaMismatch(f"namespace {known['name']!r} has {what} {found[what]!r}, asked was {asked!r}: give another name=")


def _facts(schema: Schema, layers: Iterable[int], experts: int) -> dict[str, object]:
    """The facts that must be equal, under the names that people are shown."""
    described = {**schema.describe(), "updates": schema.updates, "state_dtype": schema.state_dtype}
    return {**described, "layers": list(layers), "experts per layer": experts}


def _make(
    store: Store, name: str, layout: ExpertLayout, schema: Schema, *, fill: Fill, ranks: dict[str, Any]
) -> Namespace:
    """A new namespace, filled and committed, open as its writer."""
    namespace = store.create_namespace(name, schema, layers=layout.layers, experts=layout.experts, **ranks)
    try:
        fill(namespace)
        if namespace.committed_step is None:
            namespace.commit(FIRST_STEP).wait()
    except BaseException as error:
        namespace.close()
        if isinstance(error, WriterFenced):
            way_on = "and goes on with what is there: load this model again once that is committed"
            raise WriterFenced(f"another process has begun to fill the new namespace {name!r}, {way_on}") from error
        raise
    return namespace


def _ranks() -> dict[str, Any]:
    """Arguments that say which rank this process is when it opens as a writer; none where it is alone."""
    launch = launched()
    return dict(launch) if launch["world_size"] > 1 else {}
