"""The manifest of the experts in a checkpoint of the dense part: it names a committed step of a namespace.

A manifest names a durable step, or is not made. The step stays as long as the store's retention keeps it: `retained_steps` must
be at least the number of checkpoints kept, plus one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from paramstore.core.arguments import mapping
from paramstore.errors import SchemaMismatch, StepDropped, StepOutOfOrder
from paramstore_client.namespace import Namespace

FORMAT = 1


@dataclass(frozen=True, slots=True)
class Manifest:
    """A committed step. store: the store's uuid. layout: a hash of schema, layers and experts. dtype: of `param`. epoch: the
    namespace's when it was made."""

    format: int
    store: str
    namespace: str
    step: int
    epoch: int
    layout: str
    dtype: str

    @classmethod
    def of(cls, namespace: Namespace) -> Manifest:
        """The manifest of the namespace as it is now. Raises StepOutOfOrder where that is no committed step."""
        step = check_committed(namespace)
        if applied := namespace.uncommitted_applies:
            raise StepOutOfOrder(
                f"namespace {namespace.name!r} is {applied} applies after its committed step {step}: to save, call "
                "experts.commit(step) first (or set experts.commit_on_state_dict); to load, experts.rollback()"
            )
        return cls(
            FORMAT, namespace.store_uuid, namespace.name, step, namespace.epoch, layout_hash(namespace),
            namespace.schema.part("param").fields[0].dtype,
        )  # fmt: skip

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Manifest:
        """The manifest that `to_dict` gave. Raises SchemaMismatch if it is none."""
        mapping("state_dict", values, "what experts.state_dict() gave")
        try:
            kinds: dict[str, Any] = {field.name: {"str": str, "int": int}[str(field.type)] for field in fields(cls)}
            if missing := [name for name in kinds if name not in values]:
                raise SchemaMismatch(f"not a manifest of experts: {', '.join(missing)} missing, it has {sorted(map(str, values))}")
            manifest = cls(**{name: kind(values[name]) for name, kind in kinds.items()})
        except (TypeError, ValueError) as error:
            raise SchemaMismatch(f"not a manifest of experts: {error!r} in {sorted(map(str, values))}") from error
        if manifest.format != FORMAT:
            raise SchemaMismatch(f"a manifest of format {manifest.format}; this version knows {FORMAT}")
        return manifest

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def check(self, namespace: Namespace) -> None:
        """Raises SchemaMismatch if `namespace` is not the one it was made of."""
        for what, saved, seen in (
            ("store", self.store, namespace.store_uuid),
            ("namespace", self.namespace, namespace.name),
            ("layout", self.layout, layout_hash(namespace)),
        ):
            if saved != seen:
                raise SchemaMismatch(
                    f"the checkpoint's experts are of {what} {saved!r}, this is {seen!r}: open the store that it was saved with"
                )
        if self.epoch > namespace.epoch:
            raise SchemaMismatch(
                f"the checkpoint is of epoch {self.epoch} of {self.namespace!r}, the store is at {namespace.epoch}: it is an older "
                "copy of that store"
            )


def layout_hash(namespace: Namespace) -> str:
    """Equal for namespaces whose records lie alike: schema, layers, experts."""
    description = [namespace.schema.describe(), list(namespace.layers), namespace.experts]
    return hashlib.sha256(json.dumps(description, sort_keys=True).encode()).hexdigest()[:32]


def check_committed(namespace: Namespace) -> int:
    """The committed step. Raises StepOutOfOrder before the first commit."""
    if namespace.committed_step is None:
        raise StepOutOfOrder(f"namespace {namespace.name!r} has no committed step yet: call experts.commit(step) first")
    return namespace.committed_step


def roll_to(namespace: Namespace, step: int) -> None:
    """Takes the namespace to `step`, with nothing pending. Raises StepDropped naming the kept steps; then nothing has changed."""
    if step == namespace.committed_step and not (namespace.uncommitted_applies or namespace.is_applying):
        namespace.abort()  # it is at the step already: without a rollback its residency stays
        return
    kept = namespace.steps()
    if step not in kept:
        raise StepDropped(
            f"step {step} of namespace {namespace.name!r} is not kept; kept are {', '.join(map(str, kept))}: load a checkpoint of "
            "one of them, and raise retained_steps above the number of checkpoints you keep"
        )
    namespace.rollback(step)
