"""Puts an optimizer's options into an `Apply`: AdamW's as fields of their own, which every minor of the protocol knows."""

from __future__ import annotations

from paramstore.core.optimizers import AdamW, Options, describe, options_from_description
from paramstore.wire.applies import Apply, BeginApply


def apply_message(request_id: int, handle: int, options: Options, grad_scale: float) -> Apply:
    """Makes the request for one step. Other options than AdamW's need a daemon of TRAINING_MINOR."""
    if isinstance(options, AdamW):
        beta1, beta2 = options.betas
        return Apply(request_id, handle, options.lr, beta1, beta2, options.eps, options.weight_decay, grad_scale)
    return Apply(request_id, handle, options.lr, 0.0, 0.0, 0.0, 0.0, grad_scale, describe(options))


def begin_message(request_id: int, handle: int, options: Options, grad_scale: float) -> BeginApply:
    """Makes the request that opens an apply."""
    plain = apply_message(request_id, handle, options, grad_scale)
    return BeginApply(*(getattr(plain, name) for name in plain.__struct_fields__))


def options_of(message: Apply | BeginApply) -> Options:
    """Returns the options that `apply_message` was given. Raises ConfigError where the message has none that an optimizer takes."""
    if message.options is not None:
        return options_from_description(message.options)
    betas = message.beta1, message.beta2
    return AdamW(lr=message.lr, betas=betas, eps=message.eps, weight_decay=message.weight_decay)
