"""The loop of a chat: a line, its answer, the next line, with all that was said before."""

from __future__ import annotations

from collections.abc import Callable, Sequence

Message = dict[str, str]
"""role ("user" or "assistant") and content, as chat templates take them."""


def user_says(content: str) -> Message:
    return {"role": "user", "content": content}


def chat(read: Callable[[], str | None], answer: Callable[[Sequence[Message]], str]) -> None:
    """Answers every line until there is none. read: the next line; None at the end. answer: is given all messages so far, and
    returns what it answered, which may have been stopped half-way."""
    said: list[Message] = []
    while (line := read()) is not None:
        if not line.strip():
            continue
        said.append(user_says(line))
        said.append({"role": "assistant", "content": answer(tuple(said))})
