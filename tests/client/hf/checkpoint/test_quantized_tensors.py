"""Checkpoints of fp8 and of mxfp4 are served as they are: the logits of the model that transformers makes of them, bit for bit."""

from __future__ import annotations

import gc
import json
import re
import sys
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import paramstore as ps
from paramstore.errors import CheckpointError, ConfigError, SchemaMismatch, UnsupportedModel
from paramstore_client.device.tier import DeviceTier
from paramstore_client.hf.checkpoint.recipes import ExpertSource
from paramstore_client.hf.checkpoint.shards import open_checkpoint
from paramstore_client.hf.checkpoint.skeleton import skeleton
from paramstore_client.hf.compat import modeling
from paramstore_client.hf.export_checkpoint import export_checkpoint
from paramstore_client.hf.model.binding import layer_of
from paramstore_client.hf.model.layout import experts_modules, find_layout
from paramstore_testkit.training.quantized_checkpoints import CHECKPOINTS, FILE, deepseek_checkpoint, deepseek_config, from_fp8

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]

LIMIT_S = 60.0
SLOTS = 16, 5, 1
"""All experts of both layers, some of them, one."""


@pytest.fixture(scope="module", params=CHECKPOINTS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return CHECKPOINTS[request.param](tmp_path_factory.mktemp("quantized") / request.param)


@pytest.fixture(scope="module")
def memory(checkpoint: Path) -> Any:
    """The model as transformers loads it, with the kernel that ours runs."""
    config = modeling.transformers().AutoConfig.from_pretrained(checkpoint)
    config.quantization_config["dequantize"] = True  # where there is a GPU it would not be
    options: dict[str, Any] = {"dtype": torch.bfloat16, "experts_implementation": "grouped_mm"}
    return auto().from_pretrained(checkpoint, config=config, **options).eval()


def auto() -> Any:
    return modeling.transformers().AutoModelForCausalLM


def tokens(count: int = 24) -> torch.Tensor:
    return torch.randint(128, (2, count), generator=torch.Generator().manual_seed(3))


def served(store: ps.Store, checkpoint: Path, **options: Any) -> Any:
    given = {"mode": "infer", "name": checkpoint.name, "dtype": torch.bfloat16, "experts_implementation": "grouped_mm", **options}
    return ps.hf.from_pretrained(auto(), checkpoint, store=store, **given).eval()


@pytest.fixture
def switching_often() -> Iterator[None]:
    """Threads take turns so often that a race is found."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.fixture
def model(store: ps.Store, checkpoint: Path, request: pytest.FixtureRequest) -> Iterator[Any]:
    made = served(store, checkpoint, expert_memory=getattr(request, "param", 5))
    with ps.hf.namespace(made):
        yield made


@pytest.mark.parametrize("model", SLOTS, indirect=True)
@torch.no_grad()
def test_logits_and_tokens_are_those_of_memory(model: Any, memory: Any) -> None:
    ids = tokens()
    assert torch.equal(model(input_ids=ids).logits, memory(input_ids=ids).logits)
    options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.generate(ids, **options), memory.generate(ids, **options))


@pytest.mark.parametrize("model", [5], indirect=True)
def test_threads_that_share_a_model_get_what_each_would_alone(model: Any, memory: Any, switching_often: None) -> None:
    prompts = [torch.randint(128, (1, 9), generator=torch.Generator().manual_seed(seed)) for seed in range(4)]
    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    expected = [memory.generate(ids, **options) for ids in prompts]
    with ThreadPoolExecutor(len(prompts)) as pool:
        for _ in range(3):
            made = list(pool.map(lambda ids: model.generate(ids, **options), prompts, timeout=LIMIT_S))
            assert all(torch.equal(*pair) for pair in zip(made, expected, strict=True))


@torch.no_grad()
def test_a_deepseek_whose_blocks_do_not_divide_its_dense_part_is_served(store: ps.Store, tmp_path: Path) -> None:
    checkpoint, plain = deepseek_checkpoint(tmp_path / "deepseek"), tmp_path / "plain"
    auto().from_config(deepseek_config(), dtype=torch.bfloat16).save_pretrained(plain)
    save_file(from_fp8(load_file(checkpoint / FILE)), plain / FILE, metadata={"format": "pt"})
    memory = auto().from_pretrained(plain, dtype=torch.bfloat16, experts_implementation="grouped_mm").eval()
    model = served(store, checkpoint, expert_memory=5)
    assert not hasattr(model.config, "quantization_config")
    with ps.hf.namespace(model):
        assert torch.equal(model(input_ids=tokens()).logits, memory(input_ids=tokens()).logits)
        assert [*model.state_dict()] == [name for name in memory.state_dict() if ".experts." not in name]


@torch.no_grad()
def test_another_dtype_is_what_transformers_makes_of_it(store: ps.Store, checkpoint: Path) -> None:
    config = modeling.transformers().AutoConfig.from_pretrained(checkpoint)
    config.quantization_config["dequantize"] = True
    options: dict[str, Any] = {"dtype": torch.float32, "experts_implementation": "grouped_mm"}
    memory = auto().from_pretrained(checkpoint, config=config, **options).eval()
    model = served(store, checkpoint, expert_memory=5, dtype=torch.float32)
    with ps.hf.namespace(model):
        assert torch.equal(model(input_ids=tokens()).logits, memory(input_ids=tokens()).logits)


def test_a_name_that_others_have_is_refused(
    model: Any, memory: Any, store: ps.Store, checkpoint: Path, tmp_path: Path
) -> None:  # fmt: skip
    other = CHECKPOINTS[checkpoint.name](tmp_path / "other", seed=1)
    with pytest.raises(CheckpointError, match="holds, at step 0, the experts of another checkpoint than"):
        served(store, other, name=checkpoint.name)
    plain = auto().from_config(memory.config)
    plain.save_pretrained(tmp_path / "plain")
    with pytest.raises(CheckpointError, match="the experts of another checkpoint than"):
        served(store, tmp_path / "plain", name=checkpoint.name)
    made = served(store, tmp_path / "plain", name=f"plain-{checkpoint.name}")
    with ps.hf.namespace(made), pytest.raises(CheckpointError, match=f"namespace .plain-{checkpoint.name}. holds"):
        served(store, checkpoint, name=f"plain-{checkpoint.name}")


def test_records_hold_the_bytes_of_the_checkpoint(model: Any, checkpoint: Path) -> None:
    stored = load_file(checkpoint / FILE)
    whole_and_rows = [*stored.values(), *(row for tensor in stored.values() if tensor.dim() > 1 for row in tensor)]
    bytes_of = {tensor.contiguous().view(torch.uint8).numpy().tobytes() for tensor in whole_and_rows}
    namespace = ps.hf.namespace(model)
    with namespace.acquire([(1, 3)]) as lease:
        for name, tensor in lease[1, 3].items():
            assert tensor.contiguous().view(torch.uint8).numpy().tobytes() in bytes_of, name
    share = namespace.schema.record_bytes / tier_of(model).schema.record_bytes
    assert share < 0.75, "headers and pages weigh much in so small an expert"


@torch.no_grad()
def test_what_stands_is_unpacked(model: Any) -> None:
    assert {field.dtype for field in tier_of(model).schema.part("param").fields} == {"bfloat16"}
    counts = ps.hf.counts(model)
    model(input_ids=tokens())
    after = ps.hf.counts(model)
    assert after.hits + after.misses + after.passed + after.late > counts.hits + counts.misses + counts.passed + counts.late


def test_training_is_refused_with_advice(store: ps.Store, checkpoint: Path) -> None:
    with pytest.raises(UnsupportedModel, match=r"served.*mode='infer', and not trained.*dequantize=True"):
        ps.hf.from_pretrained(auto(), checkpoint, store=store, name="never")
    assert "never" not in {known["name"] for known in store.namespaces()}


def test_a_method_that_is_not_served_is_refused_with_advice(store: ps.Store, checkpoint: Path, tmp_path: Path) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "compressed-tensors"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModel, match=r"compressed-tensors.*fp8 and mxfp4 are served.*dequantize=True"):
        served(store, tmp_path, name="never")


FORMS = {
    "fp8": "; an expert's matrix in fp8 is float8_e4m3fn [r, C] with scales of float32, bfloat16, float16 for blocks of equal size",
    "mxfp4": "; an expert's matrix in mxfp4 is uint8 [n, g, 16] with scales of uint8 [n, g]",
}
ALIKE = "; quantized experts are served where all have the same shapes and dtypes, their scales too"
Change = Callable[[dict[str, torch.Tensor], str, str], object]
"""Given tensors, and the names of one expert's values and scales."""


def with_scales(change: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    return lambda tensors, values, scales: tensors.update({scales: change(tensors[scales]).clone()})


def with_values(change: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    return lambda tensors, values, scales: tensors.update({values: change(tensors[values]).clone()})


DAMAGES: dict[str, tuple[Change, dict[str, str]]] = {
    "scales in one row": (with_scales(lambda scales: scales.flatten()[:-1]), {
        "fp8": "{values}, with {scales} of shape [1], float32, does not fit{form}",
        "mxfp4": "{scales} of shape [1535], uint8: {rows}{form}",
    }),
    "scales missing": (lambda tensors, values, scales: tensors.pop(scales), {
        "fp8": "{values}, has no scales: {scales_name} is missing{form}",
        "mxfp4": "{values}, has no scales: {scales_name} is missing{form}",
    }),
    "scales in int32": (with_scales(lambda scales: scales.to(torch.int32)), {
        "fp8": "{values}, with {scales} of shape [2, 1], int32, does not fit{form}",
        "mxfp4": "{values}, with {scales} of shape [8, 64, 3], int32, does not fit{form}",
    }),
    "half of the scales": (with_scales(lambda scales: scales[: len(scales) // 2]), {
        "fp8": "{scales} of shape [1, 1], float32, is not as most are: {other}",
        "mxfp4": "{values}, with {scales} of shape [4, 64, 3], uint8: {rows}{form}",
    }),
    "scales in another dtype": (with_scales(lambda scales: scales.to(torch.bfloat16)), {
        "fp8": "{values}, with {scales} of shape [2, 1], bfloat16, is not as most are: {other}",
    }),
    "values in bfloat16": (with_values(lambda values: torch.zeros(values.shape, dtype=torch.bfloat16)), {
        "fp8": "{named} of shape [256, 128], bfloat16, with {scales} of shape [2, 1], float32, does not fit{form}",
        "mxfp4": "{named} of shape [8, 64, 3, 16], bfloat16, with {scales} of shape [8, 64, 3], uint8, does not fit{form}",
    }),
    "values in int8": (with_values(lambda values: values.view(torch.int8)), {
        "fp8": "{named} of shape [256, 128], int8, with {scales} of shape [2, 1], float32, does not fit{form}",
        "mxfp4": "{named} of shape [8, 64, 3, 16], int8, with {scales} of shape [8, 64, 3], uint8, does not fit{form}",
    }),
    "values missing": (lambda tensors, values, scales: tensors.pop(values), {
        "fp8": "tensor {values_name} is missing (others of its kind are in model.safetensors), one of 8 that make ",
        "mxfp4": "{scales} of shape [8, 64, 3], uint8, has no blocks: {values_name} is missing{form}",
    }),
    "both missing": (lambda tensors, values, scales: (tensors.pop(values), tensors.pop(scales)), {
        "fp8": "tensor {values_name} is missing (others of its kind are in model.safetensors), one of 8 that make ",
        "mxfp4": "becomes 'model.layers.1.mlp.experts.down_proj'; another layer has {other}",
    }),
}  # fmt: skip
"""What is changed, and by kind how it is told: words in the order of the message."""


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_refused_with_file_and_tensor_before_a_namespace_is_made(
    damage: str, store: ps.Store, checkpoint: Path, tmp_path: Path
) -> None:
    change, told = DAMAGES[damage]
    kind = checkpoint.name
    if kind not in told:
        pytest.skip("one dtype alone is legal")
    tensors, file = load_file(checkpoint / FILE), tmp_path / FILE
    scales = next(name for name in tensors if "layers.1" in name and "experts" in name and name.endswith(("_scale_inv", "_scales")))
    values = scales.replace("_scale_inv", "").replace("_scales", "_blocks")
    shape, dtype = list(tensors[values].shape), str(tensors[values].dtype).removeprefix("torch.")
    words = {
        "values_name": repr(values), "scales_name": repr(scales), "scales": f"tensor {scales!r} in {file}", "form": FORMS[kind],
        "named": f"tensor {values!r} in {file}", "values": f"tensor {values!r} in {file} of shape {shape}, {dtype}",
        "rows": f"no other is like it, and it has no row for each of 8 experts that make {values.removesuffix('_blocks')!r}",
        "other": f"tensor {values.replace('layers.1', 'layers.0')!r} in {file} of shape {shape}, {dtype}, with ",
    }  # fmt: skip
    change(tensors, values, scales)
    (tmp_path / "config.json").write_text((checkpoint / "config.json").read_text())
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError) as caught:
        served(store, tmp_path, name="never")
    said, wanted = str(caught.value), told[kind].removesuffix("{form}")
    assert wanted.format(**words) in said
    assert said.endswith(FORMS[kind] if wanted != told[kind] else ALIKE if "most are" in wanted else "")
    assert "never" not in {known["name"] for known in store.namespaces()}


def test_what_is_more_than_pieces_is_refused_with_file_and_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = CHECKPOINTS["fp8"](tmp_path / "fp8")
    model = skeleton(checkpoint, mode="infer")
    file = re.escape(str(checkpoint / FILE))
    both = rf"tensor '\S*experts\.0\.gate_proj\.weight' in {file} .* and tensor '\S*experts\.0\.up_proj\.weight' in {file} .*"
    made = ExpertSource._made
    with monkeypatch.context() as patch:
        patch.setattr(ExpertSource, "_made", lambda *given: made(*given).flip(0))
        with pytest.raises(CheckpointError, match=f"{both}: the conversion to .*gate_up_proj' does more than put pieces"):
            ExpertSource(model, find_layout(model), open_checkpoint(checkpoint))
    tensors = load_file(checkpoint / FILE)
    for name in [name for name in tensors if re.search(r"experts\.\d+\.(gate|up)_proj\.weight$", name)]:
        tensors[name] = tensors[name].to(torch.bfloat16)
        del tensors[f"{name}_scale_inv"]
    save_file(tensors, checkpoint / FILE, metadata={"format": "pt"})
    source = ExpertSource(model, find_layout(model), open_checkpoint(checkpoint))
    with pytest.raises(CheckpointError, match=f"{both}: '.*gate_up_proj' is made of several tensors, which a record does not keep"):
        [*source.places((0, 0))]


def test_a_checkpoint_that_does_not_say_that_it_is_quantized_is_refused(
    store: ps.Store, checkpoint: Path, tmp_path: Path
) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(load_file(checkpoint / FILE), tmp_path / FILE, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="no quantization_config"):
        served(store, tmp_path, name="never")
    assert "never" not in {known["name"] for known in store.namespaces()}


def test_a_served_model_is_exported_with_the_bytes_that_were_imported(model: Any, checkpoint: Path, tmp_path: Path) -> None:
    export_checkpoint(model, tmp_path, namespace=ps.hf.namespace(model), dense=open_checkpoint(checkpoint))
    made, given = load_file(tmp_path / FILE), load_file(checkpoint / FILE)
    assert [(name, tensor.dtype, tensor.shape) for name, tensor in made.items()] == [
        (name, tensor.dtype, tensor.shape) for name, tensor in given.items()
    ]
    assert all(torch.equal(made[name].view(torch.uint8), given[name].view(torch.uint8)) for name in given)
    assert json.loads((tmp_path / "config.json").read_text()) == json.loads((checkpoint / "config.json").read_text())


def test_an_export_that_does_not_know_the_names_of_quantized_tensors_is_refused(
    model: Any, memory: Any, tmp_path: Path
) -> None:  # fmt: skip
    namespace = ps.hf.namespace(model)
    with pytest.raises(ConfigError, match="holds quantized experts: give their checkpoint as dense="):
        export_checkpoint(model, tmp_path / "out", namespace=namespace)
    modeling.transformers().AutoModelForCausalLM.from_config(memory.config).save_pretrained(tmp_path / "plain")
    with pytest.raises(SchemaMismatch, match=r"those of dense= .*: give their own"):
        export_checkpoint(model, tmp_path / "out", namespace=namespace, dense=open_checkpoint(tmp_path / "plain"))
    assert not (tmp_path / "out").exists()


def test_a_model_that_is_dropped_leaves_its_memory_to_the_next(store: ps.Store, checkpoint: Path) -> None:
    model = served(store, checkpoint, expert_memory=5)
    promised, tier = ps.hf.namespace(model).lease_slots, weakref.ref(tier_of(model))
    del model
    gc.collect()
    assert tier() is None
    model = served(store, checkpoint, expert_memory=5)
    assert ps.hf.namespace(model).lease_slots == promised
    ps.hf.namespace(model).close()


def tier_of(model: Any) -> DeviceTier:
    source = layer_of(next(iter(experts_modules(model).values()))).source
    assert isinstance(source, DeviceTier)
    return source
