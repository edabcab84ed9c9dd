"""Imports the experts of a checkpoint into a namespace, one at a time, over as many attempts as it takes.

- Nothing is put before the whole checkpoint has been looked at: names, shapes, dtypes, lengths of files; and nothing that was read
  from a file which changed since.
- Every `save_every_s` seconds, and when it is interrupted, what is there is made durable. An attempt that dies loses what it put
  since then; the next one goes on from there, and refuses another checkpoint than the one that was begun with.
- The namespace is committed at the end, and not before: until then nobody can read it or train with it.
- Memory of this process, beyond what the daemon counts as upload memory: the tensors of one expert, read and converted, are
  twice their size in the checkpoint; VALUES_IN_FLIGHT values are in upload memory.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from paramstore.clock import Clock, MonotonicClock
from paramstore.core.key import ExpertKey
from paramstore.core.schema import Schema
from paramstore.errors import CheckpointError, ConfigError, ParamStoreError, SchemaMismatch
from paramstore_client.connection.answers import Result
from paramstore_client.connection.ticket import Ticket
from paramstore_client.handle.given_heat import Heat
from paramstore_client.handle.initialization import Initialization
from paramstore_client.handle.origin import Origin
from paramstore_client.hf.checkpoint.progress import Progress, Report, reported
from paramstore_client.hf.checkpoint.recipes import ExpertSource
from paramstore_client.hf.checkpoint.shards import open_checkpoint
from paramstore_client.hf.model.layout import ExpertLayout, find_layout
from paramstore_client.namespace import Namespace
from paramstore_client.quantized.packed import is_packed, packed_tensors
from paramstore_client.safetensors_file import Files
from paramstore_client.tensors import DTYPES

SAVE_EVERY_S = 10.0
"""Seconds from one save to the next. A save costs a flush of every volume and a transaction: milliseconds on NVMe."""
LAST_SAVE_TIMEOUT_S = 10.0
"""How long an import that was interrupted waits for its last save."""
VALUES_IN_FLIGHT = 2
"""Most values under way: the daemon takes one while the next is read."""


@dataclass(frozen=True, slots=True)
class Imported:
    """What an import did. records: put by this attempt; resumed: by those before it. step: the committed one."""

    step: int
    records: int
    resumed: int
    bytes_read: int
    seconds: float
    fingerprint: str


def import_checkpoint(
    path: str | os.PathLike[str], namespace: Namespace, model: nn.Module, *, progress: Report | bool | None = None,
    resume: bool = True, step: int = 0, save_every_s: float = SAVE_EVERY_S, rank: int = 0, world_size: int = 1,
    clock: Clock | None = None, heat: Heat | None = None,
) -> Imported:  # fmt: skip
    """Puts the experts of the checkpoint at `path` into `namespace`, which has no commit yet, and commits it as `step`.

    path: a directory of safetensors, or the id of a model in the hub's cache. model: of the checkpoint's kind, stripped or not, on
    any device: it says where the experts are and what their tensors are called; its values are not used.
    Where the namespace keeps fp32 masters they are the checkpoint's values exactly, so that a `param` of its dtype is too.
    progress: True for a bar on stderr, or a function. resume: go on where an earlier attempt was stopped; False starts over.
    rank, world_size: of a job whose ranks import together, each its share of the keys; all must call this.
    heat: how much the experts are to be used, as for `begin_initialize`: a trace of the model, or its file.
    Raises CheckpointError naming file and tensor where something is damaged, missing or of another shape, or where the attempt
    before was of another checkpoint; then nothing was put. CheckpointError for a file that changed meanwhile, SchemaMismatch,
    UnsupportedModel, StepOutOfOrder if the namespace is committed, and what the daemon raises; then the attempt can be resumed.
    """
    if not 0 <= rank < world_size:
        raise ConfigError(f"import_checkpoint: rank={rank} of world_size={world_size}")
    now = clock or MonotonicClock()
    started_s = now.now_s()
    layout = find_layout(model)
    check_schema(layout, namespace)
    source = ExpertSource(model, layout, open_checkpoint(path))
    _check_quantized(source, namespace)
    with Files() as sampled:
        fingerprint = source.fingerprint(sampled)
    with Files() as files, reported("import", progress) as report:
        extra = Origin(fingerprint, _named(path), step).to_extra()
        with namespace.begin_initialize(resume=resume, values_in_flight=VALUES_IN_FLIGHT, heat=heat) as initialization:
            _check_same(initialization.extra, fingerprint, path=path, name=namespace.name)
            missing = set(initialization.missing)
            mine = [key for number, key in enumerate(namespace.keys()) if number % world_size == rank]
            wanted = [key for key in mine if key in missing]
            saver = _Saver(initialization, extra, now, every_s=save_every_s)
            with saver.saving_what_is_there():
                _put_all(source, files, initialization, namespace, wanted, saver, report, len(mine))
                initialization.end()
        namespace.commit(step, extra).wait()
        seconds = now.now_s() - started_s
        return Imported(step, len(wanted), len(mine) - len(wanted), files.bytes_read, seconds, fingerprint)


def _put_all(
    source: ExpertSource, files: Files, initialization: Initialization, namespace: Namespace, wanted: Sequence[ExpertKey],
    saver: _Saver, report: Report, total: int,
) -> None:  # fmt: skip
    dtypes = {field.name: DTYPES[field.dtype] for field in namespace.schema.initial_fields()}
    is_trained = namespace.schema.is_trainable
    report(Progress(total - len(wanted), total, 0))
    for number, key in enumerate(wanted, start=1):
        initialization.settle(VALUES_IN_FLIGHT - 1)  # before the next one takes memory
        values = source.read(key, files)
        initialization.put(key, values if is_trained else _as_stored(values, dtypes))
        del values
        saver.save_if_due()
        report(Progress(total - len(wanted) + number, total, files.bytes_read))
    initialization.settle()


def _as_stored(values: dict[str, Tensor], dtypes: dict[str, torch.dtype]) -> dict[str, Tensor]:
    """`values` in the namespace's dtypes, as transformers loads them into a model of these."""
    return {name: value.to(dtypes[name]) for name, value in values.items()}


