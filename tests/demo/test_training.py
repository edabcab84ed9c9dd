"""Training out of a store equals training in memory, bit for bit, and goes on exactly from a restored state."""

import copy

import pytest
import torch

from paramstore.demo.batches import held_out_batches
from paramstore.demo.training import ResidentPlace, StoredPlace, Trainer, adamw_options, expert_schema, repeatable
from paramstore.errors import CorruptRecord


def resident_trainer(settings, corpus) -> tuple[Trainer, ResidentPlace]:
    place = ResidentPlace(settings.shape, seed=settings.seed)
    return Trainer(settings, corpus, place), place


def test_stored_experts_train_bitwise_as_resident_ones(settings, corpus, namespace):
    stored_place = StoredPlace(namespace)
    stored = Trainer(settings, corpus, stored_place)
    resident, resident_place = resident_trainer(settings, corpus)
    for _ in range(6):
        assert stored.train_step() == resident.train_step()
    assert stored_place.digests() == resident_place.digests()
    assert len(stored_place.digests()) == settings.shape.expert_count
    assert namespace.leased == []


def test_digest_notices_one_bit(settings):
    place = ResidentPlace(settings.shape, seed=0)
    before = place.digests()
    with torch.no_grad():
        next(place.layer(1).parameters())[0, 0] += 1e-6
    changed = [key for key, digest in place.digests().items() if digest != before[key]]
    assert changed == [(1, 0)]


def test_loss_falls(settings, corpus):
    trainer, _ = resident_trainer(settings, corpus)
    losses = [trainer.train_step().loss for _ in range(12)]
    assert sum(losses[-3:]) < 0.98 * sum(losses[:3])


def test_experts_without_tokens_do_not_move(settings, corpus):
    trainer, place = resident_trainer(settings, corpus)
    trainer.train_step()  # all experts have moments now
    assert (trainer.routed_tokens > 0).all()
    with torch.no_grad():
        for block in trainer.model.blocks:
            block.router.weight.zero_()  # ties go to the same experts
    before = place.digests()
    trainer.routed_tokens.zero_()
    trainer.train_step()
    moved = {key for key, digest in place.digests().items() if digest != before[key]}
    idle = {(layer, int(expert)) for layer in range(2) for expert in (trainer.routed_tokens[layer] == 0).nonzero()}
    assert idle
    assert moved.isdisjoint(idle)


def test_restored_trainer_repeats_the_steps_bitwise(settings, corpus):
    trainer, place = resident_trainer(settings, corpus)
    for _ in range(3):
        trainer.train_step()
    state = {name: value.detach().clone() for name, value in trainer.dense_state().items()}
    experts = [{name: value.detach().clone() for name, value in place.layer(layer).state_dict().items()} for layer in range(2)]
    moments = copy.deepcopy(place.optimizer.state_dict())
    expected = [trainer.train_step() for _ in range(3)]
    again, again_place = resident_trainer(settings, corpus)
    for layer in range(2):
        again_place.layer(layer).load_state_dict(experts[layer])
    again_place.optimizer.load_state_dict(moments)
    again.restore(state)
    assert [again.train_step() for _ in range(3)] == expected


def test_state_of_step_0_can_be_restored(settings, corpus):
    trainer, _ = resident_trainer(settings, corpus)
    state = trainer.dense_state()
    again, _ = resident_trainer(settings, corpus)
    again.train_step()
    again.restore(state)
    assert again.step == 0


def test_state_of_another_model_is_refused(settings, corpus):
    trainer, _ = resident_trainer(settings, corpus)
    state = trainer.dense_state()
    state["model/head.bias"] = torch.zeros(7)
    with pytest.raises(CorruptRecord, match="another model"):
        trainer.restore(state)
    with pytest.raises(CorruptRecord, match="another model"):
        trainer.restore({})


def test_evaluation_changes_nothing(settings, corpus):
    trainer, place = resident_trainer(settings, corpus)
    before = place.digests()
    loss = trainer.evaluate(held_out_batches(corpus, count=2, batch=4, context=16))
    assert 1.0 < loss < 6.0
    assert place.digests() == before
    assert all(parameter.grad is None for parameter in trainer.model.parameters())


def test_learning_rate_warms_up_then_falls(settings):
    rates = [adamw_options(settings, step, lr=1.0).lr for step in range(1, settings.steps + 1)]
    assert rates[0] < rates[settings.warmup_steps - 1]
    assert max(rates) == rates[settings.warmup_steps - 1]
    assert rates[-1] == pytest.approx(settings.final_lr_share)


def test_schema_keeps_every_bit_of_the_master_weights(settings):
    schema = expert_schema(settings.shape)
    assert schema.gradient_dtype == "float32"
    assert {field.dtype for field in schema.part("param").fields} == {"float32"}
    assert schema.parameter_elements == settings.shape.parameters_per_expert


def test_repeatable_gives_back_what_it_changed():
    torch.use_deterministic_algorithms(False)
    with repeatable(threads=2):
        assert torch.get_num_threads() == 2
        assert torch.are_deterministic_algorithms_enabled()
    assert torch.get_num_threads() == 1
    assert not torch.are_deterministic_algorithms_enabled()
