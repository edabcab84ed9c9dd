"""Opens the model of a checkpoint, its experts in the store of a run: planned first, imported once, closed again with the daemon
that was started for it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import paramstore_client as client
from paramstore.errors import CheckpointError, StoreUnavailable, WriterFenced
from paramstore.run.daemon import RunDaemon
from paramstore.run.home import Home
from paramstore.run.plan import budget_of, plan_of
from paramstore.run.store import look
from paramstore_client import hf
from paramstore_client.hf.checkpoint.progress import Progress, bar
from paramstore_client.hf.checkpoint.skeleton import skeleton
from paramstore_client.hf.checkpoint.tokenizers import load_tokenizer
from paramstore_client.hf.compat import modeling
from paramstore_client.hf.compat.quantization import quantized_parts
from paramstore_client.hf.loading.expert_memory import ExpertMemory
from paramstore_client.namespace import Namespace
from paramstore_client.tensors import DTYPES


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """How a model is opened. dtype: None for the checkpoint's. expert_memory: as `ps.hf.from_pretrained` takes it. host_budget: of
    a daemon that is started, as "64GiB". keeps: whether that stays."""

    dtype: str | None = None
    expert_memory: str | int | None = None
    host_budget: str | None = None
    keeps: bool = False


@dataclass(frozen=True, slots=True)
class RunModel:
    """A model of transformers that is served from `namespace` of `store`, and its tokenizer."""

    model: Any
    tokenizer: Any
    store: client.Store
    namespace: Namespace

    def bytes_read(self) -> int:
        """Bytes that the daemon has read from its volumes for this namespace."""
        return int(self.store.stats()["namespaces"][self.namespace.name]["bytes_read"])


def use_model(home: Home, settings: RunSettings, tell: Callable[[str], object], use: Callable[[RunModel], object]) -> None:
    """Has the model of `home` used by `use`, and closes it. tell: is given lines for people, the plan first.

    Raises CapacityError where the experts do not fit on the disk or in memory, before a daemon is started or anything is made;
    CheckpointError for a checkpoint that is damaged, has no tokenizer, or is another one than the store holds; UnsupportedModel for
    one that cannot be served, or takes Python of its own; WriterFenced while another run imports it, which goes on; and what
    `RunDaemon` and `ps.hf.from_pretrained` raise. What was imported until then stays, and is gone on from. No `with` of its
    callers: an interrupt would wait for the end of all that happens in an `__enter__`.
    """
    modeling.hush()
    memory = ExpertMemory.of(settings.expert_memory, "auto", mode="infer")
    bones = skeleton(home.checkpoint, dtype=settings.dtype, mode="infer")
    is_quantized = bool(quantized_parts(bones.config))
    layout, there = hf.find_layout(bones), look(home)
    budget_bytes = budget_of(bones, layout, asked=settings.host_budget, running_bytes=there.budget_bytes)
    plan = plan_of(home, layout, bones, is_quantized=is_quantized, memory=memory, budget_bytes=budget_bytes, there=there)
    plan.check()
    tokenizer = load_tokenizer(home.checkpoint)
    tell(plan.line())
    daemon = RunDaemon(
        home, host_budget=settings.host_budget, default_budget_bytes=budget_bytes, keeps=settings.keeps, tell=tell
    )  # fmt: skip
    with daemon as store:
        _check_nobody_imports(home, store)
        model = _load_model(settings, home, store)
        namespace = hf.namespace(model)
        try:
            use(RunModel(model, tokenizer, store, namespace))
        except StoreUnavailable as error:
            raise StoreUnavailable(f"the daemon of {home.directory} went away: give the same command again") from error
        finally:
            namespace.close()


def _check_nobody_imports(home: Home, store: client.Store) -> None:
    """Raises WriterFenced while another process imports these experts: opening their namespace would end its import."""
    found = store.stats()["namespaces"].get(home.namespace)
    if found is not None and found["committed_step"] is None and found["has_writer"]:
        raise WriterFenced(
            f"another run imports {home.checkpoint} into {home.directory} (namespace {home.namespace!r}), and goes on: give this "
            "command again when that has answered, or has ended"
        )


def _load_model(settings: RunSettings, home: Home, store: client.Store) -> Any:
    options: dict[str, Any] = {} if settings.dtype is None else {"dtype": DTYPES[settings.dtype]}
    try:
        with ExitStack() as shown:
            show = cache(partial(shown.enter_context, bar("import")))

            def report(progress: Progress) -> None:
                show()(progress)  # from the first expert on: mostly there is nothing to import

            return hf.from_pretrained(
                modeling.transformers().AutoModelForCausalLM, home.checkpoint, store=store, mode="infer", name=home.namespace,
                expert_memory=settings.expert_memory, progress=report, local_files_only=True, **options,
            ).eval()  # fmt: skip
    except CheckpointError as error:
        if not error.is_another:
            raise
        way_out = f", or after `rm -r {home.directory}`" if home.is_default else " or another --namespace"
        raise CheckpointError(
            f"{error}. Where {home.checkpoint} was replaced on purpose, its experts are imported anew with another --dir{way_out}"
        ) from error
