"""What a run counts is what the daemon moved: a ring of two layers, against a real daemon."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache, Qwen3MoeConfig

import paramstore as ps
from paramstore.bench.context import Bench
from paramstore.bench.limits.pages import param_kind
from paramstore.bench.plan import Plan
from paramstore.bench.service.daemon import serving
from paramstore_bench.decode.rows import RING, Cell, Work
from paramstore_bench.decode.runs import VOCABULARY, Models, prompt_of, run

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]

LAYERS, EXPERTS, SLOTS = 8, 8, 16
CONFIG = Qwen3MoeConfig(
    vocab_size=VOCABULARY, hidden_size=64, num_hidden_layers=LAYERS, num_attention_heads=2, num_key_value_heads=1, head_dim=32,
    intermediate_size=1024, moe_intermediate_size=1024, num_experts=EXPERTS, num_experts_per_tok=4,
)  # fmt: skip
PROMPT = Work(512, hides_loads=True)


@pytest.fixture
def models(tmp_path: Path) -> Iterator[Models]:
    """A ring of two layers, in a daemon that has memory for about half of all."""
    torch.manual_seed(0)
    memory = AutoModelForCausalLM.from_config(CONFIG, dtype=torch.bfloat16)
    memory.save_pretrained(tmp_path / "checkpoint")
    bench = Bench(Plan(), tmp_path)
    with serving(tmp_path / "store", host_budget_bytes=12 << 20) as service:
        ours = ps.hf.from_pretrained(
            AutoModelForCausalLM, tmp_path / "checkpoint", store=service.store, mode="infer", name="experts",
            expert_memory=SLOTS, residency="ring", dtype=torch.bfloat16,
        )  # fmt: skip
        with ps.hf.namespace(ours) as namespace:
            record_bytes = namespace.schema.part("param").image_bytes
            with bench.raw_file(tmp_path, param_kind(), record_bytes=record_bytes, record_count=2) as raw:
                yield Models(ours, memory, service, raw)


def test_a_ring_reads_each_expert_once_for_a_prompt_and_has_all_of_them_asked_for_when_their_layer_begins(models: Models) -> None:
    pairs = models.pairs(Cell(PROMPT, 0.25, 1, RING), rounds=3)
    kept = models.service.stats()["namespaces"]["experts"]["param"]["slots"]
    assert SLOTS < kept < LAYERS * EXPERTS - EXPERTS
    for pair in pairs:
        used, record_bytes = pair.ours.used, models.raw.record_bytes
        assert (used.uses, used.absent) == (LAYERS * EXPERTS, 0), "every expert is used, and on its way at least"
        assert used.read_bytes <= 1.06 * used.uses * (record_bytes + 4096), "none is read twice, and each with its header"
        assert used.read_bytes >= (used.uses - kept) * record_bytes, "what the daemon still has is not read again"
        assert pair.both_s is not None
        assert 0 < used.lacking_bytes <= (LAYERS - 1) * EXPERTS * record_bytes, "the first layer was there before"


def test_tokens_are_timed_behind_their_prompt_and_something_may_be_done_before_each(models: Models) -> None:
    calls: list[str] = []
    work = Work(8, new=3)
    seconds, logits = run(
        models.memory, work, prompt_of(work, 0), begin=lambda: calls.append("begin"), between=lambda: calls.append("between")
    )
    assert (calls, logits.shape) == (["begin", *["between"] * 3], (3, VOCABULARY))
    assert seconds > 0
    assert models.run_ours(work, prompt_of(work, 0)).logits.equal(logits)


class OlderModel(torch.nn.Module):
    """Takes its cache as models did before transformers 5.24, and notes it."""

    def __init__(self) -> None:
        super().__init__()
        self.config, self.caches = CONFIG, list[object]()

    def forward(self, input_ids: torch.Tensor, past_key_values: object, use_cache: bool, logits_to_keep: int) -> SimpleNamespace:
        self.caches.append(past_key_values)
        return SimpleNamespace(logits=torch.zeros(1, logits_to_keep, VOCABULARY))


def test_every_forward_is_given_the_same_cache_by_the_name_that_it_knows() -> None:
    model, work = OlderModel(), Work(8, new=3)
    run(model, work, prompt_of(work, 0))
    assert len(model.caches) == 4
    assert len({*map(id, model.caches)}) == 1
    assert isinstance(model.caches[0], DynamicCache)
