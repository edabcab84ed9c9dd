"""The common parts of all messages: limits, keys and the base class. Others import `paramstore.wire.messages`."""

from __future__ import annotations

import sys
from typing import Annotated, ClassVar

import msgspec

PROTOCOL_MAJOR = 1
PROTOCOL_MINOR = 10
VERIFY_MINOR = 1
"""The first minor in which a daemon knows `Verify`."""
PREPARE_MINOR = 2
"""The first minor in which a daemon knows `Prepare` and `Finalize`, and opens a writer `at` a step."""
TRAINING_MINOR = 3
"""The first minor in which a daemon knows ranks, optimizers other than AdamW, exact updates and declared schedules."""
ROOM_MINOR = 4
"""The first minor in which a daemon knows `EndLayers` and `AwaitRoom`, and tells a rank its share of the gradient budget."""
PROMISE_MINOR = 4
"""The first minor in which `lease_slots` of a handle never changes, and `min_lease_slots` asks for more."""
STEPS_MINOR = 5
"""The first minor in which a daemon knows `AwaitStep`, and counts what a `Refresh` changes."""
FOLLOW_MINOR = 6
"""The first minor in which a `Refresh` may name the step."""
LOANS_MINOR = 7
"""The first minor in which a daemon lends lease slots beyond the promise."""
BOUND_MINOR = 8
"""The first minor in which a reader says how many lease slots it is to be promised at most."""
ABSENT_MINOR = 9
"""The first minor in which a client understands how many keys of a lease were absent."""
HEAT_MINOR = 10
"""The first minor in which an `InitializeBegin` says how much the records are to be used."""
EXTENTS_MINOR = 10
"""The first minor in which a daemon knows `AcquireExtents`."""
MAGIC = "paramstore"

KEYS_MAX = 1 << 17
"""The most keys in one request."""
EXTENT_KEYS_MAX = 64
"""The most keys in one request for extents: its answer brings a descriptor of each volume at most."""
EXTRA_BYTES_MAX = 64 << 10
SEGMENTS_PER_FRAME_MAX = 64
STEP_WAITS_MAX = 64
"""The most `AwaitStep` of one session under way: each is woken at every commit."""
LABEL_MAX = 64

Key = tuple[int, int]
Keys = Annotated[list[Key], msgspec.Meta(max_length=KEYS_MAX)]
ExtentKeys = Annotated[list[Key], msgspec.Meta(min_length=1, max_length=EXTENT_KEYS_MAX)]
Modes = Annotated[list[tuple[int, Annotated[str, msgspec.Meta(max_length=LABEL_MAX)]]], msgspec.Meta(max_length=EXTENT_KEYS_MAX)]
"""Pairs of a volume and the word for how it is read."""
Layers = Annotated[list[int], msgspec.Meta(max_length=KEYS_MAX)]
Seconds = Annotated[float, msgspec.Meta(ge=-sys.float_info.max)]
"""A time to wait: neither nan nor minus infinity."""


VISITS_MAX = 1 << 14
"""The most visits of one declared cycle: 64 layers forward and backward for 127 micro-batches."""
VisitPairs = Annotated[tuple[tuple[int, str], ...], msgspec.Meta(max_length=VISITS_MAX)]


class Message(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """Base of all messages; each is an array whose first item is its tag.

    ADDED_FIELDS: how many fields at its end an older peer of this major does not know. Those at the end that have their defaults
    are not sent, so that such a peer understands the rest.
    """

    ADDED_FIELDS: ClassVar[int] = 0
