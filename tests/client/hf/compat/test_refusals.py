from __future__ import annotations

from types import SimpleNamespace

import pytest

from paramstore.errors import UnsupportedModel
from paramstore_client.hf.compat.refusals import ARGUMENTS, check_arguments, check_config


@pytest.mark.parametrize("name", ARGUMENTS)
def test_argument_that_excludes_stored_experts_is_refused_with_its_reason(name: str) -> None:
    with pytest.raises(UnsupportedModel, match=name):
        check_arguments({name: "something"})


def test_other_arguments_pass() -> None:
    check_arguments({"dtype": "auto", "tp_plan": None, "trust_remote_code": False, "device_map": "cpu"})


@pytest.mark.parametrize("quantization", [{"quant_method": "fp8"}, SimpleNamespace(quant_method="mxfp4")])
def test_quantized_checkpoint_is_refused_with_advice(quantization: object) -> None:
    with pytest.raises(UnsupportedModel, match=r"(fp8|mxfp4).*dequantize=True"):
        check_config(SimpleNamespace(quantization_config=quantization))
    check_config(SimpleNamespace(quantization_config=quantization), mode="infer")


def test_other_quantization_is_refused_in_either_mode() -> None:
    config = SimpleNamespace(quantization_config={"quant_method": "gptq"})
    for mode in ("train", "infer"):
        with pytest.raises(UnsupportedModel, match=r"gptq.*fp8 and mxfp4 are served.*dequantize=True"):
            check_config(config, mode=mode)


def test_quantized_part_of_a_composite_model_is_refused() -> None:
    text = SimpleNamespace(quantization_config={"quant_method": "fp8"})
    with pytest.raises(UnsupportedModel, match="fp8"):
        check_config(SimpleNamespace(sub_configs={"text_config": object}, text_config=text))
