"""Decides where a served model's experts stand: leased in host memory, or in slots of the device that computes, and in how many.
Quantized experts stand in slots on the CPU too, unpacked: in memory of this process, beside the daemon's.

On a device without `expert_memory` they take what is free after the dense part, less the KV cache at the asked size and a reserve
for activations. None of it has ever run on a GPU.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from paramstore.core.arguments import wrong
from paramstore.core.schema import Schema, dtype_name
from paramstore.errors import CapacityError, ConfigError, UnsupportedModel
from paramstore_client.device.tier import DeviceTier
from paramstore_client.hf.compat import modeling
from paramstore_client.hf.loading.expert_memory import ExpertMemory
from paramstore_client.hf.loading.namespaces import LeaseBounds
from paramstore_client.hf.model.layout import ExpertLayout
from paramstore_client.host_memory import available_bytes
from paramstore_client.quantized.packed import is_packed, unpacked
from paramstore_client.source import HostSource

RESERVE_BYTES = 512 << 20
"""Least device memory that is left to activations, and to what CUDA's libraries allocate at first use."""
RESERVE_SHARE = 16
"""One of so many bytes of what is free is left to them, if that is more."""

UNPACKED_AT_ONCE = 5
"""Device memory that is left to unpacking, in experts as they are computed with: the packed image of one, and what torch makes on
its way, in float32 and int32, of its largest tensor."""

HOST_SHARE = 4
"""One of so many bytes of available host memory is for unpacked experts, where nobody says how much."""

