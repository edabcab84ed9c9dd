"""Answers of a model, token by token, and what they took."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paramstore.clock import Clock, MonotonicClock
from paramstore.errors import ConfigError, StoreUnavailable
from paramstore.run.chat import Message
from paramstore.run.figures import Figures
from paramstore.run.model import RunModel
from paramstore_client import hf
from paramstore_client.hf.compat import modeling

TOKENS_MAX = 1024
"""Most new tokens of an answer where neither the caller nor the checkpoint's generation_config says so; transformers' server has
the same."""
ROOM_SHARE = 4
"""A chat forgets its oldest turns where less than one in so many of the model's tokens is left for an answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerSettings:
    """How to answer. tokens: most new ones; None: as generation_config says, else TOKENS_MAX. temperature: None: as
    generation_config says, 0: the likeliest token, above it tokens are drawn. is_raw: the prompt is given as it is, whatever
    template there is. follows: the model moves to the newest step before each answer."""

    tokens: int | None = None
    temperature: float | None = None
    is_raw: bool = False
    follows: bool = False

    def sampling(self) -> dict[str, Any]:
        """Arguments of `generate`."""
        if self.temperature is None:
            return {}
        return {"do_sample": True, "temperature": self.temperature} if self.temperature else {"do_sample": False}


class _Listener:
    """A streamer that passes everything on to another, and notes when the first and the last token came. One for each answer."""

    def __init__(self, streamer: Any, clock: Clock) -> None:
        self._streamer, self._clock = streamer, clock
        self.tokens = -1  # the first that comes is the prompt
        self.first_s = self.last_s = clock.now_s()

    def put(self, tokens: Tensor) -> None:
        self._streamer.put(tokens)
        self.tokens += 1
        self.last_s = self._clock.now_s()
        if self.tokens == 1:
            self.first_s = self.last_s

    def end(self) -> None:
        self._streamer.end()


def stopping_when(is_over: Callable[[], bool]) -> list[Any]:
    """What `generate` takes as `stopping_criteria`, to end after the token at which `is_over` says so."""

    def criterion(input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        return input_ids.new_full((len(input_ids),), is_over(), dtype=torch.bool)

    return modeling.transformers().StoppingCriteriaList([criterion])  # type: ignore[no-any-return]


class Answers:
    """Owner of the figures so far. tell: is given lines for people. Used by one thread; `stop` may be called by a signal's
    handler."""

    def __init__(
        self, opened: RunModel, settings: AnswerSettings, *, tell: Callable[[str], object], clock: Clock | None = None
    ) -> None:  # fmt: skip
        self.figures = Figures()
        self._opened = opened
        self._settings = settings
        self._tell = tell
        self._clock: Clock = clock or MonotonicClock()
        self._is_stopped = False
        self._has_template = not settings.is_raw and bool(getattr(opened.tokenizer, "chat_template", None))
        if not self._has_template and not settings.is_raw:
            tell("the model has no chat template: prompts are given to it as they are")

    def stop(self) -> None:
        """Ends the answer under way after its next token."""
        self._is_stopped = True

    def answer(self, messages: Sequence[Message]) -> str:
        """Answers the last of `messages`, on stdout as the tokens come, and returns the answer. Raises ConfigError for a prompt
        that has no token, or more than the model takes, or that the chat template refuses; and what reading experts raises."""
        self._is_stopped = False
        if self._settings.follows:
            self._follow()
        transformers, model, tokenizer = modeling.transformers(), self._opened.model, self._opened.tokenizer
        prompt = self._encode(messages)
        length = prompt["input_ids"].shape[1]
        listener = _Listener(transformers.TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True), self._clock)
        before, begun_s = self._counted(), self._clock.now_s()
        try:
            made = model.generate(
                **prompt, streamer=listener, max_new_tokens=self._most_new(length), pad_token_id=self._padding(),
                stopping_criteria=stopping_when(lambda: self._is_stopped), **self._settings.sampling(),
            )  # fmt: skip
        except StoreUnavailable:
            listener.end()  # so that what is told of it begins a line
            raise
        uses, hits, bytes_read, waited_s = (now - then for now, then in zip(self._counted(), before, strict=True))
        self.figures += Figures(
            tokens=listener.tokens, answers=1, first_s=listener.first_s - begun_s, further_s=listener.last_s - listener.first_s,
            uses=int(uses), hits=int(hits), bytes_read=int(bytes_read), waited_s=waited_s,
        )  # fmt: skip
        return str(tokenizer.decode(made[0, length:], skip_special_tokens=True))

    def fits(self, messages: Sequence[Message]) -> bool:
        """Whether the model has room for an answer to `messages`, of all tokens that it may have or one in ROOM_SHARE of those that
        the model takes. Raises ConfigError as `answer` does."""
        length, most = self._encode(messages)["input_ids"].shape[1], self._most()
        return most is None or length + min(self._wanted(), -(-most // ROOM_SHARE)) <= most

    def _follow(self) -> None:
        moved = hf.follow(self._opened.model)
        if moved.has_moved or moved.reason is not None:
            self._tell(f"at step {moved.step}" + ("" if moved.reason is None else f": {moved.reason}"))

    def _encode(self, messages: Sequence[Message]) -> dict[str, Tensor]:
        """The prompt as tokens [1, T], with its mask."""
        tokenizer = self._opened.tokenizer
        if self._has_template:
            try:
                found = tokenizer.apply_chat_template(
                    list(messages), add_generation_prompt=True, return_tensors="pt", return_dict=True
                )  # fmt: skip
            except Exception as error:  # a template is a program of the checkpoint's
                raise ConfigError(
                    f"the model's chat template refuses what was said: {error}; --raw gives the prompt as it is"
                ) from error
        else:
            found = tokenizer("\n".join(message["content"] for message in messages), return_tensors="pt")
        if not found["input_ids"].shape[1]:
            raise ConfigError(f"the prompt {messages[-1]['content']!r} has no token: say something")
        return {name: found[name].long() for name in ("input_ids", "attention_mask")}

    def _most_new(self, length: int) -> int:
        """How many new tokens there may be after a prompt of `length`. Raises ConfigError where the model takes no more."""
        wanted, most = self._wanted(), self._most()
        if most is not None and length >= most:
            raise ConfigError(
                f"the prompt has {length} tokens, with what was said before; the model takes {most}: begin anew, or say less"
            )
        return wanted if most is None else min(wanted, most - length)

    def _wanted(self) -> int:
        """Most new tokens of an answer, where there is room."""
        return int(self._settings.tokens or self._opened.model.generation_config.max_new_tokens or TOKENS_MAX)

    def _most(self) -> int | None:
        """How many tokens the model takes, prompt and answer; None where it does not say."""
        found = getattr(self._opened.model.config.get_text_config(decoder=True), "max_position_embeddings", None)
        return None if found is None else int(found)

    def _padding(self) -> int | None:
        """The token that `generate` pads with, which with one sequence it never does, and warns of where there is none."""
        tokenizer = self._opened.tokenizer
        return tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id  # type: ignore[no-any-return]

    def _counted(self) -> tuple[int, int, int, float]:
        """Uses of experts, hits, bytes read from the volumes, seconds waited, all so far."""
        try:
            counts = hf.counts(self._opened.model)
        except ConfigError:  # PARAMSTORE_DEBUG is set: no expert stands
            uses = hits = 0
        else:
            uses, hits = counts.hits + counts.late + counts.misses + counts.passed, counts.hits
        waited_s = self._opened.store.waited_s
        return uses, hits, self._opened.bytes_read(), waited_s
