"""Models of transformers whose experts are stored: loaded, or new from a config.

After either the model is of transformers' own class, its dense part loaded or initialised as always, its experts in a
namespace that is committed. `model.paramstore` is the one module that was added.
"""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from paramstore.core import arguments
from paramstore.core.key import check_name
from paramstore.core.optimizers import OPTIMIZERS
from paramstore.core.schema import UPDATE_RULES, Schema
from paramstore.errors import CheckpointError, ConfigError
from paramstore.policy.slot_visit import SlotCounts
from paramstore_client.client import Store
from paramstore_client.device.host_slots import HostSlots, standing
from paramstore_client.device.tier import DeviceTier
from paramstore_client.device.visit_order import declare_order
from paramstore_client.handle.given_heat import Heat
from paramstore_client.hf.checkpoint.shards import open_checkpoint
from paramstore_client.hf.compat import modeling
from paramstore_client.hf.compat.quantization import dequantize_dense
from paramstore_client.hf.compat.refusals import check_arguments, check_config
from paramstore_client.hf.loading import spinning_threads
from paramstore_client.hf.loading.checkpoint_source import CheckpointSource, Seen, directory_of
from paramstore_client.hf.loading.expert_memory import POLICIES, ExpertMemory
from paramstore_client.hf.loading.initial_experts import InitialExperts
from paramstore_client.hf.loading.namespaces import committed_schema, memory_slots, open_experts
from paramstore_client.hf.loading.newest_step import take_dense
from paramstore_client.hf.loading.served_place import CacheShape, ServedPlace, check_device_map, check_shape, make_tier
from paramstore_client.hf.model.binding import IMPLEMENTATION, bind, find_experts, register_experts_function
from paramstore_client.hf.model.early_loads import SpeculationFigures
from paramstore_client.hf.model.kernels import choose_kernel
from paramstore_client.hf.model.layer_experts import ModelExperts
from paramstore_client.hf.model.layout import ExpertLayout, find_layout
from paramstore_client.hf.model.module_list import check_parallel
from paramstore_client.hf.model.stripping import strip, stripped_class
from paramstore_client.namespace import Namespace, close_when_dropped
from paramstore_client.nn.parallel import Parallel
from paramstore_client.quantized.packed import is_packed
from paramstore_client.source import ExpertSource
from paramstore_client.training import Experts
from paramstore_client.training import bind as bind_training
from paramstore_client.training.sentinel import ExpertSentinel

ON_HOST = ServedPlace(None, None)
MODES = ("train", "infer")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Wanted:
    """The experts that a caller of `from_pretrained` or `from_config` asked for, by the names of their arguments. Raises
    ConfigError on one that is wrong whatever the model is."""

    store: Store
    mode: str
    optimizer: str
    updates: str
    experts_kernel: str
    min_lease_slots: int
    expert_memory: str | int | None
    residency: str
    cache_shape: CacheShape | None
    speculation: bool
    expert_parallel: Parallel | None
    schema_options: Mapping[str, Any] | None

    def __post_init__(self) -> None:
        arguments.whole_number("min_lease_slots", self.min_lease_slots)
        arguments.instance("store", self.store, Store, "the store that ps.connect(...) gave")
        arguments.choice("mode", self.mode, MODES)
        arguments.choice("optimizer", self.optimizer, tuple(OPTIMIZERS))
        arguments.choice("updates", self.updates, UPDATE_RULES)
        if self.schema_options is not None:
            arguments.mapping("schema_options", self.schema_options, "arguments of the schema function")
        ExpertMemory.of(self.expert_memory, self.residency, mode=self.mode)
        check_shape(self.cache_shape, mode=self.mode)
        arguments.flag("speculation", self.speculation)
        if self.expert_parallel is not None:
            arguments.instance("expert_parallel", self.expert_parallel, Parallel, "a ps.moe.ExpertParallel()")  # type: ignore[type-abstract]

    def give_experts(
        self, model: Any, name: str, requested: str, *, fill: Callable[[Namespace], object],
        look: Callable[[ExpertLayout], Schema | None] | None = None, check: Callable[[Namespace], object] | None = None,
    ) -> Namespace:  # fmt: skip
        """Joins a stripped model with its experts in the namespace `name`, which is made where there is none; gives it.

        requested: the experts kernel that the model would run by itself. look: called first where the namespace is still to be
        filled, and gives the schema of quantized experts; fill, check: as for `open_experts`. Raises as `from_pretrained`; nothing
        is left open then.
        """
        memory = ExpertMemory.of(self.expert_memory, self.residency, mode=self.mode)
        layout, trains = find_layout(model), self.mode == "train"
        if self.expert_parallel is not None:
            check_parallel(model, layout.modules.values())
        schema = layout.schema(self.optimizer if trains else None, updates=self.updates, **(self.schema_options or {}))
        kernel = choose_kernel(model, self.experts_kernel, requested)
        held = committed_schema(self.store, name)
        if held is None and look is not None:
            held = look(layout)
        quantized = held if held is not None and is_packed(held) and not trains else None
        place = ON_HOST if trains else ServedPlace.of(
            model, layout, schema, memory, cache_shape=self.cache_shape, is_packed=quantized is not None
        )  # fmt: skip
        schema = quantized or schema
        bounds = place.lease_bounds(int(self.min_lease_slots))
        with memory.named(place.slots):
            opened = open_experts(self.store, name, layout, schema, mode=self.mode, bounds=bounds, fill=fill, check=check)
        join(
            model, opened, kernel=kernel, place=place, policy=memory.policy, speculates=self.speculation,
            parallel=self.expert_parallel,
        )  # fmt: skip
        if not trains:
            close_when_dropped(opened)
            if place.device is None:
                spinning_threads.advise(memory_slots(self.store, name), len(opened.layers) * opened.experts)
        return opened


