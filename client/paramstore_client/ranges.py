"""Names under which torch's profiler sees what the client does; `ps.training.Timeline` looks for them.

While no profiler runs a range is one look at a flag, where `record_function` by itself would cost some thirty times as much.
"""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any

EXCHANGE = "paramstore::exchange"
"""What other ranks send is waited for: rows, or the messages before them."""
EXPERTS = "paramstore::experts"
"""Experts compute, forward or backward, from leases that are held."""
ACQUIRE = "paramstore::acquire"
"""A lease is waited for."""
PUSH = "paramstore::push"
"""Gradients are copied into shared memory, and announced."""

_NONE = nullcontext()


def named(name: str) -> AbstractContextManager[Any]:
    """A block that the profiler shows as `name`, where one runs."""
    profiler: Any = sys.modules.get("torch.autograd.profiler")  # without torch nothing is profiled
    if profiler is None or not profiler._is_profiler_enabled:
        return _NONE
    block: AbstractContextManager[Any] = profiler.record_function(name)
    return block
