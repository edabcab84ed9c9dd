"""A named range is in the profiler's picture, and nothing where no profiler runs."""

from __future__ import annotations

from contextlib import nullcontext

from torch.profiler import ProfilerActivity, profile

from paramstore_client.ranges import EXCHANGE, named


def test_a_range_is_seen_by_a_profiler_that_runs() -> None:
    with profile(activities=[ProfilerActivity.CPU]) as seen, named(EXCHANGE):
        pass
    assert EXCHANGE in {event.name for event in seen.events()}


def test_a_range_without_a_profiler_is_the_same_empty_block_each_time() -> None:
    assert isinstance(named(EXCHANGE), nullcontext)
    assert named(EXCHANGE) is named(EXCHANGE)
