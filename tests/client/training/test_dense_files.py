"""Dense weights and experts are of one step: whatever happens in between, the committed step's file is there, whole, or refused."""

from __future__ import annotations

import errno
import itertools
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import paramstore_client as ps
from paramstore_client.handle.dense_part import DensePart, callers_extra
from paramstore_client.safetensors_file import Files, StoredTensor
from paramstore_client.training import bind
from paramstore_client.training.dense_files import dense_tensors, opened
from paramstore_testkit.training.toy_moe import Pair, ToyMoE, make_stored, plain_loop


def train(pair: Pair, steps: int = 1) -> dict[str, Tensor]:
    """Trains; gives the dense weights then."""
    plain_loop(pair.stored, pair.stored_optimizer, steps=steps)
    pair.stored_optimizer.zero_grad()
    return dense(pair.stored)


def dense(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in dense_tensors(model).items()}


def equal(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(value, right[name]) for name, value in left.items())


def part(namespace: ps.Namespace, step: int) -> DensePart:
    found = DensePart.from_extra(namespace.extra(step))
    assert found is not None
    return found


def steps_of(directory: Path) -> list[int]:
    return sorted(int(file.name.split(".")[-4]) for file in directory.glob("*.safetensors"))


def again(store: ps.Store, namespace: ps.Namespace) -> Pair:
    """The model as a process that starts anew has it, over the same namespace."""
    return Pair.make(store.open_namespace(namespace.name, mode="write"))


def test_a_training_goes_on_with_the_dense_weights_of_its_step(
    store: ps.Store, namespace: ps.Namespace, tmp_path: Path
) -> None:
    pair = Pair.make(namespace)
    expected = train(pair)
    pair.experts.commit(3, b"my own", dense=tmp_path / "run" / "dense").wait()
    assert callers_extra(namespace.extra(3)) == b"my own"
    assert equal(load_file(part(namespace, 3).path), expected)
    train(pair)
    resumed = again(store, namespace)
    before = {name: tensor.data_ptr() for name, tensor in dense_tensors(resumed.stored).items()}
    assert resumed.experts.load_dense() == 3
    assert equal(dense(resumed.stored), expected)
    assert {name: tensor.data_ptr() for name, tensor in dense_tensors(resumed.stored).items()} == before
    moved = tmp_path / "moved"
    (tmp_path / "run" / "dense").rename(moved)
    with pytest.raises(ps.CheckpointError, match="cannot be read: No such file"):
        resumed.experts.load_dense()
    assert resumed.experts.load_dense(moved) == 3


def test_a_step_without_a_dense_part_changes_nothing(namespace: ps.Namespace) -> None:
    pair = Pair.make(namespace)
    before = train(pair)
    assert pair.experts.load_dense() is None
    assert equal(dense(pair.stored), before)


def test_files_go_with_their_steps_and_after_them(namespace: ps.Namespace, tmp_path: Path) -> None:
    other = tmp_path / "moe.00000000.1.1.0011223344556677.safetensors"
    other.touch()
    pair = Pair.make(namespace)
    weights = {}
    for step in range(1, 7):
        weights[step] = train(pair)
        pair.experts.commit(step, dense=tmp_path)
        if step > 2:
            assert step - 2 in steps_of(tmp_path), "nobody knows yet that this commit is durable"
        pair.experts.settle()
        if step == 2:
            namespace.snapshot(2).close()
        for number in namespace.steps()[1:] if step < 3 else namespace.steps():
            with opened(part(namespace, number)) as file:
                file.load(pair.stored)
            assert equal(dense(pair.stored), weights[number]), number
    assert namespace.steps() == [2, 5, 6]
    assert steps_of(tmp_path) == [1, 2, 5, 6], "the first is of another namespace"
    namespace.drop_snapshot(2)
    train(pair)
    pair.experts.commit(7, dense=tmp_path)
    pair.experts.settle()
    assert steps_of(tmp_path) == [1, 6, 7]


