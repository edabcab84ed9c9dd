"""Requests that run the optimizer. `paramstore.wire.messages` is what others import."""

from __future__ import annotations

from typing import Any, ClassVar

from paramstore.wire.base import Keys, Layers, Message, Seconds


class Apply(Message, tag="apply"):
    """Runs the optimizer over everything pending. Result: {records, bytes_read, bytes_written}.

    options: None for AdamW, whose options are the fields before; otherwise as `core.optimizers.describe` returns them, and of
    the fields before only `grad_scale` counts. Since TRAINING_MINOR.
    """

    ADDED_FIELDS: ClassVar[int] = 1

    id: int
    handle: int
    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    grad_scale: float
    options: dict[str, Any] | None = None


class BeginApply(Message, tag="begin_apply"):
    """Opens an apply before its gradients are there; has the fields of `Apply`. Answered when the apply is over, with the result of
    an `Apply`, or with why it was given up. Since TRAINING_MINOR.
    """

    id: int
    handle: int
    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    grad_scale: float
    options: dict[str, Any] | None = None


class EndApply(Message, tag="end_apply"):
    """Closes the open apply, which claims what is pending. Result, when it is over: as of `Apply`. Since TRAINING_MINOR."""

    id: int
    handle: int


class EndLayers(Message, tag="end_layers"):
    """Says that the sender pushes no more gradients of these layers before the open apply is closed. Since ROOM_MINOR."""

    id: int
    handle: int
    layers: Layers


class AwaitRoom(Message, tag="await_room"):
    """Waits until the open apply has read the gradients of some of `keys`, which the sender pushed, for the last time. Result:
    those keys; their ranges are the sender's again. timeout_s: 0 asks without waiting, and may return none. Since ROOM_MINOR.
    """

    id: int
    handle: int
    keys: Keys
    timeout_s: Seconds
