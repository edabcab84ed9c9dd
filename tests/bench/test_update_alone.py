"""The update without the service does what the service's does."""

from __future__ import annotations

import pytest
import torch

from paramstore.bench.plan import RecordSize
from paramstore.bench.service.experts import adamw_schema
from paramstore.bench.update_alone import UpdateAlone
from paramstore.clock import MonotonicClock
from paramstore.optim.tensors import field_tensor


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_updates_every_record_and_makes_its_param(dtype: torch.dtype) -> None:
    schema = adamw_schema(RecordSize(256 << 10), dtype)
    alone = UpdateAlone(schema, 3, threads=2, clock=MonotonicClock())
    try:
        sample = alone.step()
        assert sample.work == 3 * sum(field.elements for field in schema.gradient_fields())
        images, params, _ = alone._cells
        for image, param in zip(images, params, strict=True):
            for master, made in zip(schema.stored.fields, schema.part("param").fields, strict=False):
                masters = field_tensor(image, master)
                assert masters.count_nonzero() > 0.99 * masters.numel()  # a gradient may be 0
                assert torch.equal(field_tensor(param, made), masters.to(dtype))
            del masters
    finally:
        del images, params, image, param
        alone.close()
