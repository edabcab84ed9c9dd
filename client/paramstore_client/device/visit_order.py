"""Declares a model's order of visits at the service: for whoever joins a model or a ring with a namespace.

A declaration saves transfers and changes no result, so nothing here fails a program that would run without it: a daemon of an
older protocol, or a source that is no namespace, is left alone.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from paramstore.core.visits import VISITS_MAX, Visits, ring_visits
from paramstore.errors import VersionMismatch
from paramstore_client.device.tier import DeviceTier
from paramstore_client.namespace import Namespace
from paramstore_client.source import ExpertSource

_log = logging.getLogger(__name__)


def declare_order(source: ExpertSource, *, micro_batches: int = 1) -> None:
    """Declares training steps of `micro_batches` forwards and backwards for a writer of a trainable namespace, for every other
    handle passes over the layers again and again. source: a namespace, or a `DeviceTier` over one. Raises what
    `declare_schedule` raises, but for VersionMismatch."""
    namespace = _namespace_of(source)
    if namespace is not None:
        fitting = max(1, (VISITS_MAX // len(namespace.layers) - 1) // 2)
        _declare(namespace, None, micro_batches=min(micro_batches, fitting))


def declare_ring(source: ExpertSource, layers: Sequence[int]) -> None:
    """Declares that `layers` are visited in this order, again and again. On a trainer's handle nothing is declared: a miss in its
    steps costs more than one in a ring beside them. source, errors: as for `declare_order`."""
    namespace = _namespace_of(source)
    if namespace is not None and not (namespace.mode == "write" and namespace.schema.is_trainable):
        _declare(namespace, ring_visits(layers))


def _namespace_of(source: ExpertSource) -> Namespace | None:
    inner = source.namespace if isinstance(source, DeviceTier) else source
    return inner if isinstance(inner, Namespace) else None


def _declare(namespace: Namespace, visits: Visits | None, *, micro_batches: int = 1) -> None:
    try:
        namespace.declare_schedule(visits, micro_batches=micro_batches)
    except VersionMismatch as error:
        _log.info("namespace %r: no order of visits is declared: %s", namespace.name, error)
