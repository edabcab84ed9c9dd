"""Caches of abandoned forwards: taken back to the bit, in every family that is served, or refused with the reason."""

from __future__ import annotations

import copy
from functools import wraps
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paramstore_client.hf.compat import caches, modeling
from paramstore_client.hf.model.layout import experts_modules
from paramstore_testkit.training.moe_families import families, modeling_class, tiny_config
from paramstore_testkit.training.moe_models import tokens

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]

FAMILIES = families()
REFUSED = {"diffusion_gemma", "ernie4_5_vl_moe"}
ALWAYS = ("mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss", "olmoe", "jamba", "minimax", "qwen3_next")
"""Those that every run of the tests looks at; the others are for `make soak`."""
NOT_CROPPED = {"jamba": "Linear", "minimax": "MiniMaxCache", "qwen3_next": "Linear"}
"""Of ALWAYS: families whose caches are refused, and what the reason names."""


class Abandoned(Exception):
    """What cuts a forward off."""


def served() -> list[Any]:
    return [
        pytest.param(family, marks=() if family in ALWAYS else pytest.mark.soak) for family in sorted({*FAMILIES} - REFUSED)
    ]


def abandon(model: nn.Module, ids: Tensor, cache: Any) -> None:
    """A forward that ends before the last layer's experts: the layers before it have grown, and its own attention."""
    *_, last = experts_modules(model).values()

    def cut_off(*_: Any) -> None:
        raise Abandoned

    hook = last.register_forward_pre_hook(cut_off)
    try:
        with pytest.raises(Abandoned):
            model(input_ids=ids, **{caches.name_in(model.forward): cache}, use_cache=True)
    finally:
        hook.remove()


@pytest.mark.parametrize("family", served())
def test_an_abandoned_token_is_taken_back_to_the_bit_or_the_reason_is_said(family: str) -> None:
    torch.manual_seed(0)
    model = modeling.build(modeling_class(FAMILIES[family]), tiny_config(family)).eval()
    prompt, token = tokens()[:1, :9], tokens(seed=2)[:1, :1]
    with torch.no_grad():
        first = model(input_ids=prompt, use_cache=True)
        cache = caches.cache_of({name: getattr(first, name, None) for name in caches.NAMES})
        if cache is None:
            pytest.skip("this family's class keeps no cache: it does not generate")
        untouched = copy.deepcopy(cache)
        before = caches.lengths(cache)
        abandon(model, token, cache)
        reason = caches.crop(cache, before)
        if family in ALWAYS:
            assert (reason is not None) == (family in NOT_CROPPED)
        if reason is not None:
            assert NOT_CROPPED.get(family, " ") in reason
            return
        expected = model(input_ids=token, **{caches.name_in(model.forward): untouched}, use_cache=True).logits
        assert torch.equal(model(input_ids=token, **{caches.name_in(model.forward): cache}, use_cache=True).logits, expected)


def test_a_cache_has_the_name_that_a_forward_knows_or_the_newer_one() -> None:
    def forward(self: object, input_ids: Tensor, past_key_values: object = None) -> None: ...

    def newer(self: object, input_ids: Tensor, past_key_values: object = None, cache: object = None) -> None: ...

    assert caches.name_in(forward) == "past_key_values"
    assert caches.name_in(wraps(newer)(lambda *arguments, **given: None)) == "cache"


def test_lists_name_no_family_that_is_gone() -> None:
    assert {*REFUSED, *ALWAYS} <= FAMILIES.keys()
    assert set(NOT_CROPPED) <= set(ALWAYS)


def test_a_forward_without_a_cache_needs_none() -> None:
    assert caches.cache_of({"input_ids": tokens()}) is None
    assert caches.lengths(None) == []
    assert caches.crop(None, []) is None
