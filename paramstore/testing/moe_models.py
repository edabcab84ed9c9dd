"""Tiny random models of transformers, and the same with stored experts over a namespace in memory.

Their configs come without a network, their weights from a seed. `Twin` holds an unmodified model and a stored one with equal
weights, and compares what they compute, bit for bit.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from paramstore.core.key import ExpertKey
from paramstore.testing.memory_namespace import MemoryNamespace
from paramstore_client.hf import _compat, experts_function
from paramstore_client.hf.binding import ModelExperts, bind
from paramstore_client.hf.initial_experts import InitialExperts
from paramstore_client.hf.layout import ExpertLayout, find_layout
from paramstore_client.hf.stripping import stripped_class

VOCABULARY = 64
EXPERTS = 8

# Three experts a token: the order in which two are summed does not show.
_SMALL: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": VOCABULARY,
    "max_position_embeddings": 64, "num_experts_per_tok": 3, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_DEEPSEEK: dict[str, Any] = {
    "intermediate_size": 48, "moe_intermediate_size": 24, "n_routed_experts": EXPERTS, "n_shared_experts": 1,
    "first_k_dense_replace": 1, "kv_lora_rank": 16, "q_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8,
    "v_head_dim": 8, "n_group": 2, "topk_group": 1, "num_key_value_heads": 4, "num_hidden_layers": 3,
}  # fmt: skip
_QWEN: dict[str, Any] = {"intermediate_size": 48, "moe_intermediate_size": 24, "num_experts": EXPERTS}

FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {"intermediate_size": 48, "num_local_experts": EXPERTS},
    "qwen2_moe": {**_QWEN, "shared_expert_intermediate_size": 48},
    "qwen3_moe": {**_QWEN, "head_dim": 8},
    "qwen3_next": {
        **_QWEN, "shared_expert_intermediate_size": 24, "head_dim": 8, "linear_num_value_heads": 2, "linear_num_key_heads": 2,
        "linear_key_head_dim": 8, "linear_value_head_dim": 8, "layer_types": ["linear_attention", "full_attention"],
    },
    "olmoe": {"intermediate_size": 24, "num_experts": EXPERTS},
    "deepseek_v2": {**_DEEPSEEK, "n_group": 1},
    "deepseek_v3": _DEEPSEEK,
    "glm4_moe": {
        "intermediate_size": 48, "moe_intermediate_size": 24, "n_routed_experts": EXPERTS, "n_shared_experts": 1,
        "first_k_dense_replace": 1, "head_dim": 8, "n_group": 1, "topk_group": 1, "num_hidden_layers": 3,
    },
    "gpt_oss": {
        "intermediate_size": 24, "num_local_experts": EXPERTS, "head_dim": 8, "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
}  # fmt: skip
"""What makes a config of each family small."""


def tiny_config(family: str, **changes: Any) -> Any:
    """A config of `family` with EXPERTS experts in each of two layers."""
    return _compat.transformers().AutoConfig.for_model(family, **{**_SMALL, **FAMILIES[family], **changes})


@dataclass
class Twin:
    """stock: the unmodified model. stored: the same with experts in `namespace`. layout: of both."""

    stock: Any
    stored: Any
    namespace: MemoryNamespace
    layout: ExpertLayout
    anchor: Tensor

    @classmethod
    def of(
        cls, config: Any, *, kernel: str = "eager", lease_slots: int = 64, seed: int = 0, is_trained: bool = True,
        dtype: torch.dtype = torch.float32, model_class: Any = None, is_poisoned: bool = True,
    ) -> Twin:  # fmt: skip
        """Both models of one config, from one seed. kernel: what the stock model runs, and the stored one on its weights."""
        auto = _compat.transformers().AutoModelForCausalLM if model_class is None else model_class
        concrete = _compat.concrete_class(auto, config)
        torch.manual_seed(seed)
        stock = _compat.build(concrete, copy.deepcopy(config), experts_implementation=kernel, dtype=dtype)
        initial = InitialExperts(_compat.on_meta(concrete, copy.deepcopy(config)))
        experts_function.register()
        torch.manual_seed(seed)
        stripped = stripped_class(concrete, around=initial.building, before_strip=initial.settle)
        stored = _compat.build(stripped, copy.deepcopy(config), experts_implementation=experts_function.NAME, dtype=dtype)
        layout = find_layout(stored)
        schema = layout.schema("adamw" if is_trained else None, updates="touched")
        namespace = MemoryNamespace(schema, layers=layout.layers, experts=layout.experts, lease_slots=lease_slots)
        namespace.initialize(initial.values)
        anchor = torch.zeros((), requires_grad=True)
        joined = ModelExperts(namespace, anchor=(lambda layer: anchor) if is_trained else None, is_poisoned=is_poisoned)
        bind(stored, joined, kernel=kernel)
        return cls(stock, stored, namespace, layout, anchor)

    def expert_values(self, key: ExpertKey) -> Mapping[str, Tensor]:
        """One expert's tensors in the unmodified model, by field."""
        return {name: value.detach() for name, value in self._parameters(key).items()}

    def check_weights(self) -> None:
        """Asserts that both models start from equal weights."""
        reference = self.stock.state_dict()
        for name, value in self.stored.state_dict().items():
            assert torch.equal(value, reference[name]), f"dense weight {name} differs"
        for key in self.namespace.space:
            for name, value in self.namespace.values(key).items():
                assert torch.equal(value, self.expert_values(key)[name]), f"expert {key}, field {name} differs"

    def check_gradients(self) -> None:
        """Asserts that both models have equal gradients, and that experts that no token chose have none in the store."""
        reference = dict(self.stock.named_parameters())
        for name, parameter in self.stored.named_parameters():
            computed, expected = _whole(parameter.grad), _whole(reference[name].grad)
            assert (computed is None) == (expected is None), f"dense gradient {name}"
            assert computed is None or expected is None or torch.equal(computed, expected), f"dense gradient {name} differs"
        for key in self.namespace.space:
            pending = self.namespace.pending.get(key)
            for name, expected in self._gradients(key).items():
                if pending is None:
                    assert expected is None or not expected.any(), f"expert {key}, field {name}: its gradient was not pushed"
                else:
                    assert expected is not None, f"expert {key}, field {name}: a gradient that the model has not"
                    assert torch.equal(pending[name], expected), f"expert {key}, field {name}: gradients differ"

    def _parameters(self, key: ExpertKey) -> Mapping[str, Tensor]:
        layer, expert = key
        module: nn.Module = self.stock.get_submodule(self.layout.modules[layer])
        names = [tensor.name for tensor in self.layout.tensors]
        if isinstance(module, nn.ModuleDict):
            child = module.get_submodule(f"expert_{expert}")
            return {name: child.get_parameter(name) for name in names}
        return {name: module.get_parameter(name)[expert] for name in names}

    def _gradients(self, key: ExpertKey) -> Mapping[str, Tensor | None]:
        layer, expert = key
        module: nn.Module = self.stock.get_submodule(self.layout.modules[layer])
        names = [tensor.name for tensor in self.layout.tensors]
        if isinstance(module, nn.ModuleDict):
            child = module.get_submodule(f"expert_{expert}")
            return {name: child.get_parameter(name).grad for name in names}
        whole = {name: _whole(module.get_parameter(name).grad) for name in names}
        return {name: None if gradient is None else gradient[expert] for name, gradient in whole.items()}


def _whole(gradient: Tensor | None) -> Tensor | None:
    """A gradient that FSDP2 may have sharded."""
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


def tokens(*, seed: int = 1, batch: int = 2, length: int = 17) -> Tensor:
    """Random token ids [batch, length]."""
    return torch.randint(3, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))