def from_pretrained(
    model_class: Any,
    path: str | os.PathLike[str],
    *,
    store: Store,
    mode: str = "train",
    name: str | None = None,
    optimizer: str = "adamw",
    updates: str = "exact",
    experts_kernel: str = "auto",
    min_lease_slots: int = 0,
    expert_memory: str | int | None = None,
    residency: str = "auto",
    cache_shape: tuple[int, int] | None = None,
    speculation: bool = True,
    expert_parallel: Parallel | None = None,
    schema_options: Mapping[str, Any] | None = None,
    progress: Any = None,
    heat: Heat | None = None,
    **options: Any,
) -> Any:
    """Loads what `model_class.from_pretrained(path, **options)` does, with its experts in the namespace `name` of `store`. As
    there, an option that is an attribute of the configuration (`num_labels`, `output_router_logits`) goes into it.

    model_class: an Auto class or a modeling class of transformers. mode: "train" opens the namespace as its writer, "infer" as a
    reader. A namespace that is not committed yet is made from the checkpoint first: for training with master weights and the
    states of `optimizer` ("adamw", "sgd", "adagrad"; `updates` as in the schema functions), for inference with the checkpoint's
    own bytes.
    In mode "infer" the dense weights are those of the experts' step where that names a whole file of them
    (`experts.commit(step, dense=...)`), else those of `path`; where these are known to be of another step, it warns.
    name: default the last part of `path`. experts_kernel: "auto", "eager", "grouped_mm", "batched_mm"; auto is what the
    model would run by itself, or the `experts_implementation` among the options. min_lease_slots: as for `open_namespace`.
    expert_memory: in mode "infer", how many experts stay leased across forwards, or their size, as in "12GiB": so many slots are
    asked for, and no more. Default: what the namespace is promised, and lent. Quantized experts stand in memory of this process,
    unpacked, by default in a quarter of what is available. Where `device_map` puts the dense part on a device,
    it is slots of that device's memory, by default all that is free beside a KV cache of cache_shape (sequences at once, tokens of
    each; default: one of the most tokens that the model takes). residency: which give way first, "auto", "ring" or "buffer".
    speculation: whether experts are loaded ahead by the next layer's router, run early, where not all of them can stand.
    expert_parallel: a `ps.moe.ExpertParallel`: each rank of the job computes the experts placed on it with the tokens of all; None:
    each computes what its own tokens choose.
    schema_options: further arguments of the schema function. progress, heat: as for `import_checkpoint`. See docs/transformers.md.

    Raises UnsupportedModel with the reason before anything is loaded, ConfigError, SchemaMismatch where the namespace holds
    other experts, CheckpointError where it still holds those imported from another checkpoint, where a file is missing, and where
    the checkpoint's experts are not the configuration's; no namespace is made then. Also what `create_namespace`, `open_namespace`
    and the import raise. Nothing is left open.
    """
    wanted = _Wanted(
        store=store, mode=mode, optimizer=optimizer, updates=updates, experts_kernel=experts_kernel,
        min_lease_slots=min_lease_slots, expert_memory=expert_memory, residency=residency, cache_shape=cache_shape,
        speculation=speculation, expert_parallel=expert_parallel, schema_options=schema_options,
    )  # fmt: skip
    _check(model_class, name)
    arguments.path("path", path)
    seen = Seen.of(path, options)
    loaded, requested, options, is_quantized = _load_dense(model_class, path, options, mode=mode)
    model = loaded[0] if isinstance(loaded, tuple) else loaded  # output_loading_info=True
    source = CheckpointSource(path, options, model, progress, heat, is_quantized)
    name = name or _name_of(path)
    opened = wanted.give_experts(model, name, requested, look=source.look, fill=source.fill, check=source.check)
    try:
        seen.check()
        if mode == "infer":
            take_dense(model, opened, path, is_imported_from=lambda: source.check(opened))
    except BaseException:
        opened.close()
        raise
    return loaded


