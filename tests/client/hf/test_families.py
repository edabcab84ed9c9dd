"""Every family and kernel computes bit for bit what the unmodified model computes, with all experts in a store."""

from __future__ import annotations

import pytest
import torch

from paramstore_client.hf.compat import modeling
from paramstore_testkit.training.moe_families import tiny_config
from paramstore_testkit.training.moe_models import FAMILIES, Twin, tokens

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]
"""The backward of the stock batched_mm adds in the order of its threads."""


@pytest.mark.parametrize("kernel", modeling.KERNELS)
@pytest.mark.parametrize("family", FAMILIES)
def test_stored_model_equals_the_unmodified_one(family: str, kernel: str) -> None:
    twin = Twin.of(tiny_config(family), kernel=kernel, lease_slots=3)
    twin.check_weights()
    ids = tokens()
    expected = twin.stock(ids, labels=ids)
    try:
        expected.loss.backward()
    except RuntimeError as error:
        pytest.skip(f"the unmodified model cannot: {error}")
    computed = twin.stored(ids, labels=ids)
    assert torch.equal(computed.logits, expected.logits)
    computed.loss.backward()
    twin.check_gradients()
    assert not twin.namespace.leased
    assert len(twin.namespace.pending) > twin.namespace.lease_slots, "more experts were active than could be leased"
