"""Options travel whole, and AdamW's in the message that every minor of the protocol knows."""

from __future__ import annotations

import msgspec
import pytest

from paramstore.core.optimizers import SGD, Adagrad, AdamW, Options
from paramstore.errors import ConfigError
from paramstore.wire.codec import LENGTH, decode_request, encode
from paramstore.wire.messages import Apply, BeginApply
from paramstore.wire.options import apply_message, begin_message, options_of

EXAMPLES: list[Options] = [
    AdamW(lr=0.5, betas=(0.1, 0.2), eps=0.3, weight_decay=0.4), SGD(lr=0.5, momentum=0.9, nesterov=True),
    Adagrad(lr=0.5, lr_decay=0.1, weight_decay=0.2, initial_accumulator_value=0.3, eps=0.4),
]  # fmt: skip


@pytest.mark.parametrize("options", EXAMPLES)
def test_options_come_out_as_they_went_in(options: Options) -> None:
    message = decode_request(encode(apply_message(7, 3, options, 0.25))[LENGTH.size :])
    assert isinstance(message, Apply)
    assert (message.id, message.handle, message.grad_scale) == (7, 3, 0.25)
    assert options_of(message) == options


@pytest.mark.parametrize("options", EXAMPLES)
def test_options_of_an_apply_that_begins_early_are_the_same(options: Options) -> None:
    message = decode_request(encode(begin_message(7, 3, options, 0.25))[LENGTH.size :])
    assert isinstance(message, BeginApply)
    assert (message.id, message.handle, message.grad_scale, options_of(message)) == (7, 3, 0.25, options)


def test_an_apply_of_adamw_is_the_message_of_older_daemons() -> None:
    body = msgspec.msgpack.decode(encode(apply_message(7, 3, EXAMPLES[0], 0.25))[LENGTH.size :])
    assert body == ["apply", 7, 3, 0.5, 0.1, 0.2, 0.3, 0.4, 0.25]


@pytest.mark.parametrize("options", [{}, {"kind": "lion"}, {"kind": "sgd", "lr": [1]}, {"kind": "sgd", "lr": -1.0}])
def test_options_that_no_optimizer_takes_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        options_of(Apply(7, 3, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0, options))


def test_bad_numbers_of_adamw_are_refused() -> None:
    with pytest.raises(ConfigError, match="lr=-1"):
        options_of(Apply(7, 3, -1.0, 0.9, 0.9, 0.0, 0.0, 1.0))
