"""Every name of transformers that this package relies on, with what is known of it. Nothing else imports transformers.

| name | status | seen the same in |
|---|---|---|
| `ALL_EXPERTS_FUNCTIONS.register`, `experts_implementation=` | documented; custom names are taken since 5.7 | 5.7 - 5.24 |
| the experts module: `num_experts`, `has_bias`, `is_transposed`, forward(x, top_k_index, top_k_weights) | de facto | 5.7 - 5.24 |
| `forward.__wrapped__`, the module's own loop ("eager") | functools.wraps in the decorator | 5.7 - 5.24 |
| `PreTrainedModel.get_correct_experts_implementation` | internal | 5.7 - 5.24 |
| `PreTrainedModel._from_config`, `._initialize_weights`, `._init_weights` | internal, called for every model | 5.7 - 5.24 |
| `PreTrainedModel._keys_to_ignore_on_load_unexpected` | internal; a list, later a set | 5.7 - 5.24 |
| `PreTrainedModel.all_tied_weights_keys` | internal, read by PEFT and accelerate; made by `post_init` | 5.7 - 5.24 |
| `auto_factory._get_model_class` | internal, called by AutoModel | 5.7 - 5.24 |
| `PreTrainedModel._optimize_model_for_decode` | internal; a context around decoding | 5.24 |
| `DynamicCache(config=).layers`, `.sliding_window` of a layer | de facto | 5.24 |
| what attention with latents gives to the cache: them, and before that the keys and values of all heads | de facto | 5.24; 5.7 |
| `TrainerCallback`, `TrainerState.stateful_callbacks`, `.best_model_checkpoint`, `trainer_state.json` | documented | 5.24 |
"""

from __future__ import annotations

import importlib
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from paramstore.errors import ConfigError, UnsupportedModel

FLOOR = (5, 7)
LATENTS_SINCE = (5, 24)
"""The version from which on a cache is known to hold latents."""
KERNELS = ("eager", "grouped_mm", "batched_mm")
"""The experts functions of transformers that run on compact weights."""
DTYPE_OPTIONS = ("dtype", "torch_dtype")
"""Arguments of from_pretrained that are the model's, though a configuration has them too."""
PLACE_OPTIONS = ("cache_dir", "revision", "token", "local_files_only", "subfolder", "force_download", "proxies")
"""Arguments of from_pretrained that say where the files are, the configuration's and the model's."""

ExpertsFunction = Callable[[Any, Tensor, Tensor, Tensor], Tensor]
"""(experts module, hidden_states [T, H], top_k_index [T, k], top_k_weights [T, k]) -> [T, H]."""

_patching = threading.Lock()


def transformers() -> Any:
    """The package transformers, its version checked. Raises ConfigError."""
    try:
        package = importlib.import_module("transformers")
    except ImportError as error:
        raise ConfigError("paramstore.hf needs transformers, 5.7 or newer: pip install transformers") from error
    if _numbers(package) < FLOOR:
        raise ConfigError(
            f"paramstore needs transformers>={FLOOR[0]}.{FLOOR[1]}, found {package.__version__}: older ones take no experts "
            "function of others"
        )
    return package


def hush() -> None:
    """Has transformers say only what went wrong: for commands, whose stderr is for their own lines."""
    logging = transformers().logging
    logging.set_verbosity_error()
    logging.disable_progress_bar()


def register_experts_function(name: str, function: ExpertsFunction) -> None:
    """Registers `function`: from here on `experts_implementation=name` means it. A second call does no harm."""
    transformers()
    importlib.import_module("transformers.integrations.moe").ALL_EXPERTS_FUNCTIONS.register(name, function)


def experts_function(name: str) -> ExpertsFunction:
    """A kernel of transformers, one of KERNELS but "eager"."""
    function: ExpertsFunction = importlib.import_module("transformers.integrations.moe").ALL_EXPERTS_FUNCTIONS[name]
    return function


def asks_for_addresses() -> bool:
    """Whether transformers' grouped_mm on the CPU asks a weight for its address: for kernels of a torch up to 2.10."""
    return _numbers(torch) <= (2, 10)


def is_experts_module(module: nn.Module) -> bool:
    """Whether `module` goes through the experts registry (decorator `use_experts_implementation`)."""
    known = all(hasattr(module, name) for name in ("num_experts", "has_bias", "is_transposed", "config"))
    return known and hasattr(type(module).forward, "__wrapped__")


def eager_forward(module: nn.Module) -> ExpertsFunction:
    """The module's own loop over experts, below the registry."""
    forward: ExpertsFunction = type(module).forward.__wrapped__  # type: ignore[attr-defined]  # is_experts_module has looked
    return forward