CacheShape = tuple[int, int]
"""(sequences at once, tokens of each)."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ServedPlace:
    """The place of a model's experts. device: whose slots they stand in; None for leases in host memory. slots: how many stand;
    None for as many leases as the namespace is promised."""

    device: torch.device | None
    slots: int | None

    @classmethod
    def of(
        cls, model: nn.Module, layout: ExpertLayout, schema: Schema, memory: ExpertMemory, *, cache_shape: CacheShape | None,
        is_packed: bool = False,
    ) -> ServedPlace:  # fmt: skip
        """The place of a loaded model that is served. schema: of the experts that are computed with. is_packed: whether records
        hold them quantized: then they stand unpacked in slots, on the CPU too. Raises ConfigError, CapacityError where a device has
        no room, and UnsupportedModel for one that is spread over several devices."""
        key_count = len(layout.layers) * layout.experts
        slots = memory.slots_for(schema, key_count)
        device = device_of_experts(model, layout)
        if device.type == "cpu" and not is_packed:
            return cls(None, slots)
        image_bytes = schema.part("param").image_bytes
        if device.type == "cpu":
            return cls(device, slots or packed_slots(schema, key_count))
        if slots is None:
            config: Any = model.config
            shape = cache_shape or (1, config.get_text_config(decoder=True).max_position_embeddings)
            cache = cache_bytes(config, shape, itemsize=next(model.parameters()).itemsize)
            beside = UNPACKED_AT_ONCE * image_bytes if is_packed else 0
            slots = slots_that_fit(free_bytes(device) - beside, cache=cache, image_bytes=image_bytes, key_count=key_count)
        return cls(device, slots)

    def lease_bounds(self, least: int) -> LeaseBounds:
        """The leases to ask for where the caller asks for `least`: where it was said how many stand in host memory, these and no
        more. A device needs none to hold, copies end theirs."""
        if self.device is not None or self.slots is None:
            return least, None
        return (slots := max(least, self.slots)), slots


def packed_slots(schema: Schema, key_count: int) -> int:
    """How many quantized experts stand unpacked in host memory where nobody says how many. schema: of what is computed with."""
    return min(key_count, max(1, available_bytes() // HOST_SHARE // schema.part("param").image_bytes))


def check_shape(shape: CacheShape | None, *, mode: str) -> None:
    """Raises ConfigError for a `cache_shape` that is none, or in mode train."""
    if shape is None:
        return
    is_pair = isinstance(shape, Sequence) and len(shape) == 2 and all(type(size) is int and size > 0 for size in shape)
    if mode == "train" or not is_pair:
        raise wrong("cache_shape", shape, "for mode='infer', two whole numbers from 1 on: (sequences at once, tokens of each)")


def check_device_map(device_map: Any) -> None:
    """Raises ConfigError where `device_map` names a CUDA device that is not here, before anything is loaded."""
    for place in device_map.values() if isinstance(device_map, Mapping) else [device_map]:
        index = place if type(place) is int else _cuda_index(place)
        if index is not None and index >= (count := torch.cuda.device_count()):
            raise ConfigError(
                f"device_map={device_map!r}: torch {torch.__version__} finds {count} CUDA devices here"
                + ("" if count else "; device_map='cpu', or none, serves from host memory")
            )


def device_of_experts(model: nn.Module, layout: ExpertLayout) -> torch.device:
    """The one device of the modules around the experts. Raises UnsupportedModel where there are several, or they are offloaded."""
    devices = {_device_around(model, path) for path in layout.modules.values()}
    if len(devices) > 1 or any(device.type == "meta" for device in devices):
        found = ", ".join(sorted(str(device) for device in devices))
        raise UnsupportedModel(
            f"the layers with experts lie on {found}: served experts stand in the slots of one device. The dense part is small "
            "without them: give all of it to one, as device_map={'': 0} or {'': 'cpu'}"
        )
    return devices.pop()


def cache_bytes(config: Any, shape: CacheShape, *, itemsize: int) -> int:
    """Bytes of a KV cache of that shape, as the installed transformers allocates it: latent attention keeps its latents, or what
    all heads make of them, a sliding window its tokens. A layer of another kind, as linear attention, counts as one of attention,
    which is more but for a few tokens."""
    sequences, tokens = shape
    text = config.get_text_config(decoder=True)
    if latent := getattr(text, "kv_lora_rank", None):
        elements = latent + text.qk_rope_head_dim
        if not modeling.caches_latents():
            elements = text.num_attention_heads * (text.qk_nope_head_dim + text.qk_rope_head_dim + text.v_head_dim)
    else:
        heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
        elements = 2 * heads * (getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads)
    windows = modeling.attention_windows(text)
    return sum(sequences * min(tokens, window or tokens) * elements * itemsize for window in windows)


def slots_that_fit(free: int, *, cache: int, image_bytes: int, key_count: int) -> int:
    """How many experts of `image_bytes` fit into `free` bytes beside a KV cache of `cache` and the reserve, at most all. Raises
    CapacityError where there is no room for one."""
    room = free - cache - max(RESERVE_BYTES, free // RESERVE_SHARE)
    if room < image_bytes:
        raise CapacityError(
            f"{free} bytes of the device are free, the KV cache takes {cache}: no room for an expert of {image_bytes}. Give a "
            "smaller cache_shape=(sequences, tokens), or say with expert_memory how much the experts take"
        )
    return min(key_count, room // image_bytes)


def free_bytes(device: torch.device) -> int:
    """Bytes of a CUDA device that can be allocated now: what is free there, and what torch keeps for this process unused."""
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def make_tier(
    namespace: HostSource, slots: int, *, device: torch.device, policy: str, dtype: torch.dtype = torch.bfloat16
) -> DeviceTier:
    """A tier of `slots` slots, or of fewer where the device has no memory for them, which is logged. Raises CapacityError where it
    has none for one; then nothing is kept."""
    schema = namespace.schema
    asked, image_bytes = slots, (unpacked(schema, dtype_name(dtype)) if is_packed(schema) else schema).part("param").image_bytes
    while True:
        try:
            tier = DeviceTier(namespace, slots, device=device, policy=policy, dtype=dtype)
        except torch.OutOfMemoryError as error:
            if slots == 1:
                raise CapacityError(
                    f"{device} has no memory for one expert of {image_bytes} bytes: free some of it, or use another device"
                ) from error
            slots //= 2
        else:
            if slots < asked:
                _log.warning("%s has no memory for %d experts of %d bytes: %d stand there", device, asked, image_bytes, slots)
            return tier


def _cuda_index(place: Any) -> int | None:
    """The index of a CUDA device that is named so, 0 where it has none; None for any other place, and for ways to choose some."""
    try:
        device = torch.device(place)
    except (RuntimeError, TypeError):
        return None
    return (device.index or 0) if device.type == "cuda" else None


def _device_around(model: nn.Module, path: str) -> torch.device:
    """The device of the innermost module around `path` that has tensors of its own."""
    parts = path.split(".")
    around = (model.get_submodule(".".join(parts[:length])) for length in range(len(parts) - 1, -1, -1))
    tensors = (tensor for module in around for tensors in (module.parameters(), module.buffers()) for tensor in tensors)
    return next((tensor.device for tensor in tensors), torch.device("cpu"))
