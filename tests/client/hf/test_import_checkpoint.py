"""Checkpoints become namespaces bit for bit; an import that stops goes on; what is damaged or another's is refused whole."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import paramstore_client as ps
from paramstore.errors import CheckpointError, ConfigError, SchemaMismatch, StepFailed, StepOutOfOrder
from paramstore_client.hf.checkpoint.progress import Progress
from paramstore_client.hf.checkpoint.skeleton import skeleton
from paramstore_client.hf.import_checkpoint import import_checkpoint
from paramstore_client.hf.model.layout import find_layout
from paramstore_client.safetensors_file import Files, read_header
from paramstore_testkit.training.saved_models import expert_values, load_stock, save_stock, weight_map

pytestmark = pytest.mark.slow

FAMILIES = ("mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss", "olmoe", "qwen3_vl_moe")


class Stopped(Exception):
    """What a test's report raises to stop an import."""


def stopping_at(records: int) -> Callable[[Progress], None]:
    def report(progress: Progress) -> None:
        if progress.records >= records:
            raise Stopped

    return report


def namespace_for(store: ps.Store, name: str, path: Path, *, optimizer: str | None = "adamw") -> ps.Namespace:
    layout = find_layout(skeleton(path))
    schema = layout.schema(optimizer, updates="touched")
    return store.create_namespace(name, schema, layers=layout.layers, experts=layout.experts)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_stock("mixtral", tmp_path_factory.mktemp("checkpoint") / "mixtral")


@pytest.fixture
def damaged(checkpoint: Path, tmp_path: Path) -> Path:
    """A copy of it, to be spoilt."""
    for file in checkpoint.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("family", FAMILIES)
def test_imported_experts_are_those_of_the_checkpoint(store: ps.Store, tmp_path: Path, family: str, dtype: torch.dtype) -> None:
    path = save_stock(family, tmp_path, dtype=dtype)
    stock = load_stock(path)
    layout = find_layout(stock)
    with namespace_for(store, f"{family}-{dtype}", path) as namespace:
        seen: list[Progress] = []
        result = import_checkpoint(path, namespace, skeleton(path), progress=seen.append)
        assert (result.step, result.records, result.resumed) == (0, len(namespace.keys()), 0)
        assert namespace.committed_step == 0
        assert [progress.records for progress in seen] == list(range(len(namespace.keys()) + 1))
        assert result.bytes_read == len(namespace.keys()) * layout.expert_elements * dtype.itemsize, "nothing is read twice"
        for key in namespace.space:
            record, wanted = namespace.read(key), expert_values(stock, layout, key)
            for name, value in wanted.items():
                assert torch.equal(record[f"master/{name}"], value.float())
                assert torch.equal(record[name], value)
                assert not record[f"exp_avg/{name}"].any()
        with namespace.acquire([namespace.keys()[-1]]) as lease:
            assert torch.equal(lease[namespace.keys()[-1]][layout.tensors[0].name], wanted[layout.tensors[0].name])


def test_experts_that_the_hub_has_transposed_become_those_of_the_model(store: ps.Store, tmp_path: Path) -> None:
    path = save_stock("qwen3_vl_moe", tmp_path, shard_bytes_max=10**9)
    stock = load_stock(path)
    file = path / "model.safetensors"
    saved = load_file(file)
    save_file({name: as_on_the_hub(name, tensor) for name, tensor in saved.items()}, file, metadata={"format": "pt"})
    with namespace_for(store, "transposed", path) as namespace:
        import_checkpoint(path, namespace, skeleton(path))
        for key in namespace.space:
            for name, value in expert_values(stock, find_layout(stock), key).items():
                assert torch.equal(namespace.read(key)[name], value)