class _Saver:
    """Saves what has been put, now and then; one save at a time, beside the puts. A save that is still under way when the next is
    due is waited for: so an attempt can lose no more than what it puts in twice that time."""

    def __init__(self, initialization: Initialization, extra: bytes, clock: Clock, *, every_s: float) -> None:
        self._initialization = initialization
        self._extra = extra
        self._clock = clock
        self._every_s = every_s
        self._saved_s = clock.now_s()
        self._saving: Ticket[Result] | None = None

    def save_if_due(self) -> None:
        if self._clock.now_s() - self._saved_s < self._every_s:
            return
        self.settle()
        self._saving = self._initialization.save(self._extra)
        self._saved_s = self._clock.now_s()

    def settle(self, timeout_s: float | None = None) -> None:
        """Waits for the save under way. Raises its error."""
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.wait(timeout_s)

    @contextmanager
    def saving_what_is_there(self) -> Iterator[None]:
        """A block that, left by an error or an interrupt, saves once more, if that can be had in reasonable time."""
        try:
            yield
            self.settle()
        except BaseException:
            try:
                self._initialization.settle(timeout_s=LAST_SAVE_TIMEOUT_S)
                self.settle(LAST_SAVE_TIMEOUT_S)
                self._initialization.save(self._extra).wait(LAST_SAVE_TIMEOUT_S)
            except ParamStoreError:
                pass  # what was saved before it counts; the error that stopped the import is the one to tell
            raise


