"""Answers of a model in memory: the prompt it is given, how many tokens, which ones, and the figures by a clock of the test's
own."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from transformers import AutoTokenizer

from paramstore.errors import ConfigError
from paramstore.policy.slot_visit import SlotCounts
from paramstore.run import answers
from paramstore.run.answers import TOKENS_MAX, Answers, AnswerSettings, _Listener
from paramstore.run.chat import user_says
from paramstore.run.model import RunModel
from paramstore.testing.clock import ManualClock
from paramstore_client.hf.loading.newest_step import Followed
from paramstore_testkit.training.small_tokenizer import save_tokenizer

CONTEXT = 96


class Echo:
    """A model that answers with what it was given last, a token a second, as often as it may."""

    def __init__(self, clock: ManualClock) -> None:
        self.clock = clock
        self.given: list[dict[str, Any]] = []
        self.stop_at = -1
        self.stop: Any = None
        self.generation_config = SimpleNamespace(max_new_tokens=None)
        self.config = SimpleNamespace(get_text_config=lambda decoder: SimpleNamespace(max_position_embeddings=CONTEXT))

    def generate(self, *, input_ids: torch.Tensor, streamer: Any, stopping_criteria: Any, **given: Any) -> torch.Tensor:
        self.given.append({"input_ids": input_ids, **given})
        streamer.put(input_ids.cpu())
        made = input_ids
        for count in range(given["max_new_tokens"]):
            self.clock.advance(1.0)
            streamer.put(input_ids[0, -3:-2])
            made = torch.cat([made, input_ids[:, -3:-2]], dim=1)
            if count == self.stop_at:
                self.stop()
            if bool(stopping_criteria(made, None)):
                break
        streamer.end()
        return made


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def model(clock: ManualClock) -> Echo:
    return Echo(clock)


@pytest.fixture
def opened(model: Echo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunModel:
    save_tokenizer(tmp_path)
    counts = iter([SlotCounts(hits=1, misses=1), SlotCounts(hits=7, late=1, misses=3, passed=1)] * 3)
    monkeypatch.setattr(answers.hf, "counts", lambda _: next(counts))
    stats = {"namespaces": {"n": {"bytes_read": 0}}}
    store = SimpleNamespace(waited_s=0.0, stats=lambda: stats)
    return RunModel(model, AutoTokenizer.from_pretrained(tmp_path), cast(Any, store), cast(Any, SimpleNamespace(name="n")))


def test_an_answer_streams_and_is_counted(
    opened: RunModel, model: Echo, clock: ManualClock, capsys: pytest.CaptureFixture[str]
) -> None:
    told: list[str] = []
    asked = Answers(opened, AnswerSettings(tokens=3), tell=told.append, clock=clock)
    assert asked.answer([user_says("ab")]) == "nnn"  # of "assistant"
    assert capsys.readouterr().out == "nnn\n"
    prompt = "<|im_start|>user\nab<|im_end|>\n<|im_start|>assistant\n"
    assert opened.tokenizer.decode(model.given[0]["input_ids"][0]) == prompt
    figures = asked.figures
    assert (figures.tokens, figures.first_s, figures.further_s, figures.uses, figures.hits) == (3, 1.0, 2.0, 10, 6)
    assert told == []


def test_a_prompt_is_given_as_it_is_where_that_is_asked_for_or_there_is_no_template(opened: RunModel, model: Echo) -> None:
    told: list[str] = []
    Answers(opened, AnswerSettings(tokens=1, is_raw=True), tell=told.append).answer([user_says("abc")])
    assert told == []
    opened.tokenizer.chat_template = None
    Answers(opened, AnswerSettings(tokens=1), tell=told.append).answer([user_says("abc"), user_says("d")])
    assert [opened.tokenizer.decode(given["input_ids"][0]) for given in model.given] == ["abc", "abc\nd"]
    assert told == ["the model has no chat template: prompts are given to it as they are"]


def test_an_answer_that_is_stopped_ends_and_the_next_one_does_not(opened: RunModel, model: Echo) -> None:
    asked = Answers(opened, AnswerSettings(tokens=5, is_raw=True), tell=print)
    model.stop, model.stop_at = asked.stop, 1
    assert asked.answer([user_says("abc")]) == "aa"
    model.stop_at = -1
    assert asked.answer([user_says("abc")]) == "aaaaa"


def test_an_answer_that_is_stopped_before_its_first_token_has_one(
    opened: RunModel, model: Echo, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = Answers(opened, AnswerSettings(tokens=5, is_raw=True, follows=True), tell=print)
    monkeypatch.setattr(answers.hf, "follow", lambda _: (asked.stop(), SimpleNamespace(has_moved=False, reason=None))[1])
    assert asked.answer([user_says("abc")]) == "a"


def test_a_model_whose_experts_do_not_stand_has_no_hits(
    opened: RunModel, model: Echo, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: object) -> SlotCounts:
        raise ConfigError("load it with mode='infer', without debug=True")

    monkeypatch.setattr(answers.hf, "counts", refuse)
    asked = Answers(opened, AnswerSettings(tokens=2, is_raw=True), tell=print)
    assert asked.answer([user_says("abc")]) == "aa"
    assert (asked.figures.uses, asked.figures.hits) == (0, 0)


def test_the_number_of_tokens_is_the_callers_else_the_checkpoints_else_ours_and_what_the_model_takes(
    opened: RunModel, model: Echo
) -> None:
    def most(length: int, tokens: int | None = None) -> int:
        return Answers(opened, AnswerSettings(tokens=tokens), tell=print)._most_new(length)

    assert most(4) == CONTEXT - 4
    model.generation_config.max_new_tokens = 7
    assert (most(4), most(4, 9), most(CONTEXT - 2, 9)) == (7, 9, 2)
    with pytest.raises(ConfigError, match=f"has {CONTEXT} tokens, .* the model takes {CONTEXT}: begin anew, or say less"):
        most(CONTEXT)
    model.config = SimpleNamespace(get_text_config=lambda decoder: SimpleNamespace())
    model.generation_config.max_new_tokens = None
    assert most(1 << 20) == TOKENS_MAX


def test_tokens_are_chosen_as_the_checkpoint_says_unless_the_caller_does() -> None:
    assert AnswerSettings().sampling() == {}
    assert AnswerSettings(temperature=0.0).sampling() == {"do_sample": False}
    assert AnswerSettings(temperature=0.7).sampling() == {"do_sample": True, "temperature": 0.7}


def test_a_chat_fits_where_an_answer_has_room(opened: RunModel) -> None:
    def fits(length: int, tokens: int | None = None) -> bool:
        return Answers(opened, AnswerSettings(tokens=tokens, is_raw=True), tell=print).fits([user_says("a" * length)])

    assert (fits(CONTEXT * 3 // 4), fits(CONTEXT * 3 // 4 + 1)) == (True, False)
    assert (fits(CONTEXT - 2, 2), fits(CONTEXT - 1, 2)) == (True, False)


def test_what_a_template_refuses_is_told(opened: RunModel) -> None:
    opened.tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    asked = Answers(opened, AnswerSettings(), tell=print)
    for ask in (asked.answer, asked.fits):
        with pytest.raises(ConfigError, match="chat template refuses what was said: roles must alternate; --raw gives"):
            ask([user_says("ab")])


def test_a_prompt_without_a_token_is_refused(opened: RunModel) -> None:
    with pytest.raises(ConfigError, match="the prompt '' has no token"):
        Answers(opened, AnswerSettings(is_raw=True), tell=print).answer([user_says("")])


def test_a_model_that_follows_moves_before_its_answer_and_says_so(
    opened: RunModel, model: Echo, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    moves = iter([Followed(4, has_moved=True), Followed(4), Followed(4, reason="step 5 names no file")])
    monkeypatch.setattr(answers.hf, "follow", lambda _: next(moves))
    asked = Answers(opened, AnswerSettings(tokens=1, follows=True), tell=told.append)
    for _ in range(3):
        asked.answer([user_says("abc")])
    assert told == ["at step 4", "at step 4: step 5 names no file"]


def test_a_listener_knows_no_first_token_where_none_came(clock: ManualClock) -> None:
    listener = _Listener(SimpleNamespace(put=lambda _: None, end=lambda: None), clock)
    clock.advance(5.0)
    listener.put(torch.zeros(1, 4))
    assert (listener.tokens, listener.first_s) == (0, 0.0)