def from_config(
    model_class: Any,
    config: Any,
    *,
    store: Store,
    mode: str = "train",
    name: str | None = None,
    optimizer: str = "adamw",
    updates: str = "exact",
    experts_kernel: str = "auto",
    min_lease_slots: int = 0,
    expert_memory: str | int | None = None,
    residency: str = "auto",
    cache_shape: tuple[int, int] | None = None,
    speculation: bool = True,
    expert_parallel: Parallel | None = None,
    schema_options: Mapping[str, Any] | None = None,
    **options: Any,
) -> Any:
    """Makes a new model as `model_class.from_config(config, **options)` does, with its experts in the namespace `name` of `store`.

    Experts are initialised on the CPU as the model's own `_init_weights` would, one layer in memory at a time; after equal
    `torch.manual_seed` dense and expert weights are bit for bit those of the unmodified model on the CPU. A committed namespace
    keeps its experts. name: default the config's model type. The rest, and the errors, are those of `from_pretrained`.
    """
    wanted = _Wanted(
        store=store, mode=mode, optimizer=optimizer, updates=updates, experts_kernel=experts_kernel,
        min_lease_slots=min_lease_slots, expert_memory=expert_memory, residency=residency, cache_shape=cache_shape,
        speculation=speculation, expert_parallel=expert_parallel, schema_options=schema_options,
    )  # fmt: skip
    _check(model_class, name)
    if not hasattr(config, "model_type"):
        raise arguments.wrong("config", config, "a configuration of transformers")
    check_arguments(options)
    check_config(config)
    concrete = modeling.concrete_class(model_class, config)
    config = copy.deepcopy(modeling.config_of(concrete, config))
    initial = InitialExperts(modeling.on_meta(concrete, copy.deepcopy(config)))
    register_experts_function()
    requested = options.pop("experts_implementation", None) or config._experts_implementation
    with initial.building():
        model = modeling.build(concrete, config, experts_implementation=IMPLEMENTATION, **options)
    initial.settle(model)
    strip(model)
    wanted.give_experts(model, name or config.model_type, requested, fill=lambda made: made.initialize(initial.values))
    return model


def experts(model: nn.Module) -> Experts:
    """The handle on the experts of a model that trains; the model may be wrapped. Raises ConfigError for another one."""
    for module in arguments.instance("model", model, nn.Module, "a torch module").modules():
        if isinstance(module, ExpertSentinel) and isinstance(module.experts, Experts):
            return module.experts
    raise ConfigError(
        f"{type(model).__name__} trains no stored experts: load it with ps.hf.from_pretrained or from_config, mode='train'; "
        "ps.hf.namespace(model) is the handle of one that was loaded with mode='infer'"
    )


def namespace(model: nn.Module) -> Namespace:
    """The open namespace of a model's experts, in either mode; `refresh()` moves a reader. Raises ConfigError for other models."""
    source = None if (stored := find_experts(model)) is None else stored.source
    if isinstance(source := source.namespace if isinstance(source, HostSlots | DeviceTier) else source, Namespace):
        return source
    raise _without_experts(model)


def counts(model: nn.Module) -> SlotCounts:
    """What was counted so far at the slots in which the experts of a served model stand, each use of an expert by a layer: `hits`
    were there when the layer began, `late` on their way, `misses` and `passed` were not; `loads` is how many were loaded, ahead or
    not, each one `param` image of the namespace's schema. On the CPU an interrupt begins the counts anew. Where several
    threads compute, a layer that finds the slots in use by others begins again; what it had asked for until then is counted too.

    Raises ConfigError for a model that has no slots: one that trains, or of a store that was connected with `debug=True`.
    """
    source = None if (stored := find_experts(model)) is None else stored.source
    if isinstance(source, HostSlots | DeviceTier):
        return replace(source.counts)
    raise ConfigError(f"{type(model).__name__} has no experts that stand in slots: load it with mode='infer', without debug=True")


