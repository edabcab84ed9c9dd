"""What a configuration says of quantized weights, and how transformers is had to dequantize those that it loads itself.

| name | status | seen the same in |
|---|---|---|
| `quantizers.auto.register_quantizer`, `register_quantization_config`, and the mappings that these add to | documented | 5.24.0 |
| `get_load_operations()` of the quantizer of fp8 | internal | 5.24.0 |
| `_dequantize_one(quantized, scales, output_dtype=)` of what it dequantizes with | internal | 5.24.0 |

Where the internal ones are missing, matrices that their blocks do not divide fail to load, as transformers has it.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

FP8 = "fp8"
BLOCK_SHAPE = (128, 128)
"""Of the blocks that share a scale, where a configuration does not say it: DeepSeek-V3's."""
WHOLE_BLOCKS = "paramstore_fp8"
"""The name under which transformers finds the quantizer below."""


def quantized_parts(config: Any) -> list[Any]:
    """The configuration, and those in it, that say that weights are quantized."""
    parts = (config, *(getattr(config, name, None) for name in getattr(config, "sub_configs", {})))
    return [part for part in parts if getattr(part, "quantization_config", None) is not None]


def method_of(part: Any) -> str:
    """The method of quantization that a part of a configuration names."""
    given = part.quantization_config
    method = (given if isinstance(given, Mapping) else vars(given)).get("quant_method")
    return str(getattr(method, "value", method))


def dequantize_dense(config: Any) -> bool:
    """Has transformers dequantize, as it loads, what it loads itself: the dense part. Whether anything is quantized."""
    for part in (parts := quantized_parts(config)):
        quantizer = {"quant_method": WHOLE_BLOCKS} if method_of(part) == FP8 and _register() else {}
        given = part.quantization_config
        said = given if isinstance(given, Mapping) else given.to_dict()
        part.quantization_config = {**said, "dequantize": True, **quantizer}
    return bool(parts)


@cache
def _register() -> bool:
    """Adds to transformers a quantizer of fp8 that takes matrices which their blocks do not divide, as DeepSeek-V3's
    `kv_a_proj_with_mqa` of 576 rows. Whether it could."""
    auto = importlib.import_module("transformers.quantizers.auto")
    quantizer, config = auto.AUTO_QUANTIZER_MAPPING.get(FP8), auto.AUTO_QUANTIZATION_CONFIG_MAPPING.get(FP8)
    if config is None or not hasattr(quantizer, "get_load_operations"):
        return False

    class Quantizer(quantizer):  # type: ignore[misc, valid-type]  # found above
        def get_load_operations(self) -> dict[str, Any]:
            found = super().get_load_operations()
            return {**found, "dequantize": _of_whole_blocks(found["dequantize"])}

    auto.register_quantization_config(WHOLE_BLOCKS)(config)
    auto.register_quantizer(WHOLE_BLOCKS)(Quantizer)
    return True


def _of_whole_blocks(operation: type[Any]) -> type[Any]:
    """The operation for matrices of any shape: the last blocks, where they are smaller, are made whole by zeros meanwhile."""

    class Dequantize(operation):  # type: ignore[misc]
        def _dequantize_one(self, quantized: Tensor, scales: Tensor, output_dtype: torch.dtype | None = None) -> Tensor:
            shape = quantized.shape[-2:]
            block = self.hf_quantizer.quantization_config.weight_block_size or BLOCK_SHAPE
            if tuple(scales.shape[-2:]) == tuple(-(-size // of) for size, of in zip(shape, block, strict=True)):
                (rows, columns), (block_rows, block_columns) = shape, block
                quantized = functional.pad(quantized.view(torch.uint8), (0, -columns % block_columns, 0, -rows % block_rows)).view(
                    quantized.dtype
                )
            made: Tensor = super()._dequantize_one(quantized, scales, output_dtype=output_dtype)
            return made[..., : shape[0], : shape[1]].contiguous()

    return Dequantize
