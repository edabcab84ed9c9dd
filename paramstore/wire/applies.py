"""Requests that run the optimizer. `paramstore.wire.messages` is what others import."""

from __future__ import annotations

from typing import Any, ClassVar

from paramstore.wire.base import Keys, Layers, Message, Seconds


class Apply(Message, tag="apply"):
    """Runs the optimizer over everything pending. Result: {records, bytes_read, bytes_written}.

    options: None for AdamW, whose options are the fields before; else the optimizer's, as `core.optimizers.describe` gives
    them, and of the fields before `grad_scale` alone counts. Since TRAINING_MINOR.
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
    """Opens an apply before its gradients are there; the fields of an `Apply`. Answered when it is over, with the result of one,
    or with why it came to no end. Since TRAINING_MINOR.
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
    """The open apply takes what is pending. Result: {records, bytes_read, bytes_written}, when it is over. Since TRAINING_MINOR."""

    id: int
    handle: int


class EndLayers(Message, tag="end_layers"):
    """While an apply is open: the sender pushes no more gradients of these layers before it is closed. Since ROOM_MINOR."""

    id: int
    handle: int
    layers: Layers


class AwaitRoom(Message, tag="await_room"):
    """While an apply is open: waits until it has read the gradients of some of `keys`, which the sender pushed, for the last time.
    Result: those keys; their ranges are the sender's again. timeout_s: 0 asks without waiting, and may give none. Since ROOM_MINOR.
    """

    id: int
    handle: int
    keys: Keys
    timeout_s: Seconds
