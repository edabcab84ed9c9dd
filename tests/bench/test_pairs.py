"""Ratios come from pairs, taken in alternating order."""

from __future__ import annotations

import pytest

from paramstore.bench.pairs import Pair, Pairs, Sample, percentile, sample_pairs


def pair(our_seconds: float, limit_seconds: float) -> Pair:
    return Pair(Sample(10.0, our_seconds), Sample(10.0, limit_seconds))


def test_ratio_is_our_rate_over_the_limits() -> None:
    assert pair(2.0, 1.0).ratio == 0.5


def test_ratio_of_the_row_is_the_median_of_pairs_and_not_a_ratio_of_medians() -> None:
    # A machine that slows down fourfold half-way: each pair says 0.5, medians of unequal halves would not.
    pairs = Pairs((pair(2, 1), pair(2, 1), pair(8, 4), pair(8, 4), pair(8, 3.2)))
    assert pairs.ratio == pytest.approx(0.5)
    assert pairs.ratio_min == pytest.approx(0.4)
    assert pairs.ratio_max == pytest.approx(0.5)
    assert pairs.rate == pytest.approx(10 / 8)
    assert pairs.limit_rate == pytest.approx(10 / 3.2)


def test_order_alternates_and_warm_up_rounds_are_not_counted() -> None:
    calls: list[tuple[str, int]] = []

    def ours(number: int) -> Sample:
        calls.append(("ours", number))
        return Sample(1.0, 2.0)

    def limit(number: int) -> Sample:
        calls.append(("limit", number))
        return Sample(1.0, 1.0)

    pairs = sample_pairs(3, ours, limit)

    assert calls == [
        ("ours", -1), ("limit", -1),
        ("ours", 0), ("limit", 0),
        ("limit", 1), ("ours", 1),
        ("ours", 2), ("limit", 2),
    ]  # fmt: skip
    assert len(pairs.pairs) == 3
    assert pairs.ratio == 0.5


def test_cpu_is_summed_over_all_samples_before_it_is_divided() -> None:
    pairs = Pairs((Pair(Sample(1e9, 1.0, 0.0), Sample(1e9, 1.0, 0.01)), Pair(Sample(1e9, 1.0, 0.1), Sample(1e9, 1.0, 0.03))))
    assert pairs.cpu_s_per_gb == pytest.approx(0.05)
    assert pairs.limit_cpu_s_per_gb == pytest.approx(0.02)


def test_parts_are_medians_and_a_missing_one_counts_as_zero() -> None:
    samples = [Sample(1.0, seconds, parts={"flush_s": 0.5} if seconds > 1 else {}) for seconds in (1.0, 2.0, 3.0)]
    parts = Pairs(tuple(Pair(sample, Sample(1.0, 1.0)) for sample in samples)).parts()
    assert parts["ours_s"] == 2.0
    assert parts["limit_s"] == 1.0
    assert parts["extra_s"] == 1.0
    assert parts["flush_s"] == 0.5


@pytest.mark.parametrize(("percent", "value"), [(50, 50), (99, 99), (100, 100), (0, 1)])
def test_percentile_takes_the_nearest_rank(percent: float, value: int) -> None:
    assert percentile(list(range(100, 0, -1)), percent) == value


def test_percentile_of_few_values_is_one_of_them() -> None:
    assert percentile([3.0], 99) == 3.0
    assert percentile([1.0, 2.0, 3.0], 50) == 2.0