def check_schema(layout: ExpertLayout, namespace: Namespace) -> None:
    """Returns if the namespace holds the experts of `layout`. Raises SchemaMismatch naming what differs."""
    wanted = {tensor.name: tensor.shape for tensor in layout.tensors}
    schema = namespace.schema
    made = packed_tensors(schema) if is_packed(schema) else schema.part("param").fields
    found = {tensor.name: tensor.shape for tensor in made}
    if wanted != found:
        raise SchemaMismatch(f"namespace {namespace.name!r} has fields {found}, the model's experts have {wanted}")
    if (layout.layers, layout.experts) != (namespace.layers, namespace.experts):
        raise SchemaMismatch(
            f"namespace {namespace.name!r} has {namespace.experts} experts in layers {list(namespace.layers)}, the model has "
            f"{layout.experts} in layers {list(layout.layers)}"
        )


def packed_schema(path: str | os.PathLike[str], layout: ExpertLayout, model: nn.Module) -> Schema | None:
    """The schema of records that hold the experts of the checkpoint at `path` as they are, where these are quantized, else None.
    layout: of `model`, as for `import_checkpoint`. Raises CheckpointError naming file and tensor where they cannot be imported."""
    source = ExpertSource(model, layout, open_checkpoint(path))
    return source.schema if source.is_quantized else None


def _check_quantized(source: ExpertSource, namespace: Namespace) -> None:
    """Raises SchemaMismatch where quantized experts are to go where others are held, or the other way round."""
    schema = namespace.schema
    if (source.is_quantized or is_packed(schema)) and source.schema != schema:
        raise SchemaMismatch(
            f"the checkpoint's experts are {source.schema.specs}, namespace {namespace.name!r} holds {schema.specs}: quantized "
            "experts are kept as they are, in a namespace of their own schema"
        )


def check_imported(path: str | os.PathLike[str], namespace: Namespace, model: nn.Module) -> bool:
    """Returns whether the step a reader stands on is known to be, or to be trained from, the checkpoint at `path`. Raises
    CheckpointError if it is of another one.

    A step that was committed with `extra` bytes of the caller's own, and a directory that has no experts (the dense part of a
    trained model), tell nothing.
    """
    step = namespace.view_step
    assert step is not None, "a reader stands on a step"
    origin = Origin.from_extra(namespace.extra(step))
    if origin is None:
        return False
    try:
        with Files() as files:
            found = ExpertSource(model, find_layout(model), open_checkpoint(path)).fingerprint(files)
    except CheckpointError:
        return False
    if found != origin.fingerprint:
        if _is_same(origin.source, path):
            raise _another(
                f"namespace {namespace.name!r} holds, at step {step}, experts that were imported from {path} before the checkpoint "
                "there was replaced: it has others now. Give another name= to import those, or put the old checkpoint back"
            )
        raise _another(
            f"namespace {namespace.name!r} holds, at step {step}, the experts of another checkpoint than {path}: they were "
            f"imported from {origin.source}; give that path, or another name="
        )
    return True


def _check_same(extra: bytes | None, fingerprint: str, *, path: str | os.PathLike[str], name: str) -> None:
    """Raises CheckpointError if `extra`, of the values that are there, names another checkpoint, or no import."""
    if extra is None:
        return
    origin = Origin.from_extra(extra)
    if origin is None:
        raise CheckpointError(f"namespace {name!r} has values of an initialization that was no import: resume=False starts over")
    if origin.fingerprint != fingerprint and _is_same(origin.source, path):
        raise _another(
            f"the import of {name!r} from {path} was begun before the checkpoint there was replaced: it has other experts now. "
            "Give resume=False to start over with these, or put the old checkpoint back to go on"
        )
    if origin.fingerprint != fingerprint:
        raise _another(
            f"the import of {name!r} was begun with another checkpoint than {path} (with {origin.source}, fingerprint "
            f"{origin.fingerprint}; this one's is {fingerprint}): give that one to go on, or resume=False to start over"
        )


def _another(message: str) -> CheckpointError:
    error = CheckpointError(message)
    error.is_another = True
    return error


def _is_same(source: str, path: str | os.PathLike[str]) -> bool:
    """Whether an import's note names `path`."""
    return source in (str(path), _named(path))


def _named(path: str | os.PathLike[str]) -> str:
    """A checkpoint's directory wherever one looks from, or its id."""
    return os.path.abspath(path) if os.path.isdir(path) else str(path)
