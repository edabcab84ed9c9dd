from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import paramstore_client as ps
from paramstore.wire import messages as m
from paramstore_client.handle.initial_values import PUTS_IN_FLIGHT
from paramstore_testkit.wire.fake_daemon import FakeDaemon, FakeSession

Values = Callable[[tuple[int, int]], dict[str, torch.Tensor]]


def test_every_key_is_put_once_in_key_order(daemon: FakeDaemon, empty_namespace: ps.Namespace, values: Values) -> None:
    empty_namespace.initialize(values)
    assert [put.key for put in daemon.requests(m.InitializePut)] == empty_namespace.keys()
    kinds = [type(request) for request in daemon.received if isinstance(request, m.InitializeBegin | m.InitializeEnd)]
    assert kinds == [m.InitializeBegin, m.InitializeEnd]
    with empty_namespace.acquire([(1, 2)]) as lease:
        assert (lease[1, 2]["gate_up"] == 18).all()


def test_puts_in_flight_are_bounded(daemon: FakeDaemon, store: ps.Store) -> None:
    open_puts: list[int] = []
    in_flight: list[int] = []

    def answer_the_oldest_of_many(session: FakeSession, request: m.InitializePut) -> None:
        open_puts.append(request.id)
        is_last = len(daemon.requests(m.InitializePut)) == 64
        while open_puts and (is_last or len(open_puts) >= PUTS_IN_FLIGHT):
            session.send(m.Done(open_puts.pop(0)))

    def count(key: tuple[int, int]) -> dict[str, torch.Tensor]:
        in_flight.append(len(store._connection._tickets))
        return {"w": torch.zeros(4, dtype=torch.int8)}

    daemon.script(m.InitializePut, answer_the_oldest_of_many)
    many = store.create_namespace("many", ps.param_schema({"w": ((4,), "int8")}), layers=4, experts=16)
    many.initialize(count)
    assert max(in_flight) == PUTS_IN_FLIGHT
    assert len(in_flight) == 64


def test_values_in_the_param_dtype_are_widened(empty_namespace: ps.Namespace, values: Values) -> None:
    empty_namespace.initialize(lambda key: {name: value.bfloat16() for name, value in values(key).items()})
    assert empty_namespace.read((0, 2))["master/down"].dtype == torch.float32
    assert (empty_namespace.read((0, 2))["master/down"] == 2).all()


def test_value_of_a_wrong_shape_is_named(empty_namespace: ps.Namespace, values: Values) -> None:
    def wrong_at_the_second(key: tuple[int, int]) -> dict[str, torch.Tensor]:
        value = values(key)
        return value if key == (0, 0) else {**value, "down": torch.zeros(3)}

    with pytest.raises(ps.SchemaMismatch, match=r"key \(0, 1\), field 'down'"):
        empty_namespace.initialize(wrong_at_the_second)


def test_initialize_starts_over_after_a_failure(
    daemon: FakeDaemon, empty_namespace: ps.Namespace, values: Values
) -> None:
    daemon.fail(m.InitializePut, ps.VolumeError("volume 0: EIO"))
    with pytest.raises(ps.VolumeError):
        empty_namespace.initialize(values)
    empty_namespace.initialize(values)
    with empty_namespace.acquire([(0, 0)]) as lease:
        assert (lease[0, 0]["down"] == 0).all()


def test_error_of_the_callers_function_comes_through(empty_namespace: ps.Namespace) -> None:
    def fails(key: tuple[int, int]) -> dict[str, torch.Tensor]:
        raise ArithmeticError("no value")

    with pytest.raises(ArithmeticError, match="no value"):
        empty_namespace.initialize(fails)


def test_ranges_come_back_after_initialize(empty_namespace: ps.Namespace, values: Values) -> None:
    empty_namespace.initialize(values)
    area = empty_namespace._area
    assert area.free_bytes() == area.size_bytes


def test_area_too_small_for_many_values_takes_them_one_by_one(daemon: FakeDaemon, store: ps.Store) -> None:
    daemon.upload_budget_bytes = 4 << 20
    large = store.create_namespace("large", ps.adamw_schema({"w": (512, 1024)}), layers=1, experts=6)
    large.initialize(lambda key: {"w": torch.full((512, 1024), float(key[1]))})
    with large.acquire([(0, 5)]) as lease:
        assert (lease[0, 5]["w"] == 5).all()
    assert daemon.upload_bytes == 4 << 20
