"""What is relied on of transformers' key/value caches: a forward that was abandoned has written to some of their layers.

| name | status | seen the same in |
|---|---|---|
| `past_key_values=`, later `cache=`, an argument of a model's forward | documented | 5.7 - 5.24 |
| `Cache.layers`, `EncoderDecoderCache.self_attention_cache` | documented | 5.24 |
| classes of `cache_utils` and of continuous batching: `crop` takes back all they hold, or they say so | de facto | 5.24 |
| a layer's `get_seq_length()`, `crop(-tokens)`, `is_croppable` | documented; static layers have `crop` since 5.24 | 5.24 |
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from inspect import signature
from typing import Any

from torch import Tensor

NAMES = ("cache", "past_key_values")
KNOWN = ("transformers.cache_utils", "transformers.generation.continuous_batching.cache")
"""Modules whose caches and layers are known to hold nothing that `crop` leaves behind. Those of single models may: MiniMax's has a
recurrent state beside its layers, layers of DeepSeek-V4 compress what they are given."""


def name_in(forward: Callable[..., Any]) -> str:
    """The name under which a model's forward takes its cache."""
    return next(name for name in NAMES if name in signature(forward).parameters)


def cache_of(arguments: Mapping[str, Any]) -> Any:
    """The cache among the arguments of a forward; None without one."""
    cache = next((arguments[name] for name in NAMES if arguments.get(name) is not None), None)
    return getattr(cache, "self_attention_cache", cache)


def lengths(cache: Any) -> list[Any]:
    """Tokens in each layer, to compare with later: numbers, or tensors where reading one would wait for a device. Empty for a cache
    whose entries have places of their own, as that of continuous batching: writing them again puts them there again."""
    return [_length(layer) for layer in getattr(cache, "layers", ())]


def crop(cache: Any, before: list[Any]) -> str | None:
    """Takes each layer back to `before`, what `lengths` gave. Returns None, or why a layer cannot be taken back: then the cache is
    of no use any more."""
    if cache is None:
        return None
    if type(cache).__module__ not in KNOWN:
        return f"{type(cache).__name__} may hold more than its layers do"
    for index, layer in enumerate(getattr(cache, "layers", ())):
        earlier, now = before[index] if index < len(before) else 0, _length(layer)
        if earlier is None or now is None:
            return f"{type(layer).__name__} of layer {index} holds a state that has no length"
        added = int(now) - int(earlier)
        if added == 0:
            continue
        if type(layer).__module__ not in KNOWN:
            return f"{type(layer).__name__} of layer {index} may hold more than keys and values"
        if not getattr(layer, "is_croppable", True):
            return f"{type(layer).__name__} of layer {index} has passed its window"
        try:
            layer.crop(-added)
        except (AttributeError, NotImplementedError, RuntimeError, ValueError) as error:
            return f"{type(layer).__name__} of layer {index} cannot be cropped: {error}"
    return None


def _length(layer: Any) -> Any:
    """Tokens in a layer: a number, or a tensor of its own; None where the layer has no such thing."""
    if not hasattr(layer, "get_seq_length"):
        return None
    length = layer.get_seq_length()
    return length.clone() if isinstance(length, Tensor) else length
