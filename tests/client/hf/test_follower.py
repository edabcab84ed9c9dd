"""A served model moves to the trainer's newest step: experts and dense weights together, between tokens, or it says why not."""

from __future__ import annotations

import copy
import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import paramstore as ps
from paramstore.errors import ConfigError, StepDropped
from paramstore_client.device.copier import HostCopier
from paramstore_client.device.tier import DeviceTier
from paramstore_client.hf.compat import caches, modeling
from paramstore_client.hf.loading import newest_step
from paramstore_client.hf.loading.newest_step import TRIES_MAX
from paramstore_client.hf.loading.served_place import ServedPlace
from paramstore_client.hf.model.binding import layer_of
from paramstore_client.hf.model.layout import experts_modules
from paramstore_client.training.dense_files import DenseFile, dense_tensors
from paramstore_testkit.processes.daemon_process import QUIET, DaemonProcess
from paramstore_testkit.training.moe_families import EXPERTS, tiny_config
from paramstore_testkit.training.moe_models import tokens

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]

GREEDY: dict[str, Any] = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
LENDS_NOTHING = """
from paramstore.__main__ import main
from paramstore.storage.space.extents import Space
Space.may_borrow = lambda self, owner, length_bytes, **room: not length_bytes
main()
"""
_names = (f"followed{number}" for number in itertools.count())


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A daemon that lends no room to older steps: two commits drop the one on which a reader stands."""
    options = ("--host-budget", "128MiB", "--gradient-budget", "32MiB")
    command = (sys.executable, "-c", LENDS_NOTHING, "serve")
    with DaemonProcess(tmp_path_factory.mktemp("follow") / "store", *options, environment=QUIET, command=command) as daemon:
        yield daemon.address


class Job:
    """A trainer, and models that are served beside it; each with a connection of its own."""

    def __init__(self, address: str, directory: Path, family: str = "qwen3_moe", **changes: Any) -> None:
        self.name, self.dense, self.saved = next(_names), directory / "dense", directory / "saved"
        self.stores = [ps.connect(address), ps.connect(address)]
        torch.manual_seed(0)
        options = {"updates": "touched", "experts_implementation": "grouped_mm"}
        self.trained = ps.hf.from_config(auto(), tiny_config(family, **changes), store=self.stores[0], name=self.name, **options)
        self.trained.save_pretrained(self.saved)
        self.experts = ps.hf.experts(self.trained)
        self.optimizer = torch.optim.AdamW(self.trained.parameters(), lr=1e-2)
        self.experts.attach(self.optimizer)
        self.step = 0

    def commit(self, count: int = 1, *, length: int = 17, **options: Any) -> None:
        """Trains and commits so many steps. length: tokens of each of two sequences."""
        for _ in range(count):
            self.step += 1
            ids = tokens(seed=self.step, length=length)
            with torch.enable_grad():
                self.trained(input_ids=ids, labels=ids).loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.experts.commit(self.step, **{"dense": self.dense, **options}).wait()

    def serve(self, **options: Any) -> Any:
        given = {"name": self.name, "mode": "infer", "experts_implementation": "grouped_mm", **options}
        return ps.hf.from_pretrained(auto(), self.saved, store=self.stores[1], **given).eval()

    def check(self, served: Any) -> None:
        """Asserts that every weight is the trainer's of its last commit."""
        trained = dense_tensors(self.trained)
        for name, tensor in dense_tensors(served).items():
            assert torch.equal(tensor, trained[name]), name
        namespace = self.experts.namespace
        for key in namespace.space:
            with namespace.acquire([key]) as mine, ps.hf.namespace(served).acquire([key]) as its:
                assert all(torch.equal(mine[key][field], its[key][field]) for field in mine[key]), key


@pytest.fixture
def job(address: str, tmp_path: Path) -> Iterator[Job]:
    job = Job(address, tmp_path)
    yield job
    for store in job.stores:
        store.close()


def auto() -> Any:
    return modeling.transformers().AutoModelForCausalLM


def within(served: Any, act: Callable[[], None]) -> Any:
    """Has `act` called once, in the midst of the next forward: before its last layer's experts."""
    *_, last = experts_modules(served).values()

    def once(*_: Any) -> None:
        hook.remove()
        act()

    hook = last.register_forward_pre_hook(once)
    return hook


