"""The user's three lines, against a real daemon."""

from __future__ import annotations

import copy
import gc
import json
import logging
import re
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch._subclasses.fake_tensor import FakeTensor

import paramstore as ps
from paramstore.errors import CheckpointError, ConfigError, SchemaMismatch, UnsupportedModel
from paramstore_client.device.host_slots import HostSlots
from paramstore_client.device.standing_lease import StandingLease
from paramstore_client.hf.compat import modeling
from paramstore_client.hf.loading.expert_memory import POLICIES
from paramstore_client.hf.model.binding import layer_of
from paramstore_client.hf.model.layout import experts_modules
from paramstore_testkit.processes.forked_daemon import ForkedDaemon
from paramstore_testkit.training.moe_families import CHANGES, small_config, tiny_config
from paramstore_testkit.training.moe_models import tokens
from paramstore_testkit.training.parity import align

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    directory = tmp_path_factory.mktemp("hf") / "store"
    with ForkedDaemon(directory, "--host-budget", "64MiB", "--gradient-budget", "32MiB") as daemon:
        yield daemon.address


@pytest.fixture
def store(address: str) -> Iterator[ps.Store]:
    with ps.connect(address) as store:
        yield store


def auto() -> Any:
    return modeling.transformers().AutoModelForCausalLM


def stock_model(kernel: str = "eager") -> Any:
    torch.manual_seed(0)
    return auto().from_config(tiny_config("qwen3_moe"), experts_implementation=kernel)


def new_model(store: ps.Store, name: str, **options: Any) -> Any:
    torch.manual_seed(0)
    given = {"updates": "touched", "experts_implementation": "eager", **options}
    return ps.hf.from_config(auto(), tiny_config("qwen3_moe"), store=store, name=name, **given)


def test_models_that_read_have_the_lease_slots_that_they_ask_for(store: ps.Store, tmp_path: Path) -> None:
    new_model(store, "slots", mode="infer").save_pretrained(tmp_path)
    with ps.hf.namespace(new_model(store, "slots", mode="infer")) as usual:
        more = usual.lease_slots + 1
    with ps.hf.namespace(new_model(store, "slots", mode="infer", min_lease_slots=more)) as namespace:
        assert namespace.lease_slots == more
    loaded = ps.hf.from_pretrained(auto(), tmp_path, store=store, name="slots", mode="infer", min_lease_slots=more)
    assert ps.hf.namespace(loaded).lease_slots == more


def test_new_model_trains_as_the_unmodified_one(store: ps.Store) -> None:
    stock, model = stock_model(), new_model(store, "trains")
    assert type(model).__name__ == "Qwen3MoeForCausalLM"
    assert not [name for name, _ in model.named_parameters() if ".experts." in name]
    experts = ps.hf.experts(model)
    options = {"lr": 1e-2, "weight_decay": 0.0, "foreach": False, "fused": True}
    dense = torch.optim.AdamW([parameter for parameter in model.parameters() if parameter.requires_grad], **options)
    optimizer = torch.optim.AdamW(stock.parameters(), **options)
    experts.attach(dense)
    for index in range(3):
        ids = tokens(seed=index, length=40)
        losses = [network(ids, labels=ids).loss for network in (stock, model)]
        for value in losses:
            value.backward()
        if index == 0:
            assert torch.equal(*losses)
        torch.testing.assert_close(losses[1], losses[0], rtol=1e-2, atol=1e-2)
        for stepped in (optimizer, dense):
            stepped.step()
            stepped.zero_grad()
    experts.commit(1).wait()
    assert ps.hf.namespace(model).committed_step == 1


def test_saved_dense_part_and_the_namespace_make_the_model_again(store: ps.Store, tmp_path: Path) -> None:
    model = new_model(store, "saved")
    expected = model(tokens()).logits
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    assert not [name for name in saved if ".experts." in name or "paramstore" in name]
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["Qwen3MoeForCausalLM"]
    assert "paramstore" not in json.dumps(config)
    ps.hf.namespace(model).close()
    again = ps.hf.from_pretrained(
        auto(), tmp_path, store=store, name="saved", updates="touched", experts_kernel="eager", dtype=torch.float32
    )
    assert torch.equal(again(tokens()).logits, expected)


