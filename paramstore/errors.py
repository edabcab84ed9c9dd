"""Every exception of paramstore, service and client alike.

    ParamStoreError
    ├── ConfigError              a setting, flag or argument is wrong             (CLI exit code 2)
    ├── StoreUnavailable         the daemon cannot be reached, or went away       (exit code 3)
    │   ├── VersionMismatch      the daemon speaks another protocol version
    │   └── ForkedClient         a client was used in a forked child
    ├── ProtocolError            a frame that no correct peer sends
    ├── StoreLocked              another daemon holds this directory
    ├── UnknownNamespace         no namespace of that name
    ├── NamespaceExists          the name is taken by a committed namespace
    ├── UnknownKey               the key is not in the namespace
    ├── SchemaMismatch           field, shape or dtype differ from the schema
    ├── UnsupportedModel         a model whose experts cannot be stored, with the reason
    ├── CapacityError            a limit of memory, slots, volume or budget; the message names the setting
    ├── LeaseError               a lease cannot be had, or is used after its release
    ├── WaitTimeout              a bounded wait ran out; nothing was cancelled
    ├── TicketCancelled          the ticket was cancelled before it took effect
    ├── WriterFenced             another writer opened the namespace
    ├── StepError
    │   ├── StepOutOfOrder       a commit's step is not above the committed one
    │   ├── StepMismatch         ranks called different things together, or one did not call in time
    │   ├── RankLost             a rank of the group is gone; all ranks open the namespace again
    │   ├── StepFailed           an apply or commit failed; `rollback` is the way on
    │   ├── StepPrepared         a step is prepared: finalize it, or go back, before anything else changes
    │   └── StepDropped          the step is not retained any more
    ├── VolumeError              a volume failed, is missing, or is not ours
    │   └── CorruptRecord        bytes on a volume do not match their checksum, or are gone (exit code 4)
    ├── CheckpointError          a model's checkpoint is damaged, lacks tensors, or is another one than an import began with
    └── CatalogError             the catalog failed, is full, or is not ours
        └── CorruptCatalog       the catalog is damaged or was cut off            (exit code 4)

A message names the key, the place, the value seen and, where one helps, the setting to change. Errors cross the
socket as (class name, message) and arrive as the same class: `from_wire` is the one place that maps them.
"""

from __future__ import annotations


class ParamStoreError(Exception):
    """Base of every error that paramstore raises on purpose."""


class ConfigError(ParamStoreError):
    """A setting, a flag, an environment variable or an argument is wrong."""


class StoreUnavailable(ParamStoreError):
    """The daemon cannot be reached, or it went away; `store.reconnect()` is the way on."""


class VersionMismatch(StoreUnavailable):
    """The daemon and the client speak different protocol versions."""


class ForkedClient(StoreUnavailable):
    """A client was used in a forked child; connect again in the child."""


class ProtocolError(ParamStoreError):
    """A frame that no correct peer sends: garbage, oversized, or out of place."""


class StoreLocked(ParamStoreError):
    """Another daemon holds this directory."""


class UnknownNamespace(ParamStoreError):
    """There is no namespace of that name."""


class NamespaceExists(ParamStoreError):
    """The name is taken by a committed namespace, or by one with another schema."""


class UnknownKey(ParamStoreError):
    """The expert key is not in the namespace."""


class SchemaMismatch(ParamStoreError):
    """A field, shape, dtype or part differs from what the schema says."""


class UnsupportedModel(ParamStoreError):
    """The experts of this model cannot be stored, or not with these arguments; the message says why and what can be done."""


class CapacityError(ParamStoreError):
    """A limit of memory, slots, volume or budget; the message names the sizes and the setting."""


class LeaseError(ParamStoreError):
    """A lease cannot be had, or was used after its release."""


class WaitTimeout(ParamStoreError, TimeoutError):
    """A bounded wait ran out. Nothing was cancelled: the operation may still complete."""


class TicketCancelled(ParamStoreError):
    """The ticket was cancelled before it took effect."""


class WriterFenced(ParamStoreError):
    """Another writer opened the namespace; this handle writes no more."""


class StepError(ParamStoreError):
    """Base of errors about steps."""


class StepOutOfOrder(StepError):
    """A commit's step is not above the committed one."""


class StepMismatch(StepError):
    """Ranks called different things together, or one of them did not call in time; nothing ran."""


class RankLost(StepError):
    """A rank of the group is gone: its collective calls fail until all ranks have opened the namespace again."""


class StepFailed(StepError):
    """An apply or a commit failed; push, apply and commit refuse until `rollback`."""


class StepPrepared(StepError):
    """A step is prepared and not committed: finalize it, or roll back, before records change again."""


class StepDropped(StepError):
    """The step is not retained any more."""


class VolumeError(ParamStoreError):
    """A volume failed, is missing, or does not belong to this store."""


class CorruptRecord(VolumeError):
    """The bytes of a record, a superblock or a commit note do not match their checksum or identity, or were cut off."""


class CheckpointError(ParamStoreError):
    """A checkpoint of a model (safetensors files, not a store's) is damaged, incomplete, or not the one an import began with.

    is_another: whether it is the last, so that a namespace has the experts of another checkpoint, or of what was there before.
    """

    is_another = False


class CatalogError(ParamStoreError):
    """The catalog failed, is full, or does not belong to this store."""


class CorruptCatalog(CatalogError):
    """The catalog is damaged, was cut off, or contradicts itself."""


def _all_classes() -> dict[str, type[ParamStoreError]]:
    classes: dict[str, type[ParamStoreError]] = {}
    pending: list[type[ParamStoreError]] = [ParamStoreError]
    while pending:
        cls = pending.pop()
        classes[cls.__name__] = cls
        pending.extend(cls.__subclasses__())
    return classes


CLASSES = _all_classes()
"""Every error class by name; `from_wire` can rebuild these."""


def from_wire(name: str, message: str) -> ParamStoreError:
    """Makes the error that a peer sent as (class name, message). An unknown name becomes the base class, with the name kept."""
    cls = CLASSES.get(name)
    if cls is None:
        return ParamStoreError(f"{name}: {message}")
    return cls(message)