def test_files_in_another_directory_stay_until_their_owner_removes_them(namespace: ps.Namespace, tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    pair = Pair.make(namespace)
    for step in range(1, 7):
        train(pair)
        pair.experts.commit(step, dense=old if step < 4 else new)
        pair.experts.settle()
    assert namespace.steps() == [5, 6]
    assert (steps_of(old), steps_of(new)) == ([2, 3], [5, 6])
    assert {part(namespace, step).directory for step in namespace.steps()} == {str(new)}, "by which their owner knows"


def test_a_file_that_takes_the_name_of_one_that_was_checked_is_not_read(
    namespace: ps.Namespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = Pair.make(namespace)
    expected = train(pair)
    pair.experts.commit(1, dense=tmp_path).wait()
    checksum = Files.checksum

    def checked(files: Files, file: Path) -> tuple[int, str]:
        found = checksum(files, file)
        file.unlink()
        save_file({"another": torch.zeros(1)}, file)
        return found

    train(pair)
    monkeypatch.setattr(Files, "checksum", checked)
    assert pair.experts.load_dense() == 1
    assert equal(dense(pair.stored), expected)


def test_a_disk_that_fails_after_the_check_is_said_and_the_next_call_loads_all(
    namespace: ps.Namespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = Pair.make(namespace)
    expected = train(pair)
    pair.experts.commit(1, dense=tmp_path).wait()
    train(pair)
    read, count = Files.read, itertools.count()

    def failing(files: Files, tensor: StoredTensor, into: memoryview) -> None:
        if next(count) == 1:
            raise ps.CheckpointError(f"{tensor}: cannot be read at byte 0: Input/output error")
        read(files, tensor, into)

    with monkeypatch.context() as patch:
        patch.setattr(Files, "read", failing)
        with pytest.raises(ps.CheckpointError, match="Input/output error"):
            pair.experts.load_dense()
    assert not equal(dense(pair.stored), expected)
    assert pair.experts.load_dense() == 1
    assert equal(dense(pair.stored), expected)


def test_a_crash_before_the_commit_leaves_the_step_before_with_its_own_file(
    store: ps.Store, namespace: ps.Namespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = Pair.make(namespace)
    expected = train(pair)
    pair.experts.commit(1, dense=tmp_path).wait()
    train(pair)
    with monkeypatch.context() as crash:
        crash.setattr(ps.Namespace, "commit", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            pair.experts.commit(2, dense=tmp_path)
    assert steps_of(tmp_path) == [1, 2]
    resumed = again(store, namespace)
    assert resumed.experts.load_dense() == 1
    assert equal(dense(resumed.stored), expected)
    for step in (2, 3):
        train(resumed)
        resumed.experts.commit(step, dense=tmp_path)
        resumed.experts.settle()
        assert len(steps_of(tmp_path)) == (2 if step == 3 else 3), "what lies above the newest step is left alone"


def test_a_file_is_durable_then_its_name_and_only_then_the_step_is_committed(
    namespace: ps.Namespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[object] = []
    fsync, commit = os.fsync, ps.Namespace.commit

    def synced(descriptor: int) -> None:
        fsync(descriptor)
        done.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")))

    def committed(self: ps.Namespace, step: int, extra: bytes = b"") -> object:
        done.append(step)
        return commit(self, step, extra)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(ps.Namespace, "commit", committed)
    pair = Pair.make(namespace)
    train(pair)
    pair.experts.commit(1, dense=tmp_path).wait()
    file, directory, step = done
    assert isinstance(file, Path)
    assert (file.parent, file.suffix, directory, step) == (tmp_path, ".partial", tmp_path, 1)


def test_a_step_that_comes_again_leaves_the_file_of_the_first(namespace: ps.Namespace, tmp_path: Path) -> None:
    pair = Pair.make(namespace)
    expected = train(pair)
    pair.experts.commit(1, dense=tmp_path).wait()
    with torch.no_grad():
        pair.stored.head.bias.add_(1)
    pair.experts.commit(1, dense=tmp_path).wait()
    pair.experts.load_dense()
    assert equal(dense(pair.stored), expected), "no second commit was made, and the first has its weights"


def test_where_the_file_cannot_be_written_nothing_is_committed(namespace: ps.Namespace, tmp_path: Path) -> None:
    pair = Pair.make(namespace)
    train(pair)
    (tmp_path / "file").touch()
    with pytest.raises(ps.CheckpointError, match=r"step 1 cannot be written to .*file/dense, so it is not committed"):
        pair.experts.commit(1, dense=tmp_path / "file" / "dense")
    assert namespace.committed_step == 0
    with pytest.raises(ps.ConfigError, match="dense=3: give a path"):
        pair.experts.commit(1, dense=3)  # type: ignore[arg-type]
    pair.experts.commit(1, dense=tmp_path).wait()
    assert [file.suffix for file in tmp_path.iterdir() if file.is_file() and file.name != "file"] == [".safetensors"]


@pytest.mark.parametrize("writes", [0, 1])
def test_a_full_disk_leaves_neither_a_file_nor_a_descriptor(
    namespace: ps.Namespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writes: int
) -> None:
    pair, left, write = Pair.make(namespace), [writes], os.pwrite

    def until_full(*given: object) -> int:
        if not left[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        left[0] -= 1
        return write(*given)  # type: ignore[arg-type]

    train(pair)
    open_before = os.listdir("/proc/self/fd")
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", until_full)
        with pytest.raises(ps.CheckpointError, match=r"step 1 cannot be written to .*No space left on device: '.*\.partial'"):
            pair.experts.commit(1, dense=tmp_path / "dense")
    assert list((tmp_path / "dense").iterdir()) == []
    assert os.listdir("/proc/self/fd") == open_before
    pair.experts.commit(1, dense=tmp_path / "dense").wait()  # with room again
    assert steps_of(tmp_path / "dense") == [1]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda file: file.unlink(), "No such file"),
        (lambda file: file.write_bytes(file.read_bytes()[:-1]), r"\d+ bytes, where \d+ were committed"),
        (lambda file: file.write_bytes(file.read_bytes()[:-1] + b"\x55"), r"its checksum is [0-9a-f]{16}, where"),
    ],
    ids=["missing", "cut off", "another byte"],
)  # fmt: skip
def test_a_damaged_file_is_refused(namespace: ps.Namespace, tmp_path: Path, damage, message: str) -> None:  # type: ignore[no-untyped-def]
    pair = Pair.make(namespace)
    train(pair)
    pair.experts.commit(1, dense=tmp_path).wait()
    before = train(pair)
    damage(part(namespace, 1).path)
    with pytest.raises(ps.CheckpointError, match=message) as error:
        pair.experts.load_dense()
    assert part(namespace, 1).file in str(error.value)
    assert equal(dense(pair.stored), before)


def test_a_file_of_another_model_is_refused(namespace: ps.Namespace, tmp_path: Path) -> None:
    pair = Pair.make(namespace)
    train(pair)
    pair.experts.commit(1, dense=tmp_path).wait()
    whole_numbers = nn.Parameter(torch.zeros(16, dtype=torch.int32), requires_grad=False)
    for change, message in (
        (lambda model: setattr(model, "head", nn.Linear(8, 5)), r"'head.weight' has shape \[5, 8\], .* and \[16, 8\]"),
        (lambda model: setattr(model.head, "bias", whole_numbers), "'head.bias' has .*torch.int32 in the model"),
        (lambda model: setattr(model, "tail", nn.Linear(1, 1)), "'tail.bias', 'tail.weight' are missing in the file"),
        (lambda model: delattr(model, "head"), "'head.bias', 'head.weight' of the file of the dense weights are not in the model"),
    ):
        model = make_stored(namespace)
        change(model)
        with opened(part(namespace, 1)) as file, pytest.raises(ps.SchemaMismatch, match=message):
            file.check_fits(model)


class Tied(ToyMoE):
    """A head that is the embedding, and a buffer that is saved beside one that is not."""

    def __init__(self) -> None:
        super().__init__([])
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.full((), 3.0))
        self.register_buffer("table", torch.ones(2), persistent=False)


def test_tied_weights_are_kept_once_and_buffers_as_the_state_dict_has_them(namespace: ps.Namespace, tmp_path: Path) -> None:
    model = Tied()
    experts = bind(model, namespace)
    namespace.push({(0, 0): {name: torch.ones(shape) for name, shape in (("gate_up", (24, 8)), ("down", (8, 12)))}})
    experts.step(lr=1e-2).wait()
    experts.commit(1, dense=tmp_path).wait()
    assert load_file(part(namespace, 1).path).keys() == {"embedding.weight", "head.bias", "scale"}
    before = dense(model)
    with torch.no_grad():
        model.head.weight.zero_()
        model.scale.zero_()
    assert experts.load_dense() == 1
    assert equal(dense(model), before)
    assert model.head.weight is model.embedding.weight