def test_a_model_moves_to_the_newest_step_as_a_whole_and_in_place(job: Job) -> None:
    job.commit()
    served = job.serve()
    places = {name: tensor.data_ptr() for name, tensor in dense_tensors(served).items()}
    job.check(served)
    assert ps.hf.follow(served) == ps.hf.Followed(1), "it was loaded with all that the step has"
    job.commit(3)
    moved = ps.hf.follow(served)
    assert (moved.step, moved.has_moved) == (4, True)
    assert moved.changed_keys
    assert moved.changed_bytes == moved.changed_keys * job.experts.namespace.schema.part("param").image_bytes
    assert moved.dense_bytes == next(file.stat().st_size for file in job.dense.glob("*.4.*.safetensors"))
    job.check(served)
    assert {name: tensor.data_ptr() for name, tensor in dense_tensors(served).items()} == places


def test_a_model_that_was_copied_and_its_copy_stay_at_their_step(job: Job) -> None:
    job.commit()
    served = job.serve()
    again = copy.deepcopy(served)
    with torch.no_grad():
        expected = served(tokens()).logits
        job.commit()
        for model in (served, again):
            with pytest.raises(ConfigError, match="was copied"):
                ps.hf.follow(model)
            assert torch.equal(model(tokens()).logits, expected)


