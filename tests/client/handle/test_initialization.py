"""An initialization in steps: what is missing is said, what was saved stays, and a wrong call changes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import paramstore_client as ps
from paramstore.errors import CapacityError, SchemaMismatch, StepFailed, StepOutOfOrder, UnknownKey
from paramstore_testkit.processes.forked_daemon import ForkedDaemon

SHAPE = (16, 8)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ps.Store]:
    directory: Path = tmp_path_factory.mktemp("initialization") / "store"
    budgets = ("--host-budget", "32MiB", "--gradient-budget", "4MiB")
    with ForkedDaemon(directory, *budgets) as daemon, ps.connect(daemon.address) as store:
        yield store


def value(number: float) -> dict[str, torch.Tensor]:
    return {"w": torch.full(SHAPE, float(number))}


def new(store: ps.Store, name: str) -> ps.Namespace:
    return store.create_namespace(name, ps.adamw_schema({"w": SHAPE}, param_dtype="float32"), layers=[3, 7], experts=5)


def test_what_was_saved_is_missing_no_more_and_the_rest_can_be_given(store: ps.Store) -> None:
    with new(store, "saved") as namespace, namespace.begin_initialize() as first:
        assert (first.missing, first.extra) == (namespace.keys(), None)
        for number, key in enumerate(namespace.keys()[:7]):
            first.put(key, value(number))
        first.settle()
        assert first.save(b"seven").wait()["records"] == 7
        first.put((7, 2), value(7))
    with new(store, "saved") as namespace, namespace.begin_initialize() as second:
        assert (second.missing, second.extra) == ([(7, 2), (7, 3), (7, 4)], b"seven")
        for key in second.missing:
            second.put(key, value(namespace.keys().index(key)))
        second.end()
        assert second.missing == []
        namespace.commit(0, b"whole").wait()
        for number, key in enumerate(namespace.keys()):
            assert torch.equal(namespace.read(key)["w"], value(number)["w"])
        with pytest.raises(StepOutOfOrder):
            namespace.begin_initialize()


def test_a_wrong_value_is_refused_and_changes_nothing(store: ps.Store) -> None:
    with new(store, "wrong") as namespace, namespace.begin_initialize() as initialization:
        initialization.put((3, 0), value(1))
        for key in ((3, 0), (9, 9)):
            with pytest.raises(UnknownKey, match="has its value already, or is not in the namespace"):
                initialization.put(key, value(1))
        with pytest.raises(SchemaMismatch):
            initialization.put((3, 1), {"w": torch.zeros(3, 3)})
        with pytest.raises(CapacityError, match="extra"):
            initialization.save(bytes(65537))
        with pytest.raises(StepFailed, match=r"\(3, 1\) was never given"):
            initialization.end()
        assert initialization.missing[0] == (3, 1)


def test_without_resuming_it_starts_over(store: ps.Store) -> None:
    with new(store, "over") as namespace:
        with namespace.begin_initialize() as first:
            first.put((3, 0), value(1))
            first.settle()
            first.save(b"").wait()
        with namespace.begin_initialize(resume=False) as second:
            assert second.missing == namespace.keys()
        with namespace.begin_initialize() as third:
            assert (third.missing, third.extra) == (namespace.keys(), None)
            third.put((3, 4), value(2))
        namespace.initialize(lambda key: value(key[1]))
        namespace.commit(3).wait()
        assert namespace.reader(3).view_step == 3
