"""A fake daemon in a thread, and a client of it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import paramstore_client as ps
from paramstore_testkit.wire.fake_daemon import FakeDaemon

FIELDS = {"gate_up": (8, 4), "down": (4, 8)}


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[FakeDaemon]:
    with FakeDaemon(tmp_path / "daemon.sock") as daemon:
        yield daemon


@pytest.fixture
def store(daemon: FakeDaemon) -> Iterator[ps.Store]:
    with ps.connect(daemon.path, timeout_s=5.0) as store:
        yield store


@pytest.fixture
def values() -> Callable[[tuple[int, int]], dict[str, torch.Tensor]]:
    """The initial value of a key: every element names it."""

    def value_of(key: tuple[int, int]) -> dict[str, torch.Tensor]:
        layer, expert = key
        return {name: torch.full(shape, layer * 16.0 + expert) for name, shape in FIELDS.items()}

    return value_of


@pytest.fixture
def gradient() -> Callable[[float], dict[str, torch.Tensor]]:
    """Every field of one key's gradient, all elements `value`."""
    return lambda value: {name: torch.full(shape, value, dtype=torch.bfloat16) for name, shape in FIELDS.items()}


@pytest.fixture
def empty_namespace(store: ps.Store) -> ps.Namespace:
    """A writer's handle; no key has a value yet."""
    return store.create_namespace("moe", ps.adamw_schema(FIELDS), layers=2, experts=4)


@pytest.fixture
def namespace(empty_namespace: ps.Namespace, values: Callable[[tuple[int, int]], dict[str, torch.Tensor]]) -> ps.Namespace:
    """A writer's handle; every key has its initial value."""
    empty_namespace.initialize(values)
    return empty_namespace


@pytest.fixture
def open_descriptors() -> Callable[[], int]:
    """How many file descriptors this process has open now."""
    return lambda: len(os.listdir("/proc/self/fd"))
