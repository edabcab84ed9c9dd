"""Every family and kernel computes bit for bit what the unmodified model computes, with all experts in a store."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from paramstore.core.key import ExpertKey
from paramstore.testing.memory_namespace import MemoryNamespace
from paramstore_client.hf.compat import modeling
from paramstore_testkit.training.moe_families import families, modeling_class, tiny_config
from paramstore_testkit.training.moe_models import FAMILIES, Twin, tokens

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread", "small_experts_lie_apart")]
"""The backward of the stock batched_mm adds in the order of its threads."""
NO_GRAPH = {"diffusion_gemma", "ernie4_5_vl_moe", "mistral_large4"}
"""Families that are not stored, and one whose unmodified model refuses grouped_mm."""


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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_experts_that_fit_are_used_where_they_lie_and_have_the_same_gradients(
    family: str, dtype: torch.dtype
) -> None:
    twin = Twin.of(tiny_config(family), kernel="grouped_mm", dtype=dtype)
    for seed in (1, 2):  # the second backward adds to the gradients of the first
        ids = tokens(seed=seed)
        expected = twin.stock(ids, labels=ids)
        expected.loss.backward()
        with Products(twin.namespace) as products:
            computed = twin.stored(ids, labels=ids)
            assert torch.equal(computed.logits, expected.logits)
            computed.loss.backward()
        assert products.leased_bytes == 2 * sum(products.of_experts.values()), "each matrix forward, and again backward"
        twin.check_gradients()
    assert not twin.namespace.leased


@pytest.mark.soak
@pytest.mark.parametrize("family", sorted({*families()} - NO_GRAPH))
def test_every_family_has_its_gradients_on_experts_where_they_lie(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paramstore_client.hf.model.compact_buffers.CompactBuffers.lent", None)
    twin = Twin.of(tiny_config(family), kernel="grouped_mm", dtype=torch.bfloat16, model_class=modeling_class(families()[family]))
    values = []
    for model in (twin.stock, twin.stored):
        torch.manual_seed(0)  # some routers add noise
        found = model(input_ids=tokens())
        values.append(found.logits if hasattr(found, "logits") else found.last_hidden_state)
        values[-1].float().square().sum().backward()
    assert torch.equal(*values)
    twin.check_gradients()


class Products(TorchDispatchMode):
    """Adds up the bytes of the matrices in leased memory that products read, and those of the experts that were leased; and finds
    copies of leased memory of more than a row."""

    def __init__(self, namespace: MemoryNamespace) -> None:
        super().__init__()
        self._namespace = namespace
        self.leased_bytes = 0
        self.of_experts: dict[ExpertKey, int] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__
        for tensor in (tensor for tensor in tree_leaves((args, kwargs)) if isinstance(tensor, Tensor) and tensor.dim() == 2):
            if self._is_leased(tensor):
                assert name in ("mm", "t", "transpose", "detach", "as_strided", "view", "alias"), f"{name} of a leased matrix"
                self.leased_bytes += tensor.nbytes if name == "mm" else 0
        return function(*args, **(kwargs or {}))

    def _is_leased(self, tensor: Tensor) -> bool:
        is_leased = False
        for lease in [lease for lease in self._namespace.leased if not lease.is_released]:
            for key in lease.keys():  # noqa: SIM118  # it has no __iter__
                fields = [value for value in lease[key].values() if value.dim() == 2]
                self.of_experts[key] = sum(value.nbytes for value in fields)
                is_leased |= any(0 <= tensor.data_ptr() - value.data_ptr() < value.nbytes for value in fields)
        return is_leased
