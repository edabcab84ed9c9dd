"""The loop of a chat: a line, its answer, the next line, with all that was said before, as far as the model takes it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from paramstore.errors import ConfigError

Message = dict[str, str]
"""role ("user" or "assistant") and content, as chat templates take them."""
TURN = 2
"""Messages of a turn: a line and its answer."""


def user_says(content: str) -> Message:
    return {"role": "user", "content": content}


def chat(
    read: Callable[[], str | None], answer: Callable[[Sequence[Message]], str], *, fits: Callable[[Sequence[Message]], bool],
    tell: Callable[[str], object],
) -> None:  # fmt: skip
    """Answers every line until there is none. read: the next line; None at the end. answer: is given all messages so far, and
    returns what it answered, which may have been stopped half-way. fits: whether the model has room for an answer to them: where it
    has none, the oldest turns are forgotten. tell: is given lines for people.

    A line that `answer` refuses with a ConfigError is taken back, and the chat goes on.
    """
    said: list[Message] = []
    while (line := read()) is not None:
        if not line.strip():
            continue
        kept, forgotten = [*said, user_says(line)], 0
        try:
            while len(kept) > TURN and not fits(tuple(kept)):
                del kept[:TURN]
                forgotten += 1
            if forgotten and fits(tuple(kept)):
                tell(f"the oldest {forgotten} turns are forgotten: the model takes no more than what was said since")
            said = [*kept, {"role": "assistant", "content": answer(tuple(kept))}]
        except ConfigError as error:
            tell(f"{error}. The line is taken back; the chat goes on")
