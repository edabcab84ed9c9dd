"""The rank that torchrun gave this process, as `open_namespace` and `create_namespace` take it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TypedDict

from paramstore.core.arguments import mapping
from paramstore.errors import ConfigError


class Launch(TypedDict):
    """The rank of this process among those of its node. The client itself reads to which start of the job it belongs."""

    rank: int
    world_size: int


def launched(environment: Mapping[str, str] | None = None) -> Launch:
    """The rank of a process that torchrun started: `store.open_namespace(name, mode="write", **launched())`.

    Outside of torchrun: rank 0 of 1. environment: default this process's. Raises ConfigError on variables that are no numbers.
    """
    variables = os.environ if environment is None else mapping("environment", environment, "a mapping of variables")
    try:
        return Launch(rank=int(variables.get("LOCAL_RANK", "0")), world_size=int(variables.get("LOCAL_WORLD_SIZE", "1")))
    except ValueError as error:
        raise ConfigError(f"LOCAL_RANK and LOCAL_WORLD_SIZE must be whole numbers: {error}") from error
