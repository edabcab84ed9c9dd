"""A checkpoint is whole or not there, is what its commit names, and the two newest stay."""

import os

import pytest
import torch

from paramstore.demo.checkpoint import CheckpointFolder, CheckpointName
from paramstore.errors import CorruptRecord, VolumeError

TENSORS = {"model/w": torch.arange(6.0).view(2, 3), "step": torch.tensor(7), "data/generator": torch.zeros(16, dtype=torch.uint8)}


@pytest.fixture
def folder(tmp_path):
    return CheckpointFolder(tmp_path / "checkpoints")


def test_what_was_saved_is_loaded(folder):
    loaded = folder.load(folder.save(7, TENSORS))
    assert loaded.keys() == TENSORS.keys()
    assert all(torch.equal(loaded[name], value) and loaded[name].dtype == value.dtype for name, value in TENSORS.items())


def test_name_survives_a_commits_extra(folder):
    name = folder.save(7, TENSORS)
    assert CheckpointName.from_extra(name.to_extra()) == name
    assert name.file in name.to_extra().decode()


@pytest.mark.parametrize("extra", [b"", b"{}", b"\xff", b'["x"]', b'{"dense_checkpoint": "x"}'])
def test_extra_that_names_no_checkpoint_is_refused(extra):
    with pytest.raises(CorruptRecord, match="names no dense checkpoint"):
        CheckpointName.from_extra(extra)


def test_two_newest_are_kept(folder):
    for step in (9, 10, 100, 1000):
        folder.save(step, TENSORS)
        folder.prune()
    assert [path.name for path in folder.files()] == ["dense-00000100.safetensors", "dense-00001000.safetensors"]


def test_nothing_is_removed_before_prune(folder):
    for step in range(4):
        folder.save(step, TENSORS)
    assert len(folder.files()) == 4


def test_file_then_directory_are_synced(folder, monkeypatch):
    synced = []
    real = os.fsync

    def fsync(descriptor):
        synced.append((os.readlink(f"/proc/self/fd/{descriptor}"), len(folder.files())))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    folder.save(1, TENSORS)
    directory = str(folder.directory)
    assert synced == [(f"{directory}/dense-00000001.new", 0), (directory, 1)]


def test_failed_save_leaves_the_old_ones_and_no_rest(folder, monkeypatch):
    name = folder.save(1, TENSORS)

    def fsync(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(VolumeError, match="No space left"):
        folder.save(2, TENSORS)
    assert [path.name for path in folder.directory.iterdir()] == [name.file]
    assert folder.load(name)["step"] == 7


def test_same_step_again_replaces_its_file(folder):
    folder.save(3, TENSORS)
    name = folder.save(3, {**TENSORS, "step": torch.tensor(8)})
    assert folder.load(name)["step"] == 8
    assert len(folder.files()) == 1


def test_missing_file_is_an_error_that_names_it(folder):
    with pytest.raises(VolumeError, match=r"dense-00000005\.safetensors"):
        folder.load(CheckpointName("dense-00000005.safetensors", "0"))


def test_changed_file_is_refused(folder):
    name = folder.save(1, TENSORS)
    path = folder.directory / name.file
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptRecord, match="the commit says"):
        folder.load(name)
