"""The loop of a chat, with a terminal and a model that are lists."""

from __future__ import annotations

from collections.abc import Sequence

from paramstore.run.chat import Message, chat


def test_every_answer_is_given_all_that_was_said_before_it_and_empty_lines_nothing() -> None:
    lines, heard = iter(["one", "  ", "two", None]), list[Sequence[Message]]()

    def answer(messages: Sequence[Message]) -> str:
        heard.append(messages)
        return f"to {messages[-1]['content']}"

    chat(lambda: next(lines), answer)
    first = {"role": "user", "content": "one"}
    assert heard == [(first,), (first, {"role": "assistant", "content": "to one"}, {"role": "user", "content": "two"})]
