"""A served model as its users load and run it, on a real daemon: what is wrong is refused and leaves nothing; what is right has the
tokens of the unmodified model."""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import paramstore as ps
from paramstore_client.hf.compat import caches, modeling
from paramstore_client.hf.model.binding import layer_of
from paramstore_client.hf.model.layout import experts_modules, find_layout
from paramstore_testkit.processes.forked_daemon import ForkedDaemon
from paramstore_testkit.training.moe_families import VOCABULARY
from paramstore_testkit.training.moe_models import tokens
from paramstore_testkit.training.parity import align
from paramstore_testkit.training.saved_models import load_stock, save_stock, weight_map

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("in_time", "one_thread")]

GREEDY: dict[str, Any] = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
EXPERT = "model.layers.1.mlp.experts.7.down_proj.weight"
TOP_K = 3


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkedDaemon]:
    with ForkedDaemon(tmp_path_factory.mktemp("serving") / "store", "--host-budget", "64MiB") as daemon:
        yield daemon


@pytest.fixture
def store(daemon: ForkedDaemon) -> Iterator[ps.Store]:
    with ps.connect(daemon.address) as store:
        yield store


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Several shards, bfloat16, two layers of 8 experts."""
    return save_stock("qwen3_moe", tmp_path_factory.mktemp("checkpoint") / "model")


@pytest.fixture(scope="module")
def stock(checkpoint: Path) -> Any:
    model = load_stock(checkpoint).eval()
    align(model)
    return model


@pytest.fixture
def spoilt(checkpoint: Path, tmp_path: Path) -> Path:
    """A copy of it, to be spoilt."""
    return Path(shutil.copytree(checkpoint, tmp_path / "spoilt"))


@pytest.fixture
def serve(store: ps.Store, checkpoint: Path) -> Iterator[Callable[..., Any]]:
    """Loads models, whose handles are closed in the end."""
    opened: list[ps.Namespace] = []

    def load(path: Path = checkpoint, **options: Any) -> Any:
        given = {"name": "served", "mode": "infer", "dtype": "auto", **options}
        model = ps.hf.from_pretrained(modeling.transformers().AutoModelForCausalLM, path, store=store, **given).eval()
        opened.append(ps.hf.namespace(model))
        align(model)
        return model

    yield load
    for namespace in opened:
        namespace.close()
    assert store.stats()["namespaces"].get("served", {"leased_slots": 0})["leased_slots"] == 0


def names(store: ps.Store) -> set[str]:
    return {known["name"] for known in store.namespaces()}


def configure(path: Path, **changes: Any) -> None:
    """Has a checkpoint's configuration say something else than its tensors."""
    file = path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def lose_shard(path: Path) -> None:
    (path / weight_map(path)[EXPERT]).unlink()


def cut_shard(path: Path) -> None:
    file = path / weight_map(path)[EXPERT]
    os.truncate(file, file.stat().st_size - 1)


def leave_pointer(path: Path) -> None:
    (path / weight_map(path)[EXPERT]).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")


def lose_expert(path: Path) -> None:
    index = path / "model.safetensors.index.json"
    described = json.loads(index.read_text())
    del described["weight_map"][EXPERT]
    index.write_text(json.dumps(described))


def keep_the_dense_part(path: Path) -> None:
    from safetensors.torch import load_file, save_file

    index = path / "model.safetensors.index.json"
    tensors = {name: value for file in sorted(path.glob("*.safetensors")) for name, value in load_file(file).items()}
    for file in (index, *path.glob("*.safetensors")):
        file.unlink()
    dense = {name: value for name, value in tensors.items() if ".experts." not in name}
    save_file(dense, path / "model.safetensors", metadata={"format": "pt"})


# --- what is wrong


