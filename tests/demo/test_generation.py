"""Text comes out of fewer layer slots than layers, is repeatable, and shows in a terminal."""

import pytest
import torch

from paramstore.demo.generation import RUN_BYTES_MAX, continue_bytes, generate, prompts
from paramstore.demo.model import ByteTransformer
from paramstore.demo.training import ResidentPlace, Trainer
from paramstore_client.nn import StoredExperts


@pytest.fixture
def dense(settings, corpus):
    return Trainer(settings, corpus, ResidentPlace(settings.shape, seed=0)).dense_state()


def test_every_domain_is_continued_and_repeatably(namespace, dense, corpus, settings):
    one, other = (
        generate(namespace, dense, corpus, settings, count_resident_bytes=lambda: 0) for _ in range(2)
    )  # fmt: skip
    assert one.samples == other.samples
    assert [sample.domain for sample in one.samples] == ["python", "cpp", "maths", "prose"]
    assert all(len(sample.continuation) == settings.generated_bytes for sample in one.samples)
    assert namespace.leased == []


def test_text_is_that_of_the_model_in_memory(namespace, dense, corpus, settings):
    resident = ByteTransformer(settings.shape, ResidentPlace(settings.shape, seed=0).layer, seed=0)
    stored = ByteTransformer(settings.shape, lambda layer: StoredExperts(namespace, layer), seed=0)
    with torch.no_grad():
        one, other = (
            torch.stack(list(continue_bytes(model, prompts(corpus), 12, seed=4))) for model in (resident, stored)
        )  # fmt: skip
    assert torch.equal(one, other)


def test_what_was_resident_is_the_most_that_was_seen(namespace, dense, corpus, settings):
    looks = iter([100, 50_000, 300])
    generation = generate(namespace, dense, corpus, settings, count_resident_bytes=lambda: next(looks))
    assert generation.resident_bytes == 50_000
    assert generation.resident_fraction == 50_000 / generation.total_bytes
    assert generation.total_bytes == settings.shape.expert_count * namespace.schema.part("param").image_bytes
    assert 0 < generation.leased_bytes < generation.total_bytes


def test_prompts_are_held_out_and_start_a_line(corpus):
    for row, text in zip(prompts(corpus), corpus.domains, strict=True):
        valid = bytes(text.valid.numpy())
        assert b"\n" + bytes(row.tolist()) in valid


class Stubborn(torch.nn.Module):
    """Always wants the same byte."""

    blocks = ()

    def forward(self, bytes_, cache):
        logits = torch.zeros(*bytes_.shape, 256)
        logits[..., 65] = 100.0
        return logits, None


def test_no_byte_runs_on_for_ever():
    prompt = torch.full((1, 20), 66)
    text = bytes(int(byte) for byte in continue_bytes(Stubborn(), prompt, 40, seed=0))
    assert b"A" * RUN_BYTES_MAX in text
    assert b"A" * (RUN_BYTES_MAX + 1) not in text


def test_unprintable_bytes_are_shown_as_dots(namespace, dense, corpus, settings):
    dense["model/head.bias"] = torch.where(torch.arange(256) == 7, 50.0, 0.0)
    generation = generate(namespace, dense, corpus, settings, count_resident_bytes=lambda: 0)
    assert "·" in generation.samples[0].continuation
    assert all(letter.isprintable() or letter == "\n" for letter in generation.samples[0].continuation)
