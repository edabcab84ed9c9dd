"""Joins a model with the namespace that holds its experts."""

from __future__ import annotations

from functools import partial

from torch import nn

from paramstore.core.arguments import instance
from paramstore.errors import ConfigError, SchemaMismatch
from paramstore_client.device.tier import DeviceTier
from paramstore_client.device.visit_order import declare_order
from paramstore_client.namespace import Namespace
from paramstore_client.nn.sharded import DDP_IGNORES, leave_out_of_ddp
from paramstore_client.nn.stored_experts import StoredExperts
from paramstore_client.training.experts import Experts
from paramstore_client.training.options import refuse_fsdp1
from paramstore_client.training.sentinel import CHILD_NAME, ExpertSentinel


def bind(model: nn.Module, namespace: Namespace) -> Experts:
    """Joins `model` with its experts in `namespace` and returns their handle. The model gets one more child, `paramstore`.

    The model's `StoredExperts`, if it has any, must be over `namespace`, or over a `DeviceTier` of it. Bind before DDP,
    `fully_shard` or `prepare` wrap the model. The service is told the order in which training steps visit the layers. Raises
    ConfigError for a reader's handle, a model that is bound, or one under FSDP1; SchemaMismatch for a namespace without optimizer
    states.
    """
    instance("model", model, nn.Module, "a torch module")
    instance("namespace", namespace, Namespace, "an open namespace")
    if namespace.mode != "write":
        raise ConfigError(f"bind: namespace {namespace.name!r} is open with mode={namespace.mode!r}; a training loop needs 'write'")
    if not namespace.schema.is_trainable:
        raise SchemaMismatch(f"bind: namespace {namespace.name!r} has schema {namespace.schema.kind!r}, without optimizer states")
    if hasattr(model, CHILD_NAME):
        raise ConfigError(f"bind: the model has a {CHILD_NAME!r} already: it is bound once, for good")
    refuse_fsdp1(model.parameters())
    layers = [module for module in model.modules() if isinstance(module, StoredExperts)]
    for layer in layers:
        source = layer.namespace.namespace if isinstance(layer.namespace, DeviceTier) else layer.namespace
        if source is not namespace:
            raise ConfigError(f"bind: the experts of layer {layer.layer} are not in this handle of {namespace.name!r}")
    declare_order(namespace)
    sentinel = ExpertSentinel()
    model.add_module(CHILD_NAME, sentinel)
    leave_out_of_ddp(model)
    setattr(model, DDP_IGNORES, [*getattr(model, DDP_IGNORES), f"{CHILD_NAME}.sentinel"])
    for layer in layers:
        layer.anchor = partial(sentinel.anchor, layer.layer)
    sentinel.experts = experts = Experts(namespace, sentinel, model)
    return experts
