"""The AdamW update of one stretch of a field in C (`adamw.c`), where the machine has a compiler and its torch gives the same bits.

- What it gives is bitwise what `torch._fused_adamw_`, `torch.add`, `torch.mul` and the casts around them give, NaN aside: a NaN is
  a NaN, which one is not promised. `kernel` checks that against torch before it hands the function out.
- It is a matter of speed alone: without it, torch does the work. `PARAMSTORE_NATIVE=0` leaves it out.
"""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path

from paramstore_native.adamw_kernel import Kernel
from paramstore_native.compiled import Unavailable, build

logger = logging.getLogger(__name__)

SWITCH_VARIABLE = "PARAMSTORE_NATIVE"
SOURCE = Path(__file__).with_name("adamw.c")

_lock = threading.Lock()
_found: list[Kernel | Unavailable] = []
"""The kernel, or why there is none, once this process knows; empty before."""


def kernel() -> Kernel | None:
    """The kernel, or None where torch has to do its work. The first call builds and checks it (a second, once per machine, else
    20 ms and torch's import) and logs which of the two is used; later calls are free."""
    with _lock:
        if not _found:
            _found.append(_find())
    return found if isinstance(found := _found[0], Kernel) else None


def known_state() -> str:
    """The state in words for people: `native`, `torch (why)`, or empty while neither was needed."""
    if not _found:
        return ""
    return f"torch ({_found[0].reason})" if isinstance(_found[0], Unavailable) else "native"


def _find() -> Kernel | Unavailable:
    found = Unavailable(f"{SWITCH_VARIABLE}=0") if os.environ.get(SWITCH_VARIABLE) == "0" else load()
    if isinstance(found, Unavailable):
        logger.info("AdamW runs in torch: %s", found.reason)
    else:
        logger.info("AdamW runs in the native kernel")
    return found


def load(cache: Path | None = None) -> Kernel | Unavailable:
    """The kernel built in `cache` (default: the user's) if it gives what torch gives here, else why there is none."""
    library = build(SOURCE, cache=cache)
    if isinstance(library, Unavailable):
        return library
    try:
        made = Kernel(library)
    except (OSError, AttributeError) as error:
        return Unavailable(f"{library} cannot be loaded: {error}")
    if not made.serves("float32"):
        return Unavailable("this CPU has no fused multiply-add")
    from paramstore_native.adamw_check import difference  # imports torch, which callers have imported already

    return Unavailable(reason) if (reason := difference(made)) else made