def preferred_kernel(model: nn.Module, requested: str | None) -> str:
    """The kernel that the model itself would run if `requested` were its `experts_implementation`."""
    name: str = model.get_correct_experts_implementation(requested)  # type: ignore[operator]
    return name


def load_config(model_class: Any, path: Any, **options: Any) -> tuple[Any, dict[str, Any]]:
    """(the configuration that `model_class.from_pretrained(path, **options)` would load, the options that are not part of it)."""
    loader = transformers().AutoConfig if hasattr(model_class, "_model_mapping") else model_class.config_class
    passed = {name: value for name, value in options.items() if name not in DTYPE_OPTIONS}
    config, unused = loader.from_pretrained(path, return_unused_kwargs=True, **passed)
    return config, {**unused, **{name: options[name] for name in (*DTYPE_OPTIONS, *PLACE_OPTIONS) if name in options}}


def config_of(model_class: type[Any], config: Any) -> Any:
    """`config`, or its text part where that is what `model_class` is built from: so an Auto class takes the text model alone."""
    text = getattr(config, "sub_configs", {}).get("text_config")
    return config.get_text_config() if text is not None and text == model_class.config_class else config


def damaged_file() -> type[Exception]:
    """What transformers passes on of a safetensors file that is cut off, or none."""
    found: type[Exception] = importlib.import_module("safetensors").SafetensorError
    return found


def concrete_class(model_class: Any, config: Any) -> type[Any]:
    """The modeling class that an Auto class would build from `config`, or `model_class` itself. Raises UnsupportedModel."""
    mapping = getattr(model_class, "_model_mapping", None)
    if mapping is None:
        found: type[Any] = model_class
    else:
        if type(config) not in mapping:
            raise UnsupportedModel(
                f"{model_class.__name__} knows no model of configuration {type(config).__name__}; name the modeling class itself"
            )
        found = importlib.import_module("transformers.models.auto.auto_factory")._get_model_class(config, mapping)
    if not found.__module__.startswith("transformers."):
        raise UnsupportedModel(
            f"{found.__module__}.{found.__name__} is code of its own: give its experts modules to transformers' "
            "@use_experts_implementation in a model of transformers, or store its experts with ps.nn.StoredExperts"
        )
    return found


def build(model_class: Any, config: Any, **options: Any) -> Any:
    """A model with new weights, as AutoModel.from_config builds it."""
    return model_class._from_config(config, **options)


@contextmanager
def initializing(before: Callable[[Any, nn.Module], Callable[[], None] | None]) -> Iterator[None]:
    """Within it, `before(owner, module)` is called when a model is about to give `module` its first weights by
    `owner._init_weights(module)`; what it returns is called afterwards. One thread at a time."""
    base = transformers().PreTrainedModel
    original = base._initialize_weights

    def observed(self: Any, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        after = before(self, module)
        try:
            return original(self, module, *args, **kwargs)
        finally:
            if after is not None:
                after()

    with _patching:
        base._initialize_weights = observed
        try:
            yield
        finally:
            base._initialize_weights = original


def expect_keys(model: Any, patterns: list[str]) -> None:
    """Silences the warning for checkpoint keys that match one of `patterns` and find no parameter."""
    known = model._keys_to_ignore_on_load_unexpected
    added = [*(known or ()), *patterns]
    model._keys_to_ignore_on_load_unexpected = set(added) if isinstance(known, set) else added


def tied_weights(model: nn.Module) -> dict[str, str]:
    """The parameters of `model` that are the same as another, by name, each with the other's name."""
    tied: dict[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
    return tied


def attention_windows(config: Any) -> list[int | None]:
    """The layers of a KV cache for a text configuration: how many tokens each keeps at most; None for all."""
    made = importlib.import_module("transformers.cache_utils").DynamicCache(config=config).layers
    windows = [getattr(layer, "sliding_window", None) for layer in made]
    return windows + [None] * (config.num_hidden_layers - len(windows))


def caches_latents() -> bool:
    """Whether attention with latents keeps these in its cache, and not the keys and values that it makes of them."""
    return _numbers(transformers()) >= LATENTS_SINCE


@contextmanager
def fixed_kernel(model: Any) -> Iterator[None]:
    """Within it, `generate` of an unmodified model keeps the experts kernel that the model has. By itself it decodes with
    batched_mm in place of grouped_mm wherever the model is not on the CPU. A model with stored experts always keeps its own."""
    model._optimize_model_for_decode = nullcontext
    try:
        yield
    finally:
        del model._optimize_model_for_decode


def on_meta(model_class: Any, config: Any) -> Any:
    """The model of `config` with every tensor on meta, without any memory."""
    with torch.device("meta"):
        return model_class(config)


def _numbers(package: Any) -> tuple[int, ...]:
    """The first two numbers of a package's version."""
    return tuple(int(number) for number in re.findall(r"\d+", package.__version__)[:2])
