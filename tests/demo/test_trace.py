"""Equal means equal: the same steps, every bit of every loss."""

import math

from paramstore.demo.trace import StepTrace, equal_losses, total_traffic
from paramstore.demo.traffic import Traffic


def traces(*losses: float, first_step: int = 1, seconds: float = 1.0) -> list[StepTrace]:
    return [StepTrace(first_step + index, loss, seconds) for index, loss in enumerate(losses)]


def test_time_does_not_matter():
    assert equal_losses(traces(1.0, 2.0), traces(1.0, 2.0, seconds=9.0))


def test_one_bit_matters():
    assert not equal_losses(traces(1.0, 2.0), traces(1.0, math.nextafter(2.0, 3.0)))


def test_other_steps_are_not_equal():
    assert not equal_losses(traces(1.0, 2.0), traces(1.0, 2.0, first_step=2))
    assert not equal_losses(traces(1.0, 2.0), traces(1.0))


def test_nothing_proves_nothing():
    assert not equal_losses([], [])


def test_traffic_is_summed():
    steps = [StepTrace(1, 1.0, 1.0, Traffic(hits=2)), StepTrace(2, 1.0, 1.0, Traffic(hits=3, misses=1))]
    assert total_traffic(steps) == Traffic(hits=5, misses=1)
