"""The loop of a chat, with a terminal and a model that are lists."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from paramstore.errors import ConfigError
from paramstore.run.chat import Message, chat


class Model:
    """Answers lines, and refuses those that say so."""

    def __init__(self) -> None:
        self.heard: list[Sequence[Message]] = []
        self.told: list[str] = []

    def answer(self, messages: Sequence[Message]) -> str:
        if messages[-1]["content"] == "bad":
            raise ConfigError("the template says no")
        self.heard.append(messages)
        return f"to {messages[-1]['content']}"

    def chat(self, lines: Iterable[str], fits: Callable[[Sequence[Message]], bool] = lambda _: True) -> None:
        left = iter(lines)
        chat(lambda: next(left, None), self.answer, fits=fits, tell=self.told.append)

    def contents(self) -> list[list[str]]:
        return [[message["content"] for message in messages] for messages in self.heard]


def test_every_answer_is_given_all_that_was_said_before_it_and_empty_lines_nothing() -> None:
    model = Model()
    model.chat(["one", "  ", "two"])
    first = {"role": "user", "content": "one"}
    assert model.heard == [(first,), (first, {"role": "assistant", "content": "to one"}, {"role": "user", "content": "two"})]
    assert model.told == []


def test_a_line_that_is_refused_is_taken_back_and_the_conversation_goes_on() -> None:
    model = Model()
    model.chat(["one", "bad", "two"])
    assert model.contents() == [["one"], ["one", "to one", "two"]]
    assert model.told == ["the template says no. The line is taken back; the chat goes on"]


def test_the_oldest_turns_are_forgotten_where_the_model_has_no_room_and_the_last_line_never() -> None:
    model = Model()
    model.chat(["one", "two", "three"], fits=lambda messages: len(messages) <= 3)
    assert model.contents() == [["one"], ["one", "to one", "two"], ["two", "to two", "three"]]
    assert model.told == ["the oldest 1 turns are forgotten: the model takes no more than what was said since"]
    model = Model()
    model.chat(["one", "two"], fits=lambda _: False)
    assert model.contents() == [["one"], ["two"]]


def test_a_line_that_is_too_long_by_itself_takes_nothing_of_the_conversation_with_it() -> None:
    model = Model()
    model.chat(["one", "two", "bad", "three"], fits=lambda messages: messages[-1]["content"] != "bad")
    assert model.contents()[-1] == ["one", "to one", "two", "to two", "three"]
    assert model.told == ["the template says no. The line is taken back; the chat goes on"]
