"""The dense part of a quantized checkpoint is dequantized by transformers, whatever its blocks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.quantizers import auto

from paramstore_client.hf.compat.quantization import WHOLE_BLOCKS, dequantize_dense
from paramstore_testkit.training.quantized_checkpoints import from_fp8, to_fp8

pytestmark = pytest.mark.slow  # imports transformers
NAME = "kv_a_proj_with_mqa.weight"


def test_the_dense_part_is_dequantized_wherever_it_is_configured() -> None:
    given = SimpleNamespace(to_dict=lambda: {"quant_method": "mxfp4"})
    text = SimpleNamespace(quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]})
    config = SimpleNamespace(sub_configs={"text_config": object}, text_config=text, quantization_config=given)
    assert dequantize_dense(config)
    assert config.quantization_config == {"quant_method": "mxfp4", "dequantize": True}
    assert text.quantization_config == {"quant_method": WHOLE_BLOCKS, "weight_block_size": [128, 128], "dequantize": True}
    assert not dequantize_dense(plain := SimpleNamespace())
    assert vars(plain) == {}


@pytest.mark.parametrize("shape", [(576, 256), (128, 200), (1, 1), (256, 128)])
def test_matrices_that_blocks_do_not_divide_have_the_products_of_their_elements(shape: tuple[int, int]) -> None:
    packed = to_fp8({NAME: torch.randn(shape, generator=torch.Generator().manual_seed(5))})
    made = dequantized(packed[NAME], packed[f"{NAME}_scale_inv"])
    assert made.is_contiguous()
    assert torch.equal(made, from_fp8(packed)[NAME])


def test_scales_that_fit_no_blocks_are_refused() -> None:
    with pytest.raises(ValueError, match="not divisible by scale grid"):
        dequantized(torch.zeros(576, 256).to(torch.float8_e4m3fn), torch.ones(7, 2))


def dequantized(weight: Tensor, scales: Tensor) -> Tensor:
    """What a load makes of one matrix."""
    config = SimpleNamespace(quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]})
    dequantize_dense(config)
    quantizer = auto.AutoHfQuantizer.from_config(config.quantization_config, pre_quantized=True)
    operation: Any = quantizer.get_load_operations()["dequantize"](quantizer)
    made: Tensor = operation._dequantize_one(weight, scales, output_dtype=torch.bfloat16)
    return made