def test_reader_beside_the_writer_moves_when_it_refreshes(store: ps.Store, address: str, tmp_path: Path) -> None:
    model = new_model(store, "both")
    model.save_pretrained(tmp_path)
    with ps.connect(address) as other:
        reader = ps.hf.from_pretrained(auto(), tmp_path, store=other, name="both", mode="infer", experts_kernel="eager")
        with torch.no_grad():
            first = reader(tokens()).logits
            assert torch.equal(first, model(tokens()).logits)
        model(tokens(), labels=tokens()).loss.backward()
        ps.hf.experts(model).step(lr=0.1)
        ps.hf.experts(model).commit(1).wait()
        with torch.no_grad():
            assert torch.equal(reader(tokens()).logits, first)
            assert ps.hf.namespace(reader).refresh() == 1
            assert torch.equal(reader(tokens()).logits, model(tokens()).logits)
        with pytest.raises(ConfigError, match="mode='infer'"):
            ps.hf.experts(reader)


def test_whole_checkpoint_is_loaded_without_its_experts_and_without_complaint(
    store: ps.Store, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stock_model().save_pretrained(tmp_path)
    new_model(store, "whole").config.name_or_path = ""
    logging.getLogger("transformers").propagate = True
    with caplog.at_level(logging.INFO):
        model, info = ps.hf.from_pretrained(
            auto(), tmp_path, store=store, name="whole", updates="touched", experts_kernel="eager", output_loading_info=True
        )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert not info["mismatched_keys"]
    assert "UNEXPECTED" not in caplog.text
    assert torch.equal(model(tokens()).logits, stock_model()(tokens()).logits)


OVERRIDES: dict[str, Any] = {
    "output_router_logits": True, "use_cache": False, "attention_dropout": 0.5, "pad_token_id": 5, "tie_word_embeddings": True,
    "num_experts_per_tok": 1, "id2label": {0: "one", 1: "two", 2: "three"},
}  # fmt: skip


def test_options_that_are_attributes_of_the_configuration_go_into_it(store: ps.Store, tmp_path: Path) -> None:
    transformers = modeling.transformers()
    stock_model().save_pretrained(tmp_path)
    for option in OVERRIDES:
        given = {option: OVERRIDES[option]}
        stock = auto().from_pretrained(tmp_path, experts_implementation="eager", **given)
        model = ps.hf.from_pretrained(auto(), tmp_path, store=store, name="options", mode="infer", experts_kernel="eager", **given)
        assert getattr(model.config, option) == getattr(stock.config, option) == OVERRIDES[option]
        for network in (model, stock):
            align(network)
        assert torch.equal(model(tokens()).logits, stock(tokens()).logits), option
        ps.hf.namespace(model).close()
    torch.manual_seed(0)
    model = ps.hf.from_pretrained(
        transformers.AutoModelForSequenceClassification, tmp_path, store=store, name="options", mode="infer", num_labels=3
    )
    assert model.score.weight.shape[0] == model.config.num_labels == 3
    ps.hf.namespace(model).close()
    model = ps.hf.from_pretrained(  # a modeling class finds its configuration by itself
        transformers.Qwen3MoeForCausalLM, tmp_path, config=tmp_path, store=store, name="options", mode="infer", use_cache=False
    )
    assert model.config.use_cache is False
    ps.hf.namespace(model).close()


@pytest.mark.parametrize("model_class", ["AutoModelForCausalLM", "Qwen3MoeForCausalLM"])
def test_option_that_is_unknown_is_the_error_of_transformers_and_makes_nothing(
    store: ps.Store, tmp_path: Path, model_class: str
) -> None:
    stock_model().save_pretrained(tmp_path)
    loaded = getattr(modeling.transformers(), model_class)
    with pytest.raises(TypeError) as expected:
        loaded.from_pretrained(tmp_path, nonsense=1)
    with pytest.raises(TypeError, match=re.escape(str(expected.value))):
        ps.hf.from_pretrained(loaded, tmp_path, store=store, name="nonsense", nonsense=1)
    assert "nonsense" not in [known["name"] for known in store.namespaces()]


def test_text_model_of_a_composite_checkpoint_is_loaded_as_transformers_does(store: ps.Store, tmp_path: Path) -> None:
    composite = modeling.transformers().Qwen3_5MoeForConditionalGeneration
    torch.manual_seed(0)
    config = small_config(composite.config_class, text_config=CHANGES["qwen3_5_moe"])
    composite._from_config(config).save_pretrained(tmp_path)
    stock = auto().from_pretrained(tmp_path, experts_implementation="eager")
    model = ps.hf.from_pretrained(auto(), tmp_path, store=store, name="text", mode="infer", experts_kernel="eager")
    for network in (model, stock):
        align(network)
    assert type(model).__name__ == type(stock).__name__ == "Qwen3_5MoeForCausalLM"
    assert torch.equal(model(tokens()).logits, stock(tokens()).logits)


@pytest.mark.parametrize("family", ["qwen3_moe", "switch_transformers"])
def test_model_that_was_made_anew_keeps_no_layer_of_experts(store: ps.Store, family: str) -> None:
    transformers = modeling.transformers()
    if family == "qwen3_moe":
        model_class, config = transformers.Qwen3MoeForCausalLM, tiny_config(family)
    else:
        model_class = transformers.SwitchTransformersForConditionalGeneration
        config = model_class.config_class(d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, num_experts=8, vocab_size=64)
    gc.collect()
    before = storages()
    gc.disable()  # nothing is left to it
    try:
        model = ps.hf.from_config(model_class, config, store=store, name=f"kept-{family}", updates="touched")
        left = storages()
    finally:
        gc.enable()
    own = {tensor.untyped_storage().data_ptr() for tensor in [*model.parameters(), *model.buffers()]}
    layout = ps.hf.find_layout(model)
    kept = sum(size for place, size in left.items() if place not in own and place not in before)
    assert kept < layout.experts * layout.expert_elements * 4, "a layer is alive beside the model"


def storages() -> dict[int, int]:
    """The memory of all living dense tensors on the CPU: its address, its size in bytes."""
    living = [
        found for found in gc.get_objects()
        if issubclass(type(found), torch.Tensor) and not issubclass(type(found), FakeTensor)  # other tests have some
        and found.device.type == "cpu" and found.layout is torch.strided
    ]  # fmt: skip
    return {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in living}


@pytest.mark.parametrize("mode", ["train", "infer"])
def test_other_checkpoint_of_the_same_name_does_not_get_the_experts_of_the_first(
    store: ps.Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    for seed, folder in enumerate(("a", "b")):
        torch.manual_seed(seed)
        auto().from_config(tiny_config("qwen3_moe")).save_pretrained(tmp_path / folder / f"final-{mode}")
    first = tmp_path / "a" / f"final-{mode}"
    model = ps.hf.from_pretrained(auto(), first, store=store, mode=mode)
    with pytest.raises(CheckpointError, match=r"another checkpoint.*another name="):
        ps.hf.from_pretrained(auto(), tmp_path / "b" / f"final-{mode}", store=store, mode=mode)
    monkeypatch.chdir(first)
    again = ps.hf.from_pretrained(auto(), ".", store=store, mode="infer")  # the same one, and named so
    with torch.no_grad():
        assert torch.equal(again(tokens()).logits, model(tokens()).logits)
    ps.hf.namespace(model).close()


def test_a_checkpoint_that_was_replaced_is_said_to_be(store: ps.Store, tmp_path: Path) -> None:
    for seed in range(2):
        torch.manual_seed(seed)
        auto().from_config(tiny_config("qwen3_moe")).save_pretrained(tmp_path)
        if seed:
            with pytest.raises(CheckpointError, match=r"imported from .* before the checkpoint there was replaced.*another name="):
                ps.hf.from_pretrained(auto(), tmp_path, store=store, name="replaced", mode="infer")
        else:
            ps.hf.namespace(ps.hf.from_pretrained(auto(), tmp_path, store=store, name="replaced", mode="infer")).close()


@pytest.mark.parametrize("mode", ["train", "infer"])
def test_nor_once_the_first_was_trained(store: ps.Store, tmp_path: Path, mode: str) -> None:
    for seed, folder in enumerate(("a", "b")):
        torch.manual_seed(seed)
        auto().from_config(tiny_config("qwen3_moe")).save_pretrained(tmp_path / folder)
    name = f"trained-{mode}"
    model = ps.hf.from_pretrained(auto(), tmp_path / "a", store=store, name=name)
    for step in (1, 2):
        model(tokens(), labels=tokens()).loss.backward()
        ps.hf.experts(model).step(lr=0.1)
        ps.hf.experts(model).commit(step, b"my own" if step == 1 else b"").wait()
    with pytest.raises(CheckpointError, match=r"step 2, the experts of another checkpoint .* imported from .*/a;"):
        ps.hf.from_pretrained(auto(), tmp_path / "b", store=store, name=name, mode=mode)
    told = pytest.warns(UserWarning, match="step 2 names no dense weights") if mode == "infer" else nullcontext()
    with told:
        ps.hf.from_pretrained(auto(), tmp_path / "a", store=store, name=name, mode=mode)
    if mode == "infer":  # else the model was fenced by its like
        ps.hf.experts(model).commit(3, b"my own").wait()
    model.save_pretrained(tmp_path / "dense")
    ps.hf.from_pretrained(auto(), tmp_path / "dense", store=store, name=name, mode=mode)


def test_copy_of_a_model_that_trains_shares_its_experts(store: ps.Store) -> None:
    model = new_model(store, "copied")
    again = copy.deepcopy(model)
    again(tokens(), labels=tokens()).loss.backward()
    assert ps.hf.experts(again) is ps.hf.experts(model)
    assert ps.hf.experts(model).abort() > 0


def test_inference_schema_holds_the_models_own_bytes(store: ps.Store) -> None:
    model = new_model(store, "served", mode="infer")
    assert ps.hf.namespace(model).schema.kind == "param"
    with torch.no_grad():
        assert torch.equal(model(tokens()).logits, stock_model()(tokens()).logits)


def slots_of(model: Any) -> HostSlots:
    source = layer_of(next(iter(experts_modules(model).values()))).source
    assert isinstance(source, HostSlots)
    return source


@pytest.mark.parametrize("residency", POLICIES)
def test_a_served_model_keeps_the_experts_that_it_was_given_memory_for(residency: str, store: ps.Store) -> None:
    given: dict[str, Any] = {"mode": "infer", "expert_memory": 5, "residency": residency, "experts_implementation": "grouped_mm"}
    model, stock = new_model(store, f"memory-{residency}", **given), stock_model("grouped_mm")
    slots, namespace = slots_of(model), ps.hf.namespace(model)
    assert (slots.lease_slots, slots.namespace) == (5, namespace)
    assert namespace.lease_slots == 5, "no more than it was given memory for: the rest is others'"
    with torch.no_grad():
        for seed in range(4):
            prompt = tokens(seed=seed)[:1, :2]
            assert torch.equal(model(prompt).logits, stock(prompt).logits)
    assert slots.counts.evicted > 0


def test_as_many_models_fit_as_the_memory_that_they_name(address: str) -> None:
    with ps.connect(address) as store:
        expert_count = len(ps.hf.namespace(new_model(store, "shared", mode="infer")).keys())
    with ps.connect(address) as store:
        given: dict[str, Any] = {"mode": "infer", "expert_memory": expert_count // 4}
        models = [new_model(store, "shared", **given) for _ in range(4)]
        assert [ps.hf.namespace(model).lease_slots for model in models] == [expert_count // 4] * 4
        with torch.no_grad():
            logits = [model(tokens()).logits for model in models]
        assert all(torch.equal(logits[0], other) for other in logits)
        with pytest.raises(ps.CapacityError, match=r": expert_memory='64MiB' takes \d+ slots, but 0 of its") as told:
            new_model(store, "shared", mode="infer", expert_memory="64MiB")
        assert "min_lease_slots" not in str(told.value), "nobody said it"
        with pytest.raises(ps.CapacityError, match=r"a model that is served needs a lease slot: .* 0 of its"):
            new_model(store, "shared", mode="infer")
        with pytest.raises(ps.CapacityError, match=r"^namespace 'shared': min_lease_slots=1, but 0 of its"):
            new_model(store, "shared", mode="infer", min_lease_slots=1)


@pytest.mark.parametrize("given", [{"experts_implementation": "eager"}, {"experts_implementation": "grouped_mm"}])
def test_a_namespace_that_is_closed_while_the_last_expert_computes_ends_the_forward(
    store: ps.Store, given: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = new_model(store, "closed", mode="infer", expert_memory=1000, **given)
    namespace, end = ps.hf.namespace(model), StandingLease.__exit__
    experts = [module for module in model.modules() if type(module).__name__.endswith("Experts")]

    computed: list[object] = []
    experts[-1].act_fn.register_forward_hook(lambda *_: computed.append(1))

    def end_of_lease(lease: StandingLease, *error: Any) -> None:
        if computed:
            namespace.close()
        end(lease, *error)

    monkeypatch.setattr(StandingLease, "__exit__", end_of_lease)
    with torch.no_grad(), pytest.raises(ps.UnknownNamespace):
        model(tokens())


@pytest.fixture
def no_collector() -> Iterator[None]:
    """What is dropped goes at once or not at all."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collector")
def test_a_served_model_that_is_dropped_leaves_its_memory_to_the_next(store: ps.Store) -> None:
    given: dict[str, Any] = {"mode": "infer", "expert_memory": 1000, "experts_implementation": "grouped_mm"}
    model = new_model(store, "dropped", **given)
    promised = ps.hf.namespace(model).lease_slots
    with torch.no_grad():
        expected = model(tokens()).logits
    for _ in range(3):  # as a notebook does whose cell is run again
        del model
        model = new_model(store, "dropped", **given)
        assert ps.hf.namespace(model).lease_slots == promised
        with torch.no_grad():
            assert torch.equal(model(tokens()).logits, expected)
    kept = ps.hf.namespace(model)
    del model
    gc.collect()
    assert kept.acquire(kept.keys()[:1]).is_released is False, "the program has the handle"


def test_what_stands_gives_way_to_who_leases_through_the_handle_and_to_the_next_reader(address: str) -> None:
    with ps.connect(address) as store:
        model = new_model(store, "gives-way", mode="infer", expert_memory=1000, experts_implementation="grouped_mm")
        namespace = ps.hf.namespace(model)
        with torch.no_grad():
            expected = model(tokens()).logits
            with namespace.acquire(namespace.keys()[: namespace.lease_slots]) as lease:
                assert lease.keys()
            assert torch.equal(model(tokens()).logits, expected)
        most = namespace.lease_slots
    with ps.connect(address) as store, store.open_namespace("gives-way", min_lease_slots=most) as again:
        assert again.acquire(again.keys()[:most], timeout_s=5.0).is_released is False  # this process lives on, and holds nothing


@pytest.mark.parametrize("kernel", ["eager", "grouped_mm"])
def test_debug_store_sees_no_use_after_release(address: str, kernel: str) -> None:
    stock = stock_model(kernel)
    with ps.connect(address, debug=True) as store:
        model = new_model(store, f"debug-{kernel}", experts_implementation=kernel)
        values = [network(tokens(), labels=tokens()).loss for network in (stock, model)]
        assert torch.equal(*values)
        for value in values:
            value.backward()
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                assert torch.equal(parameter.grad, stock.get_parameter(name).grad), name
        ps.hf.experts(model).abort()


def test_namespace_of_other_experts_is_refused(store: ps.Store) -> None:
    model = new_model(store, "first")
    ps.hf.namespace(model).close()
    with pytest.raises(SchemaMismatch, match="name"):
        ps.hf.from_config(auto(), tiny_config("mixtral"), store=store, name="first", updates="touched")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"tp_plan": "auto"}, "tensor parallelism"),
        ({"trust_remote_code": True}, "trust_remote_code"),
        ({"gguf_file": "x.gguf"}, "GGUF"),
    ],
)
def test_arguments_that_shard_or_replace_experts_are_refused(store: ps.Store, options: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnsupportedModel, match=reason):
        ps.hf.from_pretrained(auto(), "nowhere", store=store, **options)


def test_unknown_mode_and_kernel_are_refused(store: ps.Store) -> None:
    with pytest.raises(ConfigError, match="'train' or 'infer'"):
        new_model(store, "mode", mode="serve")
    with pytest.raises(ConfigError, match="sonicmoe"):
        new_model(store, "kernel", experts_implementation="sonicmoe")


def test_model_without_stored_experts_has_no_handle() -> None:
    with pytest.raises(ConfigError, match="from_pretrained"):
        ps.hf.experts(stock_model())
    with pytest.raises(ConfigError, match="from_pretrained"):
        ps.hf.namespace(stock_model())
    with pytest.raises(ConfigError, match="mode='infer'"):
        ps.hf.counts(stock_model())


def test_a_model_whose_experts_do_not_stand_has_no_counts(store: ps.Store, address: str) -> None:
    with pytest.raises(ConfigError, match="no experts that stand in slots"):
        ps.hf.counts(new_model(store, "uncounted"))
    with ps.connect(address, debug=True) as debug, pytest.raises(ConfigError, match="without debug=True"):
        ps.hf.counts(new_model(debug, "uncounted", mode="infer"))
