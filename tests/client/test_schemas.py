"""Schemas as users make them: the same as the service's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import paramstore_client as ps

FIELDS = {"w": (8, 4)}
HOW: dict[str, Any] = {
    "param_dtype": torch.float16, "gradient_dtype": torch.float32, "updates": "exact", "state_dtype": "int8_blockwise",
}  # fmt: skip


@pytest.mark.parametrize("kind", ["adamw", "sgd", "adagrad"])
def test_a_training_schema_is_the_service_s_with_all_that_was_said(kind: str) -> None:
    make = getattr(ps, f"{kind}_schema")
    assert make(FIELDS) == ps.Schema.trained(kind, FIELDS)
    assert make(FIELDS, **HOW) == ps.Schema.trained(kind, FIELDS, **HOW) == getattr(ps.Schema, kind)(FIELDS, **HOW)
    assert make(FIELDS, **HOW) != make(FIELDS)


def test_a_param_schema_keeps_the_given_dtypes() -> None:
    assert ps.param_schema({"w": ((4,), torch.uint8)}) == ps.Schema.param({"w": ((4,), "uint8")})