def test_experts_in_device_slots_follow_and_what_has_not_changed_is_not_copied_again(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """On the device's twin. What is counted is what was copied."""
    moved, copy_fields = list[int](), HostCopier.copy

    def counted(self: HostCopier, fields: Any, **options: Any) -> Any:
        moved.append(sum(source.nbytes for _, source in fields))
        return copy_fields(self, fields, **options)

    monkeypatch.setattr(HostCopier, "copy", counted)
    monkeypatch.setattr(ServedPlace, "of", lambda *_, **__: ServedPlace(torch.device("cpu"), 2 * EXPERTS))
    job.commit()
    served, trained = job.serve(), job.trained.eval()
    tier = layer_of(next(iter(experts_modules(served).values()))).source
    assert isinstance(tier, DeviceTier)
    keys = list(job.experts.namespace.space)
    expert_bytes = sum(field.length_bytes for field in tier.schema.part("param").fields)
    for number in range(4):
        followed = ps.hf.follow(served)
        assert (followed.step, followed.has_moved, moved) == (job.step, number > 0, []), "first it is there already"
        changed = followed.changed_keys if number else len(keys)
        assert changed
        assert not number or changed < len(keys)
        before, dropped = tier.stats.bytes_copied, tier.stats.refetches
        with torch.no_grad():
            assert torch.equal(served(tokens()).logits, trained(tokens()).logits)
        with tier.fetch(keys) as its, job.experts.namespace.acquire(keys) as mine:
            assert all(torch.equal(its[key][name], mine[key][name]) for key in keys for name in mine[key])
        assert sum(moved) == tier.stats.bytes_copied - before == changed * expert_bytes
        assert tier.stats.refetches - dropped == (changed if number else 0)
        moved.clear()
        job.commit(length=2)
    with torch.no_grad(), ps.hf.following(served) as progress:
        within(served, job.commit)
        served.generate(tokens()[:1], **GREEDY)
        assert torch.equal(served(tokens()).logits, trained(tokens()).logits)
    assert (progress.move_count, ps.hf.namespace(served).view_step) == (2, job.step)
    tier.close()


def test_a_model_follows_back_where_the_trainer_went_back(job: Job) -> None:
    job.commit(2)
    served = job.serve()
    ps.hf.follow(served)
    job.experts.rollback(1)
    job.experts.load_dense()
    assert ps.hf.follow(served).step == 1
    job.check(served)
    job.step = 1
    job.commit(1)
    assert ps.hf.follow(served).step == 2
    job.check(served)


@pytest.mark.parametrize("damage", ["missing", "cut off", "another byte", "of another model", "moved", "no note", "a newer note"])
def test_a_model_stays_where_it_is_while_the_newest_step_is_not_whole(job: Job, tmp_path: Path, damage: str) -> None:
    job.commit()
    served = job.serve()
    ps.hf.follow(served)
    expected = {name: tensor.clone() for name, tensor in dense_tensors(served).items()}
    extra = b"\0paramstore dense\0\x09\0\0\0\0\0" if damage == "a newer note" else b"my own"
    if damage == "of another model":
        job.trained.register_buffer("tail", torch.ones(1))
    job.commit(1, **({"dense": None, "extra": extra} if "note" in damage else {}))
    for file in job.dense.glob("*.2.*.safetensors"):
        data = file.read_bytes()
        if damage == "missing":
            file.unlink()
        elif damage == "moved":
            job.dense.rename(tmp_path / "moved")
        elif damage != "of another model":
            file.write_bytes(data[:-1] + (b"" if damage == "cut off" else bytes([data[-1] ^ 1])))
    said = {
        "missing": "No such file", "cut off": "were committed", "another byte": "its checksum is", "moved": "No such file",
        "of another model": "'tail' of the file of the dense weights are not in the model", "no note": "names no dense weights",
        "a newer note": "noted in version 9",
    }  # fmt: skip
    for _ in range(2):
        stayed = ps.hf.follow(served)
        assert (stayed.step, stayed.has_moved, stayed.dense_bytes) == (1, False, 0)
        assert stayed.reason is not None
        assert "step 2" in stayed.reason
        assert said[damage] in stayed.reason
    assert all(torch.equal(tensor, expected[name]) for name, tensor in dense_tensors(served).items())
    if damage == "moved":
        assert ps.hf.follow(served, directory=tmp_path / "moved").step == 2
    elif damage == "of another model":
        del job.trained.tail
        job.commit()
        assert ps.hf.follow(served).step == 3
        job.check(served)


def test_steps_that_go_while_they_are_looked_at_are_passed_by(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    job.commit()
    served = job.serve()
    looked: list[int] = []
    whole = newest_step.opened

    def opened_late(dense: Any, directory: Path | None) -> Any:
        if len(looked) < commits:
            looked.append(job.step)
            job.commit(3)
        return whole(dense, directory)

    monkeypatch.setattr(newest_step, "opened", opened_late)
    commits = 2
    job.commit()
    assert ps.hf.follow(served).step == job.step == 8
    job.check(served)
    commits = 2 + TRIES_MAX
    job.commit(1)
    stayed = ps.hf.follow(served)
    assert stayed.reason is not None
    assert stayed.reason.startswith(f"{TRIES_MAX} steps in a row were dropped")
    assert (len(looked), stayed.has_moved) == (2 + TRIES_MAX, False)
    assert ps.hf.follow(served).step == job.step
    job.check(served)


def test_a_step_that_comes_after_the_look_is_left_for_the_next_move(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    job.commit()
    served = job.serve()
    fits = DenseFile.check_fits

    def check_late(file: Any, model: Any) -> None:
        fits(file, model)
        job.commit()

    with monkeypatch.context() as late:
        late.setattr(DenseFile, "check_fits", check_late)
        job.commit()
        assert ps.hf.follow(served).step == ps.hf.namespace(served).view_step == 2
    assert ps.hf.follow(served).step == ps.hf.namespace(served).view_step == job.step == 3
    job.check(served)


def test_generate_moves_between_two_tokens_and_only_there(job: Job) -> None:
    job.commit()
    served = job.serve()
    seen: list[int | None] = []
    prompt = tokens()[:1]

    def look(*_: Any) -> None:
        seen.append(ps.hf.namespace(served).view_step)

    for module in experts_modules(served).values():
        module.register_forward_pre_hook(look)
    with torch.no_grad(), ps.hf.following(served) as progress:
        within(served, lambda: job.commit(1))
        made = served.generate(prompt, **GREEDY)
        assert made.shape[1] == prompt.shape[1] + 12
        layers = len(experts_modules(served))
        assert set(seen) == {1, 2}
        assert [len({*seen[start : start + layers]}) for start in range(0, len(seen), layers)] == [1] * (len(seen) // layers)
        assert (progress.move_count, progress.repeat_count) == (1, 0)
        assert progress.last is not None
        assert progress.last.step == 2
    assert "forward" not in served.__dict__
    job.check(served)


def test_a_token_whose_step_is_dropped_within_it_is_computed_again_at_the_newest(job: Job) -> None:
    job.commit()
    served = job.serve(expert_memory=2)
    prompt, cache_class, name = tokens()[:1], modeling.transformers().DynamicCache, caches.name_in(served.forward)
    with torch.no_grad(), ps.hf.following(served) as progress:
        cache = cache_class(config=served.config)
        token = served(input_ids=prompt, **{name: cache}).logits[:, -1:].argmax(-1)
        for number in range(3):
            before = copy.deepcopy(cache)
            within(served, lambda: job.commit(4))
            logits = served(input_ids=token, **{name: cache}).logits
            assert progress.repeat_count == number + 1
            assert (ps.hf.namespace(served).view_step, job.step) == (5 + 4 * number, 5 + 4 * number)
            fresh = job.serve(expert_memory=2)
            ps.hf.follow(fresh)
            assert torch.equal(logits, fresh(input_ids=token, **{name: before}).logits)
            assert equal_caches(cache, before)
            ps.hf.namespace(fresh).close()
            token = logits[:, -1:].argmax(-1)


def equal_caches(left: Any, right: Any) -> bool:
    pairs = list(zip(left.layers, right.layers, strict=True))
    return all(torch.equal(one.keys, other.keys) and torch.equal(one.values, other.values) for one, other in pairs)


@pytest.mark.parametrize("options", [{}, {"cache_implementation": "static"}, {"num_beams": 2}], ids=["dynamic", "static", "beams"])
@pytest.mark.parametrize("at_token", [0, 4])
def test_generate_goes_on_where_a_step_is_dropped_within_a_token(
    address: str, tmp_path: Path, options: dict[str, Any], at_token: int
) -> None:
    """Tokens and logits are those of an equal model that has moved between this token and the one before."""
    made = []
    for is_dropped in (True, False):
        job = Job(address, tmp_path / str(is_dropped))
        job.commit()
        served, count = job.serve(expert_memory=2), itertools.count()

        def begin(*_: Any, job: Job = job, served: Any = served, count: Any = count, is_dropped: bool = is_dropped) -> None:
            if next(count) != at_token:
                return
            if is_dropped:
                within(served, lambda: job.commit(4))
                return
            job.commit(4)
            assert ps.hf.follow(served).step == 5

        served.register_forward_pre_hook(begin)
        with torch.no_grad(), ps.hf.following(served) as progress:
            made.append(served.generate(tokens(), **GREEDY, **options, return_dict_in_generate=True, output_logits=True))
        assert progress.repeat_count == is_dropped
        job.check(served)
        for store in job.stores:
            store.close()
    assert torch.equal(made[0].sequences, made[1].sequences)
    assert len(made[0].logits) == len(made[1].logits) == 12
    assert all(torch.equal(*pair) for pair in zip(made[0].logits, made[1].logits, strict=True))


def test_a_cache_that_cannot_be_cropped_is_an_error_that_says_so(address: str, tmp_path: Path) -> None:
    job = Job(address, tmp_path, "qwen3_next")
    job.commit()
    served = job.serve(expert_memory=2)
    with torch.no_grad(), ps.hf.following(served):
        within(served, lambda: job.commit(4))
        with pytest.raises(StepDropped, match=r"cannot be computed again: .*Linear.* of layer \d"):
            served.generate(tokens()[:1], **GREEDY)
    assert ps.hf.follow(served).step == job.step
    for store in job.stores:
        store.close()


def test_a_model_whose_step_is_dropped_and_that_cannot_move_says_why(job: Job) -> None:
    job.commit()
    served = job.serve(expert_memory=2)
    with torch.no_grad(), ps.hf.following(served) as progress:
        within(served, lambda: job.commit(4, dense=None))
        with pytest.raises(StepDropped, match="The model cannot move on: step 5 names no dense weights"):
            served(input_ids=tokens())
    assert progress.repeat_count == 0


def test_what_is_not_served_does_not_follow(job: Job) -> None:
    for call in (ps.hf.follow, ps.hf.following):
        with pytest.raises(ConfigError, match="this model trains"):
            call(job.trained)
        with pytest.raises(ConfigError, match="has no stored experts"):
            call(torch.nn.Linear(1, 1))
    with ps.hf.following(job.serve()) as progress, pytest.raises(ConfigError, match="entered already"):
        progress.__enter__()
