"""An exported checkpoint is, byte for byte, what the unmodified model would have saved; and it is whole or has no index."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import paramstore_client as ps
from paramstore.errors import CheckpointError, ConfigError, SchemaMismatch, StepDropped
from paramstore_client.hf.checkpoint.progress import Progress
from paramstore_client.hf.checkpoint.shards import open_checkpoint
from paramstore_client.hf.checkpoint.skeleton import skeleton
from paramstore_client.hf.export_checkpoint import export_checkpoint
from paramstore_client.hf.import_checkpoint import import_checkpoint
from paramstore_client.hf.model.layout import find_layout
from paramstore_client.hf.model.stripping import stripped_class
from paramstore_testkit.training.saved_models import (
    SHARD_BYTES_MAX,
    check_equal_files,
    class_of,
    load_stock,
    save_stock,
    tensors_of,
)

pytestmark = pytest.mark.slow

FAMILIES = ("mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss", "olmoe", "qwen3_vl_moe")


def imported(store: ps.Store, name: str, path: Path) -> ps.Namespace:
    layout = find_layout(skeleton(path))
    schema = layout.schema("adamw", updates="touched")
    namespace = store.create_namespace(name, schema, layers=layout.layers, experts=layout.experts)
    import_checkpoint(path, namespace, skeleton(path))
    return namespace


def stripped(path: Path) -> Any:
    """The model of a checkpoint with its dense weights alone."""
    return stripped_class(class_of(path)).from_pretrained(path, dtype="auto")


@pytest.mark.parametrize("family", FAMILIES)
def test_an_export_is_what_the_unmodified_model_saves(store: ps.Store, tmp_path: Path, family: str) -> None:
    path = save_stock(family, tmp_path / "hub")
    load_stock(path).save_pretrained(tmp_path / "stock", max_shard_size=SHARD_BYTES_MAX)
    with imported(store, family, path) as namespace:
        seen: list[Progress] = []
        result = export_checkpoint(
            stripped(path), tmp_path / "out", namespace=namespace, max_shard_bytes=SHARD_BYTES_MAX, progress=seen.append
        )
        check_equal_files(tmp_path / "stock", tmp_path / "out")
        assert [progress.records for progress in seen] == list(range(1, len(namespace.keys()) + 1))
        total = sum(len(data) for _, _, data in tensors_of(path).values())
        assert result.bytes_written == seen[-1].bytes_done
        assert abs(result.bytes_written - total) <= total // 10
        one_file = export_checkpoint(stripped(path), tmp_path / "one", namespace=namespace)
        assert "model.safetensors" in one_file.files
        assert tensors_of(tmp_path / "one") == tensors_of(tmp_path / "stock")
        again = export_checkpoint(skeleton(path), tmp_path / "files", namespace=namespace, dense=open_checkpoint(path))
        assert again.records == len(namespace.keys())
        assert tensors_of(tmp_path / "files") == tensors_of(path), "the other weights are the checkpoint's, as they are"


def test_an_export_at_a_step_has_the_values_of_that_step(store: ps.Store, tmp_path: Path) -> None:
    path = save_stock("mixtral", tmp_path / "hub")
    with imported(store, "steps", path) as namespace:
        gradients = {(0, 1): {name: torch.ones(shape, dtype=torch.bfloat16) for name, shape, _ in namespace.schema.specs}}
        namespace.push(gradients)
        namespace.apply(ps.AdamW(lr=0.5)).wait()
        export_checkpoint(stripped(path), tmp_path / "working", namespace=namespace)
        export_checkpoint(stripped(path), tmp_path / "before", namespace=namespace, at=0)
        namespace.commit(1).wait()
        result = export_checkpoint(stripped(path), tmp_path / "after", namespace=namespace, at=1)
        assert result.step == 1
        with pytest.raises(StepDropped):
            export_checkpoint(stripped(path), tmp_path / "none", namespace=namespace, at=7)
        assert not (tmp_path / "none").exists()
        updated = namespace.read((0, 1))["gate_up_proj"]
    before, after = tensors_of(tmp_path / "before"), tensors_of(tmp_path / "after")
    assert before == tensors_of(path)
    assert after == tensors_of(tmp_path / "working")
    changed = {name for name in after if after[name] != before[name]}
    assert changed == {f"model.layers.0.block_sparse_moe.experts.1.{name}.weight" for name in ("w1", "w2", "w3")}
    rows = updated.shape[0] // 2
    expected = updated[:rows].contiguous().view(torch.uint8).numpy().tobytes()
    assert after["model.layers.0.block_sparse_moe.experts.1.w1.weight"][2] == expected


def test_an_export_that_stops_leaves_no_checkpoint_and_the_next_one_a_whole(store: ps.Store, tmp_path: Path) -> None:
    path, out = save_stock("mixtral", tmp_path / "hub"), tmp_path / "out"
    with imported(store, "whole", path) as namespace:
        export_checkpoint(stripped(path), out, namespace=namespace, max_shard_bytes=SHARD_BYTES_MAX)

        def stop(progress: Progress) -> None:
            assert not (out / "model.safetensors.index.json").exists(), "the earlier checkpoint is none any more"
            if progress.records == 3:
                raise RuntimeError("as planned")

        with pytest.raises(RuntimeError, match="as planned"):
            export_checkpoint(stripped(path), out, namespace=namespace, max_shard_bytes=SHARD_BYTES_MAX, progress=stop)
        assert not list(out.glob("*.safetensors*"))
        with pytest.raises(CheckpointError):
            open_checkpoint(out)
        export_checkpoint(stripped(path), out, namespace=namespace)
        assert sorted(file.name for file in out.glob("*.safetensors*")) == ["model.safetensors"]
        assert tensors_of(out) == tensors_of(path)


def test_tokenizer_files_are_copied(store: ps.Store, tmp_path: Path) -> None:
    path = save_stock("mixtral", tmp_path / "hub")
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"):
        (path / name).write_text(f"{{}} {name}")
    with imported(store, "tokenizer", path) as namespace:
        result = export_checkpoint(stripped(path), tmp_path / "out", namespace=namespace, tokenizer=path)
    assert {"tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"} <= set(result.files)
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{} tokenizer.json"


def test_the_files_of_others_stay_and_are_not_counted(store: ps.Store, tmp_path: Path) -> None:
    path, out = save_stock("mixtral", tmp_path / "hub"), tmp_path / "out"
    (path / "tokenizer.json").write_text("{}")
    (out / "folder").mkdir(parents=True)
    (out / "notes.txt").write_text("mine")
    with imported(store, "counted", path) as namespace:
        result = export_checkpoint(stripped(path), out, namespace=namespace, tokenizer=path)
        cut = export_checkpoint(stripped(path), out, namespace=namespace, max_shard_bytes=SHARD_BYTES_MAX)
    assert result.files == ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json")
    assert {*cut.files, "folder", "notes.txt", "tokenizer.json"} == {file.name for file in out.iterdir()}
    assert (out / "notes.txt").read_text() == "mine"


def test_what_cannot_be_exported_is_refused_before_anything_is_written(store: ps.Store, tmp_path: Path) -> None:
    path, other = save_stock("mixtral", tmp_path / "hub"), save_stock("olmoe", tmp_path / "other")
    model = stripped(path)
    with pytest.raises(ConfigError, match=r"bound to no namespace: .* ps\.hf\.namespace\(model\)"):
        export_checkpoint(model, tmp_path / "out")
    with imported(store, "refused", other) as namespace, pytest.raises(SchemaMismatch):
        export_checkpoint(model, tmp_path / "out", namespace=namespace)
    assert not (tmp_path / "out").exists()


def files_of(directory: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in directory.iterdir()}


def linked(path: Path, place: Path, link: Callable[[Path, Path], None]) -> Path:
    """A directory at `place` with the files of `path`."""
    place.mkdir()
    for file in path.iterdir():
        link(file, place / file.name)
    return place


def test_the_directory_that_is_read_is_never_written_by_whatever_path(
    store: ps.Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save_stock("mixtral", tmp_path / "hub")
    (path / "tokenizer.json").write_text("{}")
    (tmp_path / "beside").mkdir()
    (tmp_path / "link").symlink_to(path)
    monkeypatch.chdir(tmp_path)
    before = files_of(path)
    places = [
        path, Path("hub"), tmp_path / "link", tmp_path / "beside" / ".." / "hub",
        linked(path, tmp_path / "pointing", lambda file, link: link.symlink_to(file)),
        linked(path, tmp_path / "named_twice", os.link),
    ]  # fmt: skip
    with imported(store, "apart", path) as namespace:
        for out in places:
            with pytest.raises(ConfigError, match="export into another"):
                export_checkpoint(skeleton(path), out, namespace=namespace, dense=open_checkpoint(path))
            with pytest.raises(ConfigError, match="export into another"):
                export_checkpoint(stripped(path), out, namespace=namespace, tokenizer=str(path))
            assert files_of(path) == before
        pointing = open_checkpoint(tmp_path / "pointing")
        with pytest.raises(ConfigError, match=f"{path} is {tmp_path / 'pointing'}, which is read, or shares"):
            export_checkpoint(skeleton(path), path, namespace=namespace, dense=pointing)
    assert files_of(path) == before


def test_a_file_is_no_place_for_an_export(store: ps.Store, tmp_path: Path) -> None:
    path = save_stock("mixtral", tmp_path / "hub")
    with imported(store, "file", path) as namespace:
        for out in (path / "config.json", path / "config.json" / "below"):
            with pytest.raises(ConfigError, match="no directory, or lies in a file"):
                export_checkpoint(skeleton(path), out, namespace=namespace, dense=open_checkpoint(path))


def test_a_full_disk_is_named_with_the_file(store: ps.Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    path = save_stock("mixtral", tmp_path / "hub")
    with imported(store, "full", path) as namespace:
        monkeypatch.setattr(os, "pwrite", refuse)
        with pytest.raises(OSError, match=r"No space left on device: '.*/out/model\.safetensors\.partial'"):
            export_checkpoint(stripped(path), tmp_path / "out", namespace=namespace)