def as_on_the_hub(name: str, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.transpose(1, 2).contiguous() if ".experts." in name else tensor


def test_an_inference_schema_takes_the_checkpoints_own_bytes(store: ps.Store, checkpoint: Path) -> None:
    stock = load_stock(checkpoint)
    with namespace_for(store, "inference", checkpoint, optimizer=None) as namespace:
        import_checkpoint(checkpoint, namespace, skeleton(checkpoint))
        with namespace.acquire([(1, 3)]) as lease:
            for name, value in expert_values(stock, find_layout(stock), (1, 3)).items():
                assert torch.equal(lease[1, 3][name], value)


def test_an_import_that_was_stopped_goes_on_with_what_is_missing(store: ps.Store, checkpoint: Path) -> None:
    model = skeleton(checkpoint)
    with namespace_for(store, "stopped", checkpoint) as namespace, pytest.raises(Stopped):
        import_checkpoint(checkpoint, namespace, model, progress=stopping_at(5))
    with pytest.raises(StepFailed):
        store.open_namespace("stopped")
    with namespace_for(store, "stopped", checkpoint) as namespace:
        with pytest.raises(StepFailed, match="has no value yet"):
            namespace.commit(0).wait()
        result = import_checkpoint(checkpoint, namespace, model)
        total = len(namespace.keys())
        assert (result.resumed, result.records) == (5, total - 5), "the last save, when it was stopped, had all five"
        assert json.loads(namespace.extra(0))["import"]["fingerprint"] == result.fingerprint
        stock = load_stock(checkpoint)
        for key in namespace.space:
            record = namespace.read(key)
            for name, value in expert_values(stock, find_layout(stock), key).items():
                assert torch.equal(record[name], value)
        with pytest.raises(StepOutOfOrder, match="its values are set"):
            import_checkpoint(checkpoint, namespace, model)


def test_another_checkpoint_is_refused_and_the_first_one_goes_on(store: ps.Store, checkpoint: Path, tmp_path: Path) -> None:
    other = save_stock("mixtral", tmp_path, seed=1)
    model = skeleton(checkpoint)
    with namespace_for(store, "other", checkpoint) as namespace:
        with pytest.raises(Stopped):
            import_checkpoint(checkpoint, namespace, model, progress=stopping_at(3))
        with pytest.raises(CheckpointError, match=r"begun with another checkpoint than .* resume=False to start over"):
            import_checkpoint(other, namespace, model)
        with pytest.raises(Stopped):
            import_checkpoint(checkpoint, namespace, model, progress=stopping_at(6))
        result = import_checkpoint(other, namespace, model, resume=False)
        assert result.resumed == 0
        stock = load_stock(other)
        layout = find_layout(stock)
        assert all(
            torch.equal(namespace.read(key)[name], value)
            for key in namespace.space for name, value in expert_values(stock, layout, key).items()
        )  # fmt: skip


def test_the_same_experts_in_other_files_are_the_same_checkpoint(store: ps.Store, checkpoint: Path, tmp_path: Path) -> None:
    whole = save_stock("mixtral", tmp_path, shard_bytes_max=10**9)
    assert (whole / "model.safetensors").exists()
    model = skeleton(checkpoint)
    with namespace_for(store, "files", checkpoint) as namespace:
        with pytest.raises(Stopped):
            import_checkpoint(checkpoint, namespace, model, progress=stopping_at(3))
        assert import_checkpoint(whole, namespace, model).resumed == 3


def test_values_of_an_initialization_that_was_no_import_are_not_mixed_in(store: ps.Store, checkpoint: Path) -> None:
    with namespace_for(store, "mixed", checkpoint) as namespace:
        with namespace.begin_initialize() as initialization:
            initialization.put((0, 0), expert_values(load_stock(checkpoint), find_layout(skeleton(checkpoint)), (0, 0)))
            initialization.settle()
            initialization.save(b"mine").wait()
        with pytest.raises(CheckpointError, match="no import"):
            import_checkpoint(checkpoint, namespace, skeleton(checkpoint))


def test_a_rank_imports_its_share_and_another_attempt_the_rest(store: ps.Store, checkpoint: Path) -> None:
    model = skeleton(checkpoint)
    with namespace_for(store, "ranks", checkpoint) as namespace:
        with pytest.raises(ConfigError, match="rank=2 of world_size=2"):
            import_checkpoint(checkpoint, namespace, model, rank=2, world_size=2)
        with pytest.raises(StepFailed, match=r"\(0, 0\) was never given"):
            import_checkpoint(checkpoint, namespace, model, rank=1, world_size=2)
        with namespace.begin_initialize() as initialization:
            assert initialization.missing == namespace.keys()[::2]
        assert import_checkpoint(checkpoint, namespace, model).records == len(namespace.keys()) / 2


def _cut(path: Path) -> str:
    file = path / weight_map(path)["model.layers.1.block_sparse_moe.experts.2.w1.weight"]
    with file.open("r+b") as opened:
        opened.truncate(file.stat().st_size - 1)
    return rf"{file.name}: cut off: tensor '.*' ends at byte \d+"


def _header(path: Path) -> str:
    file = path / weight_map(path)["model.layers.1.block_sparse_moe.experts.2.w1.weight"]
    with file.open("r+b") as opened:
        opened.write((1 << 40).to_bytes(8, "little"))
    return f"{file.name}: no safetensors file"


def _gone(path: Path) -> str:
    file = path / weight_map(path)["model.layers.1.block_sparse_moe.experts.2.w1.weight"]
    file.unlink()
    return f"{file.name}: cannot be read: No such file"


def _lacking(path: Path) -> str:
    name = "model.layers.1.block_sparse_moe.experts.2.w1.weight"
    index = path / "model.safetensors.index.json"
    described = json.loads(index.read_text())
    del described["weight_map"][name]
    index.write_text(json.dumps(described))
    return rf"tensor '{name}' is missing \(others of its kind are in model-"


def _not_in_file(path: Path) -> str:
    name = "model.layers.1.block_sparse_moe.experts.2.w1.weight"
    index = path / "model.safetensors.index.json"
    described = json.loads(index.read_text())
    described["weight_map"][name] = next(file for file in described["weight_map"].values() if file != described["weight_map"][name])
    index.write_text(json.dumps(described))
    return rf"model-\d+-of-\d+.safetensors lacks tensor '{name}'"


def _elsewhere(path: Path) -> str:
    index = path / "model.safetensors.index.json"
    described = json.loads(index.read_text())
    described["weight_map"]["model.norm.weight"] = "../secret.safetensors"
    index.write_text(json.dumps(described))
    return "names files that are not beside it"


def _reshape(path: Path, text: str, other: str) -> str:
    """Changes a tensor's description in its header, which keeps its length."""
    name = "model.layers.1.block_sparse_moe.experts.2.w1.weight"
    file = path / weight_map(path)[name]
    data = file.read_bytes()
    start = data.index(name.encode())
    end = data.index(b"}", start)
    changed = data[start:end].replace(text.encode(), other.encode())
    assert changed != data[start:end]
    file.write_bytes(data[:start] + changed + data[end:])
    return rf"tensor '{name}' in .*{file.name}"


def _turned(path: Path) -> str:
    where = _reshape(path, "[48,32]", "[32,48]")
    return where + r".* of shape \[32, 48\].*: cannot be converted to 'model.layers.1.mlp.experts.gate_up_proj'"


def _overlapping(path: Path) -> str:
    """Two tensors of one file with the same bytes."""
    name = "model.layers.1.block_sparse_moe.experts.2.w1.weight"
    file = path / weight_map(path)[name]
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    described = json.loads(data[8 : 8 + length])
    shape = described[name]["shape"]
    other = next(key for key, value in described.items() if key not in (name, "__metadata__") and value["shape"] == shape)
    described[name]["data_offsets"] = described[other]["data_offsets"]
    file.write_bytes(data[:8] + json.dumps(described, separators=(",", ":")).encode().ljust(length)[:length] + data[8 + length :])
    return rf"tensor '.*' in .*{file.name} lies over tensor '.*'"


def _integers(path: Path) -> str:
    return _reshape(path, '"BF16"', '"I16" ') + " is I16: experts are read from F32, BF16, F16"


DAMAGES = (_cut, _header, _gone, _lacking, _not_in_file, _elsewhere, _turned, _overlapping, _integers)


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_named_with_file_and_tensor_and_nothing_is_taken(
    store: ps.Store, damaged: Path, damage: Callable[[Path], str]
) -> None:
    model = skeleton(damaged)
    with namespace_for(store, f"damage{damage.__name__}", damaged) as namespace:
        written = store.stats()["namespaces"][namespace.name]["records_written"]
        with pytest.raises(CheckpointError, match=damage(damaged)):
            import_checkpoint(damaged, namespace, model)
        assert store.stats()["namespaces"][namespace.name]["records_written"] == written
        with namespace.begin_initialize() as initialization:
            assert (initialization.missing, initialization.extra) == (namespace.keys(), None)


def test_a_file_that_is_cut_off_while_it_is_read_stops_the_import_and_it_goes_on_with_the_whole_one(
    store: ps.Store, checkpoint: Path, damaged: Path
) -> None:
    model = skeleton(damaged)
    name = "model.layers.1.block_sparse_moe.experts.7.w2.weight"
    file = damaged / weight_map(damaged)[name]

    def cut(progress: Progress) -> None:
        if progress.records == 2:
            with file.open("r+b") as opened:
                opened.truncate(read_header(checkpoint / file.name)[name].offset_bytes)

    with namespace_for(store, "cut", damaged) as namespace:
        with pytest.raises(CheckpointError, match=rf"{file.name} changed while it was read"):
            import_checkpoint(damaged, namespace, model, progress=cut)
        result = import_checkpoint(checkpoint, namespace, model)
        assert result.resumed >= 2
        assert result.resumed + result.records == len(namespace.keys())


def test_a_read_from_a_file_that_was_cut_off_since_names_the_byte(damaged: Path) -> None:
    file = next(damaged.glob("*.safetensors"))
    tensor = max(read_header(file).values(), key=lambda tensor: tensor.offset_bytes)
    with file.open("r+b") as opened:
        opened.truncate(tensor.offset_bytes + 1)
    with Files() as files, pytest.raises(CheckpointError, match=f"was cut off at byte {tensor.offset_bytes + 1} while it was read"):
        files.read(tensor, memoryview(bytearray(tensor.length_bytes)))


def rewritten(file: Path, other: Path) -> None:
    file.write_bytes(other.read_bytes())


def rewritten_with_its_old_time(file: Path, other: Path) -> None:
    before = file.stat()
    rewritten(file, other)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


def renamed_over(file: Path, other: Path) -> None:
    copy = file.with_suffix(".new")
    copy.write_bytes(other.read_bytes())
    copy.replace(file)


def removed(file: Path, other: Path) -> None:
    file.unlink()


@pytest.mark.parametrize("change", [rewritten, rewritten_with_its_old_time, renamed_over, removed])
def test_a_file_that_changes_during_the_import_stops_it_before_anything_of_the_new_one_is_taken(
    store: ps.Store, checkpoint: Path, damaged: Path, tmp_path_factory: pytest.TempPathFactory, change: Callable[[Path, Path], None]
) -> None:
    other, model = save_stock("mixtral", tmp_path_factory.mktemp("other"), seed=1), skeleton(damaged)
    shards = sorted(set(weight_map(damaged).values()))

    def changed(progress: Progress) -> None:
        if progress.records == 2:
            for shard in shards:
                change(damaged / shard, other / shard)

    with namespace_for(store, change.__name__, damaged) as namespace:
        with pytest.raises(CheckpointError, match=r"\.safetensors changed while it was read: .* Put the file back"):
            import_checkpoint(damaged, namespace, model, progress=changed)
        result = import_checkpoint(checkpoint, namespace, model)
        assert (result.resumed, result.resumed + result.records) == (2, len(namespace.keys()))
        stock, layout = load_stock(checkpoint), find_layout(load_stock(checkpoint))
        for key in namespace.space:
            record = namespace.read(key)
            assert all(torch.equal(record[name], value) for name, value in expert_values(stock, layout, key).items())


def test_a_namespace_of_another_shape_is_refused(store: ps.Store, checkpoint: Path, tmp_path: Path) -> None:
    model = skeleton(checkpoint)
    with (
        store.create_namespace("shape", ps.adamw_schema({"w": (2, 2)}), layers=2, experts=8) as namespace,
        pytest.raises(SchemaMismatch, match="the model's experts have"),
    ):
        import_checkpoint(checkpoint, namespace, model)
    schema = find_layout(model).schema("adamw", updates="touched")
    with (
        store.create_namespace("count", schema, layers=2, experts=4) as namespace,
        pytest.raises(SchemaMismatch, match="4 experts in layers"),
    ):
        import_checkpoint(checkpoint, namespace, model)


def test_a_path_that_is_no_checkpoint_is_refused_with_the_way_to_get_one(store: ps.Store, checkpoint: Path, tmp_path: Path) -> None:
    with namespace_for(store, "path", checkpoint) as namespace:
        with pytest.raises(CheckpointError, match=r"has neither model.safetensors.index.json nor model.safetensors: save_pret"):
            import_checkpoint(tmp_path, namespace, skeleton(checkpoint))
        with pytest.raises(CheckpointError, match="hf download nobody/nothing"):
            import_checkpoint("nobody/nothing", namespace, skeleton(checkpoint))
