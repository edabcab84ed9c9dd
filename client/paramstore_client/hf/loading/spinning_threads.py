"""Tells who computes with every core that OpenMP's threads can wait without taking one.

Between two products they spin, about a millisecond each time, on the cores that the daemon reads and checks with, and that this
process wakes up on. OpenMP reads OMP_WAIT_POLICY when torch is imported: only who starts the process can set it.
"""

from __future__ import annotations

import logging
import os
from functools import cache

import torch

_log = logging.getLogger(__name__)


def advise(slots: int, keys: int) -> None:
    """Logs a warning, once a process, where `keys` experts share `slots` of memory, so that some are read again and again, beside
    threads that spin on every core."""
    threads, cores = torch.get_num_threads(), len(os.sched_getaffinity(0))
    if slots < keys and threads >= max(cores, 2) and os.environ.get("OMP_WAIT_POLICY", "").lower() != "passive":
        _tell(threads, cores)


@cache
def _tell(threads: int, cores: int) -> None:
    _log.warning(
        "torch computes with %d threads on %d cores, which spin while they wait and take the cores that loads of experts need: "
        "start the process with OMP_WAIT_POLICY=PASSIVE, or give torch fewer threads", threads, cores,
    )  # fmt: skip
