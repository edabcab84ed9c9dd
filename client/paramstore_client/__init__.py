"""The thin client of paramstore: what a training or inference process imports. `paramstore` re-exports these names.

Names that need torch are resolved on first use (PEP 562): connecting, opening and `ServeOptions` do without it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from paramstore.core.optimizers import SGD, Adagrad, AdamW
from paramstore.core.schema import Schema
from paramstore.errors import (
    CapacityError,
    CatalogError,
    CheckpointError,
    ConfigError,
    CorruptCatalog,
    CorruptRecord,
    ForkedClient,
    LeaseError,
    NamespaceExists,
    ParamStoreError,
    ProtocolError,
    RankLost,
    SchemaMismatch,
    StepDropped,
    StepError,
    StepFailed,
    StepMismatch,
    StepOutOfOrder,
    StepPrepared,
    StoreLocked,
    StoreUnavailable,
    TicketCancelled,
    UnknownKey,
    UnknownNamespace,
    UnsupportedModel,
    VersionMismatch,
    VolumeError,
    WaitTimeout,
    WriterFenced,
)
from paramstore_client.client import Store, connect
from paramstore_client.connection.autostart import ServeOptions
from paramstore_client.connection.ticket import Ticket
from paramstore_client.handle.lease import Lease
from paramstore_client.namespace import Namespace
from paramstore_client.schemas import adagrad_schema, adamw_schema, param_schema, sgd_schema

if TYPE_CHECKING:
    from paramstore_client import hf, moe, nn, training
    from paramstore_client.device.buffer import ExpertBuffer
    from paramstore_client.device.report import device_report
    from paramstore_client.device.ring import RingMemory
    from paramstore_client.device.tier import DeviceTier
    from paramstore_client.nn import StoredExperts

__all__ = [
    "SGD",
    "Adagrad",
    "AdamW",
    "CapacityError",
    "CatalogError",
    "CheckpointError",
    "ConfigError",
    "CorruptCatalog",
    "CorruptRecord",
    "DeviceTier",
    "ExpertBuffer",
    "ForkedClient",
    "Lease",
    "LeaseError",
    "Namespace",
    "NamespaceExists",
    "ParamStoreError",
    "ProtocolError",
    "RankLost",
    "RingMemory",
    "Schema",
    "SchemaMismatch",
    "ServeOptions",
    "StepDropped",
    "StepError",
    "StepFailed",
    "StepMismatch",
    "StepOutOfOrder",
    "StepPrepared",
    "Store",
    "StoreLocked",
    "StoreUnavailable",
    "StoredExperts",
    "Ticket",
    "TicketCancelled",
    "UnknownKey",
    "UnknownNamespace",
    "UnsupportedModel",
    "VersionMismatch",
    "VolumeError",
    "WaitTimeout",
    "WriterFenced",
    "adagrad_schema",
    "adamw_schema",
    "connect",
    "device_report",
    "hf",
    "moe",
    "nn",
    "param_schema",
    "sgd_schema",
    "training",
]

_TORCH_NAMES = {
    "DeviceTier": "paramstore_client.device.tier",
    "ExpertBuffer": "paramstore_client.device.buffer",
    "RingMemory": "paramstore_client.device.ring",
    "StoredExperts": "paramstore_client.nn",
    "device_report": "paramstore_client.device.report",
}


def __getattr__(name: str) -> object:
    if name in ("hf", "moe", "nn", "training"):
        return importlib.import_module(f"paramstore_client.{name}")
    if name in _TORCH_NAMES:
        return getattr(importlib.import_module(_TORCH_NAMES[name]), name)
    raise AttributeError(f"module 'paramstore_client' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