def speculation(model: nn.Module) -> SpeculationFigures:
    """What guesses of the next layer's router have brought since the model was loaded. Raises ConfigError for other models."""
    if (stored := find_experts(model)) is None:
        raise _without_experts(model)
    return stored.early.figures


def _without_experts(model: nn.Module) -> ConfigError:
    return ConfigError(f"{type(model).__name__} has no stored experts: load it with ps.hf.from_pretrained or from_config")


def join(
    model: nn.Module, namespace: Namespace, *, kernel: str, place: ServedPlace = ON_HOST, policy: str = POLICIES["auto"],
    speculates: bool = True, parallel: Parallel | None = None,
) -> None:  # fmt: skip
    """Joins a stripped model with an open namespace, and declares the order of its visits. place, policy: of what stands for a
    reader. Raises SchemaMismatch, CapacityError where a device has no memory, and closes the namespace then."""
    trains = namespace.mode == "write"
    try:
        if trains:
            bind_training(model, namespace)
        else:
            declare_order(namespace)
        source: ExpertSource = namespace
        if place.device is not None:
            dtype = find_layout(model).tensors[0].dtype
            source = make_tier(namespace, place.slots or 1, device=place.device, policy=policy, dtype=dtype)
        elif not trains:
            source = standing(namespace, slots=place.slots, policy=policy)
        sentinel = next((child for child in model.children() if isinstance(child, ExpertSentinel)), None)
        anchor = None if sentinel is None else sentinel.anchor
        stored = ModelExperts(
            source, anchor=anchor, is_poisoned=namespace.is_debug, speculates=speculates, is_ring=policy == POLICIES["ring"],
            parallel=parallel,
        )
        bind(model, stored, kernel=kernel)
    except BaseException:
        namespace.close()
        raise


def _load_dense(
    model_class: Any, path: str | os.PathLike[str], options: dict[str, Any], *, mode: str
) -> tuple[Any, str, dict[str, Any], bool]:  # fmt: skip
    """Loads a checkpoint's model without its experts. Gives what `from_pretrained` of transformers returns, the experts kernel that
    the model would run by itself, the options that are left, and whether the checkpoint says that it is quantized. Raises
    CheckpointError, and UnsupportedModel before it loads."""
    check_arguments(options)
    check_device_map(options.get("device_map"))
    requested, config = options.pop("experts_implementation", None), options.pop("config", None)
    if config is None or isinstance(config, str | os.PathLike):
        config, options = modeling.load_config(model_class, config or path, **options)
    check_config(config, mode=mode)
    concrete = modeling.concrete_class(model_class, config)
    config = copy.deepcopy(modeling.config_of(concrete, config))  # it may be the caller's
    is_quantized = dequantize_dense(config)
    find_layout(modeling.on_meta(concrete, copy.deepcopy(config)))  # refuses before anything is loaded
    register_experts_function()
    requested = requested or config._experts_implementation
    try:
        loaded = stripped_class(concrete).from_pretrained(
            path, config=config, experts_implementation=IMPLEMENTATION, **options
        )
    except FileNotFoundError as error:  # a shard that the index names
        raise CheckpointError(f"{os.fspath(path)}: the checkpoint is not whole: {error}: fetch it again") from error
    except modeling.damaged_file() as error:
        try:
            open_checkpoint(directory_of(path, options))  # looks at each file, and names it
        except CheckpointError as named:
            raise named from error
        raise CheckpointError(f"{os.fspath(path)}: a file of the checkpoint is damaged: {error}: fetch it again") from error
    return loaded, requested, options, is_quantized


def _check(model_class: Any, name: str | None) -> None:
    """Raises ConfigError on a class that is none of transformers', or a name that no namespace can have."""
    if not hasattr(model_class, "from_pretrained"):
        raise arguments.wrong("model_class", model_class, "a class of transformers, as AutoModelForCausalLM")
    if name is not None:
        check_name(name)


def _name_of(path: str | os.PathLike[str]) -> str:
    """The name of a checkpoint's namespace: the last part of its path or hub name, with the characters that a name may have."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", os.path.basename(os.path.abspath(path)))[:64]
