from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import paramstore_client as ps
from paramstore.errors import ConfigError, SchemaMismatch
from paramstore_client.nn import StoredExperts
from paramstore_client.training import bind
from paramstore_testkit.training.toy_moe import FIELDS, LAYERS, batch, make_stored


def test_a_bound_model_has_the_handle_and_one_child_more(namespace: ps.Namespace) -> None:
    model = make_stored(namespace)
    experts = bind(model, namespace)
    assert model.paramstore.experts is experts  # type: ignore[union-attr]
    assert "attached" not in repr(experts)
    assert model._ddp_params_and_buffers_to_ignore == ["paramstore.sentinel"]


def test_a_model_is_bound_once(namespace: ps.Namespace) -> None:
    model = make_stored(namespace)
    bind(model, namespace)
    with pytest.raises(ConfigError, match="bound once"):
        bind(model, namespace)


def test_a_model_under_fsdp1_is_refused(namespace: ps.Namespace) -> None:
    model = make_stored(namespace)
    model.head.weight._fsdp_flattened = True  # type: ignore[assignment]  # as FSDP1 marks what it has flattened
    with pytest.raises(ConfigError, match="FSDP1"):
        bind(model, namespace)


def test_a_reader_is_refused(namespace: ps.Namespace, store: ps.Store) -> None:
    with store.open_namespace(namespace.name) as reader, pytest.raises(ConfigError, match="needs 'write'"):
        bind(make_stored(reader), reader)


def test_a_namespace_without_states_is_refused(store: ps.Store) -> None:
    schema = ps.param_schema({name: (shape, "float32") for name, shape in FIELDS.items()})
    model = torch.nn.Linear(1, 1)
    with (
        store.create_namespace("frozen", schema, layers=LAYERS, experts=1) as frozen,
        pytest.raises(SchemaMismatch, match="without optimizer states"),
    ):
        bind(model, frozen)


def test_layers_of_another_namespace_are_refused(new_namespace: Callable[..., ps.Namespace]) -> None:
    with pytest.raises(ConfigError, match="layer 0 are not in this handle"):
        bind(make_stored(new_namespace()), new_namespace())


def test_layers_over_a_device_tier_are_bound(namespace: ps.Namespace) -> None:
    with ps.DeviceTier(namespace, slots=4, device="cpu") as tier:
        model = make_stored(namespace)
        for layer in model.layers:
            assert isinstance(layer, StoredExperts)
            layer.namespace = tier
        bind(model, namespace).attach(torch.optim.AdamW(model.parameters()))
        model(batch(0)).backward()
        assert model.paramstore.sentinel.grad.item() > 0  # type: ignore[union-attr]
