"""Every family of the installed transformers' experts registry, as its users meet it: made anew, exported, loaded back, trained,
exported again and served, beside the unmodified model. A new family fails here until it is supported or refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import paramstore as ps
from paramstore.core.trace import TraceEventKind
from paramstore.errors import UnsupportedModel
from paramstore_client.hf import find_layout
from paramstore_client.hf.compat import modeling
from paramstore_client.hf.export_checkpoint import export_checkpoint
from paramstore_testkit.processes.forked_daemon import ForkedDaemon
from paramstore_testkit.training.moe_families import families, modeling_class, tiny_config
from paramstore_testkit.training.moe_models import tokens, watch_routers
from paramstore_testkit.training.parity import Comparison, Reference, Stored, Trial
from paramstore_testkit.training.saved_models import check_equal_files

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]

FAMILIES = families()
REFUSED = {
    "diffusion_gemma": "tied weights",
    "ernie4_5_vl_moe": "two kinds of experts in one layer",
}
"""Family -> part of the reason. Every other one is supported."""
ALWAYS = (
    "mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss", "glm4v_moe", "jamba", "nemotron_h", "phimoe",
    "qwen3_vl_moe",  # its conversion looks at the shape of the parameter
    "qwen3_omni_moe",  # its experts are initialised from the block around them
)  # fmt: skip
"""Those that every run of the tests trains; the others, and fp32, are for `make soak`."""
STEPS = 3
BUDGETS = ("--host-budget", "16MiB", "--volume-size", "64MiB")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ps.Store]:
    """Of a daemon for each family: a store has notes for some twenty namespaces."""
    with ForkedDaemon(tmp_path / "store", *BUDGETS) as daemon, ps.connect(daemon.address) as store:
        yield store


def stock_model(family: str, dtype: torch.dtype) -> Any:
    torch.manual_seed(5)
    return modeling.build(modeling_class(FAMILIES[family]), tiny_config(family), dtype=dtype)


def trainings() -> list[Any]:
    marks = {(family, torch.bfloat16): () for family in ALWAYS}
    supported = [family for family in FAMILIES if family not in REFUSED]
    cases = [(family, dtype) for family in supported for dtype in (torch.bfloat16, torch.float32)]
    return [pytest.param(*case, marks=marks.get(case, pytest.mark.soak), id=f"{case[0]}-{case[1]}") for case in cases]


@pytest.mark.parametrize(("family", "dtype"), trainings())
def test_family_has_the_bits_of_the_unmodified_model(family: str, dtype: torch.dtype, store: ps.Store, tmp_path: Path) -> None:
    model_class = modeling_class(FAMILIES[family])
    given: dict[str, Any] = {"store": store, "mode": "infer", "dtype": dtype, "experts_kernel": "eager"}

    stock_model(family, dtype).save_pretrained(tmp_path / "stock")
    torch.manual_seed(5)
    new = ps.hf.from_config(model_class, tiny_config(family), name="new", **given)
    export_checkpoint(new, tmp_path / "new", namespace=ps.hf.namespace(new))
    check_equal_files(tmp_path / "stock", tmp_path / "new")

    common: dict[str, Any] = {"kernel": "eager", "dtype": dtype, "steps": STEPS}
    ours = Stored(tmp_path / "new", store=store, name="trained", **common)
    beside = Comparison(Reference(tmp_path / "stock", has_masters=dtype != torch.float32, **common))
    trial = Trial(ours, {"stock": beside})
    trial.run([tokens(seed=seed) for seed in range(STEPS)], commit_every=STEPS)
    trial.compare(tokens(seed=STEPS))
    assert beside.is_equal, {name: found.figures() for name, found in beside.differences.items()}

    reference = beside.reference.model
    reference.save_pretrained(tmp_path / "stock-trained")
    export_checkpoint(ours.model, tmp_path / "trained")
    check_equal_files(tmp_path / "stock-trained", tmp_path / "trained")

    served = ps.hf.from_pretrained(model_class, tmp_path / "trained", name="served", **given)
    if reference.can_generate():
        options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
        made = [model.eval().generate(tokens(seed=9, length=5), **options) for model in (reference, served)]
        assert torch.equal(*made)


@pytest.mark.soak  # of serving, tests/end_to_end/test_served_families.py shows the same
@pytest.mark.parametrize("family", sorted({*FAMILIES} - REFUSED.keys()))
def test_family_in_training_is_recorded_as_its_routers_choose(family: str, store: ps.Store) -> None:
    acquire, push = TraceEventKind.ACQUIRE, TraceEventKind.PUSH
    model = ps.hf.from_config(modeling_class(FAMILIES[family]), tiny_config(family), store=store, name="recorded")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ps.hf.experts(model).attach(optimizer)
    routed, layers = watch_routers(model), list(ps.hf.namespace(model).layers)
    with ps.hf.recording(model) as recording:
        model(input_ids=tokens(), labels=tokens()).loss.backward()
        optimizer.step()
    events = recording.recorded().events
    assert [event.layer for event in routed] == layers
    assert list(events[: len(layers)]) == routed
    backward = [event for event in events[len(layers) :] if event.kind is acquire]
    assert sorted(backward, key=lambda event: event.layer) == routed
    assert [(event.layer, event.experts) for event in events if event.kind is push] == [
        (event.layer, event.experts) for event in backward
    ]


@pytest.mark.parametrize("family", FAMILIES)
def test_family_is_supported_or_refused_with_its_reason(family: str) -> None:
    network = modeling.on_meta(modeling_class(FAMILIES[family]), tiny_config(family))
    if family in REFUSED:
        with pytest.raises(UnsupportedModel, match=REFUSED[family]):
            find_layout(network)
    else:
        assert find_layout(network).schema("adamw").is_trainable


@pytest.mark.parametrize("family", REFUSED)
def test_refused_family_is_refused_before_anything_is_made(family: str, store: ps.Store, tmp_path: Path) -> None:
    model_class = modeling_class(FAMILIES[family])
    with pytest.raises(UnsupportedModel, match=REFUSED[family]):
        ps.hf.from_config(model_class, tiny_config(family), store=store)
    stock = stock_model(family, torch.float32)
    stock.save_pretrained(tmp_path / "stock")
    with pytest.raises(UnsupportedModel, match=REFUSED[family]):
        ps.hf.from_pretrained(model_class, tmp_path / "stock", store=store)
    assert not store.namespaces()
    schema = ps.Schema.param({"weight": ((2,), torch.float32)})
    other = store.create_namespace("other", schema, layers=[0], experts=1)
    with pytest.raises(UnsupportedModel, match=REFUSED[family]):
        export_checkpoint(stock, tmp_path / "out", namespace=other)
    assert not (tmp_path / "out").exists()


def test_lists_name_no_family_that_is_gone() -> None:
    assert {*REFUSED, *ALWAYS} <= FAMILIES.keys()


def test_page_counts_the_families_of_its_version() -> None:
    page = (Path(__file__).resolve().parents[3] / "docs" / "transformers.md").read_text()
    found = re.search(r"of the (\d+) families of transformers (\S+),\s+(\d+) are supported", page)
    assert found is not None
    if found[2] != modeling.transformers().__version__:
        pytest.skip(f"the page counts those of {found[2]}")
    assert (int(found[1]), int(found[3])) == (len(FAMILIES), len(FAMILIES.keys() - REFUSED.keys()))