@pytest.mark.parametrize(
    ("spoil", "error", "said"),
    [
        (lose_shard, ps.CheckpointError, r"the checkpoint is not whole: No such file .*model-\d+-of-\d+.safetensors"),
        (cut_shard, ps.CheckpointError, r"model-\d+-of-\d+.safetensors: cut off: tensor .*: fetch the file again"),
        (leave_pointer, ps.CheckpointError, r"model-\d+-of-\d+.safetensors: no safetensors file"),
        (lose_expert, ps.CheckpointError, f"tensor '{EXPERT}' is missing"),
        (keep_the_dense_part, ps.CheckpointError, "no tensor of the checkpoint becomes 'model.layers.0.mlp.experts.gate_up_proj'"),
        (lambda path: configure(path, moe_intermediate_size=16), ps.CheckpointError, r"makes \[48, 32\] for an expert"),
        (lambda path: configure(path, vocab_size=VOCABULARY // 2), RuntimeError, "ignore_mismatched_sizes"),  # transformers' own
    ],
    ids=[
        "missing shard", "cut shard", "pointer", "missing expert", "dense part alone", "shape of experts", "shape of dense weights",
    ],
)  # fmt: skip
def test_a_checkpoint_that_does_not_fit_is_refused_and_no_namespace_is_made(
    spoil: Callable[[Path], None], error: type[Exception], said: str, spoilt: Path, checkpoint: Path, stock: Any, store: ps.Store,
    serve: Callable[..., Any],
) -> None:  # fmt: skip
    spoil(spoilt)
    before = names(store)
    with pytest.raises(error, match=said):
        serve(spoilt, name="spoilt")
    assert names(store) == before
    assert torch.equal(serve().generate(tokens(), **GREEDY), stock.generate(tokens(), **GREEDY))


def test_heat_of_another_model_is_refused_and_no_namespace_is_made_and_that_of_this_one_is_taken(
    store: ps.Store, serve: Callable[..., Any], stock: Any
) -> None:
    with pytest.raises(ps.UnknownKey, match=r"\(2, 0\) is not in namespace"):
        serve(name="heated", heat={(2, 0): 1.0})
    assert "heated" not in {known["name"] for known in store.namespaces()}
    served = serve(name="heated", heat={(1, 7): 2.0, (0, 3): 1.0})
    assert torch.equal(served.generate(tokens(), **GREEDY), stock.generate(tokens(), **GREEDY))


def test_a_namespace_of_another_dtype_or_shape_is_refused_and_stays(spoilt: Path, serve: Callable[..., Any], stock: Any) -> None:
    serve()
    with pytest.raises(ps.SchemaMismatch, match=r"'float32'\).* load with the same dtype"):
        serve(dtype=torch.float32)
    configure(spoilt, moe_intermediate_size=16)
    with pytest.raises(ps.SchemaMismatch, match=r"\(32, 32\).*; the namespace has .*\(48, 32\).*: name another namespace"):
        serve(spoilt)
    assert torch.equal(serve().generate(tokens(), **GREEDY), stock.generate(tokens(), **GREEDY))


def test_a_namespace_without_values_is_filled_if_it_is_of_these_experts_and_else_refused(
    store: ps.Store, serve: Callable[..., Any], stock: Any
) -> None:
    layout = find_layout(stock)
    shape = {"layers": layout.layers, "experts": layout.experts}
    store.create_namespace("empty", layout.schema(None), **shape).close()
    store.create_namespace("empty-other", ps.param_schema({"w": ((4, 4), "float32")}), **shape).close()
    for name in ("empty", "empty-other"):
        with pytest.raises(ps.StepFailed, match="no committed step yet"):
            store.open_namespace(name)
    with pytest.raises(ps.NamespaceExists, match="give this one another name"):
        serve(name="empty-other")
    assert torch.equal(serve(name="empty").generate(tokens(), **GREEDY), stock.generate(tokens(), **GREEDY))


@pytest.mark.parametrize(
    ("memory", "said"),
    [(0, "a number of experts from 1"), (-1, "from 1"), ("0B", "holds no expert: one takes 12288"), ("4KiB", "'4KiB'")],
)
def test_memory_for_no_expert_is_refused_with_the_size_of_one(
    memory: Any, said: str, store: ps.Store, serve: Callable[..., Any]
) -> None:
    before = names(store)
    with pytest.raises(ps.ConfigError, match=said):
        serve(name="none", expert_memory=memory)
    assert names(store) == before


# --- what is right


@pytest.mark.parametrize("residency", ["auto", "ring", "buffer"])
@pytest.mark.parametrize("slots", [1, TOP_K - 1, 16])
def test_fewer_slots_than_a_token_takes_experts_give_its_tokens(
    slots: int, residency: str, serve: Callable[..., Any], stock: Any
) -> None:
    assert stock.config.num_experts_per_tok == TOP_K
    served = serve(expert_memory=slots, residency=residency)
    assert layer_of(next(iter(experts_modules(served).values()))).source.lease_slots == slots
    for ids in (tokens(), tokens(seed=2)[:1, :1]):
        assert torch.equal(served.generate(ids, **GREEDY), stock.generate(ids, **GREEDY))


def test_counts_are_those_of_the_bytes_that_moved(store: ps.Store, serve: Callable[..., Any]) -> None:
    served, used = serve(expert_memory=16), list[int]()
    namespace = ps.hf.namespace(served)
    for module in experts_modules(served).values():
        module.register_forward_pre_hook(lambda module, inputs: used.append(len(inputs[1].unique())))

    def bytes_read() -> int:
        return sum(int(volume["bytes_read"]) for volume in store.stats()["volumes"].values())

    def forget() -> int:
        namespace.refresh()  # what stands is given back at the next visit, or for who leases
        with namespace.acquire(namespace.keys()[:1]):
            pass
        namespace.evict().wait()
        return bytes_read()

    served.generate(tokens(), **GREEDY)
    before_bytes = forget()
    namespace.acquire(namespace.keys()[:1]).release()
    record_bytes = bytes_read() - before_bytes
    before_bytes, before = forget(), ps.hf.counts(served)
    used.clear()
    served.generate(tokens(), **GREEDY)
    counts = ps.hf.counts(served)
    loads = counts.loads - before.loads
    assert bytes_read() - before_bytes == loads * record_bytes
    assert 0 < loads <= 16
    assert sum(getattr(counts, kind) - getattr(before, kind) for kind in ("hits", "late", "misses", "passed")) == sum(used)
    assert counts.hits - before.hits >= sum(used) - loads, "what did not move was there"


@pytest.mark.parametrize("device_map", ["cpu", "auto", {"": "cpu"}], ids=str)
def test_a_device_map_on_the_host_serves_from_there(device_map: Any, serve: Callable[..., Any], stock: Any) -> None:
    if device_map == "auto" and torch.cuda.is_available():
        pytest.skip("a CUDA device would be chosen")
    served = serve(device_map=device_map, expert_memory=4)
    assert torch.equal(served.generate(tokens(), **GREEDY), stock.generate(tokens(), **GREEDY))


@pytest.mark.parametrize(
    "device_map", [0, "cuda", torch.device("cuda", 0), {"": 0}, {"": "cuda:0"}, {"model": "cpu", "": 0}], ids=str
)
def test_a_device_map_of_a_cuda_device_that_is_not_there_is_refused_before_anything_is_loaded(
    device_map: Any, store: ps.Store, serve: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = names(store)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr("paramstore_client.hf.loading.stored_models.stripped_class", None)
    with pytest.raises(ps.ConfigError, match="finds 0 CUDA devices here; device_map='cpu', or none, serves from host memory"):
        serve(name="nowhere", device_map=device_map)
    assert names(store) == before


def test_a_device_map_that_offloads_layers_is_refused_with_the_way_out(
    store: ps.Store, serve: Callable[..., Any], tmp_path: Path
) -> None:
    before = names(store)
    placed = dict.fromkeys(("model.embed_tokens", "model.layers.0", "model.norm", "model.rotary_emb", "lm_head"), "cpu")
    with pytest.raises(ps.UnsupportedModel, match=r"lie on cpu, meta: .*device_map=\{'': 0\}"):
        serve(name="offloaded", device_map={**placed, "model.layers.1": "disk"}, offload_folder=tmp_path / "offloaded")
    assert names(store) == before


class Letters:
    """As much of a tokenizer as streamers ask for: every token is a letter."""

    def decode(self, ids: Any, **_: Any) -> str:
        return "".join(chr(ord("A") + int(token)) for token in ids)


def text_of(made: Tensor, prompt: Tensor) -> str:
    return Letters().decode(made[0, prompt.shape[1] :])


def test_streamers_tell_the_unmodified_models_text(
    serve: Callable[..., Any], stock: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    transformers, prompt = modeling.transformers(), tokens()[:1]
    expected = text_of(stock.generate(prompt, **GREEDY), prompt)
    served = serve(expert_memory=4)
    served.generate(prompt, streamer=transformers.TextStreamer(Letters(), skip_prompt=True), **GREEDY)
    assert capsys.readouterr().out == f"{expected}\n"
    pieces = transformers.TextIteratorStreamer(Letters(), skip_prompt=True, timeout=20.0)
    writer = threading.Thread(target=served.generate, args=(prompt,), kwargs={"streamer": pieces, **GREEDY})
    writer.start()
    told = list(pieces)
    writer.join()
    assert "".join(told) == expected


def test_continuous_batches_on_their_own_thread_have_the_unmodified_models_tokens(serve: Callable[..., Any], stock: Any) -> None:
    transformers = modeling.transformers()
    prompts = [row[:length].tolist() for row, length in zip(tokens(batch=3), (9, 5, 17), strict=True)]
    options = {
        "generation_config": transformers.GenerationConfig(max_new_tokens=8, do_sample=False, pad_token_id=0, eos_token_id=-1),
        "continuous_batching_config": transformers.ContinuousBatchingConfig(
            page_size=16, num_blocks=16, max_batch_tokens=64, max_requests_per_batch=4, use_async_batching=False,
            auto_switch_to_flash=False,
        ),
    }  # fmt: skip
    threads: set[int] = set()
    served = serve(expert_memory=4)
    for module in experts_modules(served).values():
        module.register_forward_pre_hook(lambda *_: threads.add(threading.get_ident()))
    made = [
        sorted(tuple(answer.generated_tokens) for answer in model.generate_batch(prompts, **options).values())
        for model in (stock, served)
    ]
    assert made[0] == made[1]
    assert len(threads) == 1
    assert threading.get_ident() not in threads


@pytest.mark.parametrize("room", [8, 20], ids=["prompt", "answer"])
def test_a_prompt_or_answer_longer_than_the_cache_is_transformers_error_and_the_model_goes_on(
    room: int, serve: Callable[..., Any], stock: Any
) -> None:
    prompt, served = tokens(), serve(expert_memory=4)
    said = []
    for model in (stock, served):
        cache = modeling.transformers().StaticCache(config=model.config, max_cache_len=room)
        with pytest.raises(IndexError) as error:
            model.generate(prompt, **{caches.name_in(model.forward): cache}, **GREEDY)
        said.append(str(error.value))
        with pytest.raises(ValueError, match="`max_length` is set to 8"):
            model.generate(prompt, max_length=8, do_sample=False, pad_token_id=0)
    assert said[0] == said[1]
    assert torch.equal(served.generate(prompt, **GREEDY), stock.generate(prompt, **GREEDY))
