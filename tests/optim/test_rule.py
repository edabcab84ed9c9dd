"""The interface of one file for another optimizer: a function, options with states, and nothing else."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from paramstore.core.optimizers import SGD
from paramstore.core.schema import STATE_DTYPES, Schema
from paramstore.optim import update as update_module
from paramstore.optim.rule import Rule, Step
from paramstore.optim.update import update
from paramstore_testkit.oracles.optim_records import filled_record, gradient_image, part_tensor


def sign_step(master: Tensor, gradient: Tensor, states: Sequence[Tensor], made: Step, /) -> None:
    """Counts in its state how often it was called."""
    states[0].add_(1)
    if not made.is_missed:
        master.sub_(gradient.sign())


@pytest.mark.parametrize("state_dtype", STATE_DTYPES)
def test_another_rule_gets_fp32_chunks_ranks_missed_steps_and_param_for_nothing(
    monkeypatch: pytest.MonkeyPatch, state_dtype: str
) -> None:
    rule: Rule = sign_step
    monkeypatch.setattr(update_module, "RULES", {"sgd": rule})
    schema = Schema.sgd({"w": (5000,)}, gradient_dtype="bfloat16", state_dtype=state_dtype)
    image = filled_record(schema, {"w": torch.zeros(5000)})
    param = memoryview(bytearray(schema.part("param").image_bytes))
    ranks = [gradient_image(schema, {"w": torch.full((5000,), value)}) for value in (-3.0, 1.0)]
    update(schema, image, ranks, options=SGD(), optimizer_step=4, missed=[SGD()] * 3, param=param)
    assert (part_tensor(schema, "optim", image, "master/w") == 1.0).all()
    assert (part_tensor(schema, "param", param, "w") == 1.0).all()
    if state_dtype != "int8_blockwise":
        assert (part_tensor(schema, "optim", image, "momentum_buffer/w") == 4.0).all()
    else:
        assert (part_tensor(schema, "optim", image, "momentum_buffer/w") == 127).all()
        assert (part_tensor(schema, "optim", image, "momentum_buffer_scale/w") == 4.0).all()
