"""Counters become shares and bytes; the names are those of the daemon."""

import pytest

from paramstore.demo.traffic import TIERS, ExpertTiers, Memory, Traffic, resident_param_bytes

STATS = {
    "tiers": {
        "host": {"budget_bytes": 1000, "kernel_peak_bytes": 900},
        "nvme": {"bytes_read": 70, "bytes_written": 30},
        "pmem": {"bytes_read": 5, "bytes_written": 3},
    },
    "namespaces": {
        "moe": {
            "param": {"hits": 8, "misses": 2, "prefetched": 6, "wasted": 1, "slot_bytes": 4096, "resident": 3},
            "optim": {"hits": 1, "joins": 2, "misses": 9},
        }
    },
}


def test_reading_takes_weights_from_host_and_bytes_from_every_volume():
    traffic = Traffic.of(STATS, "moe")
    assert (traffic.hits, traffic.misses, traffic.optim_hits, traffic.optim_misses) == (8, 2, 3, 9)
    assert traffic.host_bytes == 10 * 4096
    assert (traffic.nvme_read_bytes, traffic.nvme_written_bytes, traffic.nvme_bytes) == (75, 33, 108)


def test_shares_of_lookups_make_one():
    traffic = Traffic.of(STATS, "moe")
    assert traffic.host_hit_rate == pytest.approx(0.8)
    assert traffic.prefetch_rate == pytest.approx(0.5)
    assert traffic.host_hit_rate + traffic.nvme_rate == pytest.approx(1.0)
    assert traffic.optim_hit_rate == pytest.approx(0.25)


def test_nothing_asked_is_no_division_by_zero():
    assert (Traffic().host_hit_rate, Traffic().nvme_rate, Traffic().optim_hit_rate) == (0.0, 0.0, 0.0)


def test_difference_and_sum_are_opposites():
    one, other = Traffic.of(STATS, "moe"), Traffic(hits=3, nvme_read_bytes=20)
    assert (one - other) + other == one
    assert (one - other).hits == 5


def test_prefetch_explains_no_more_than_the_hits():
    assert Traffic(hits=2, misses=2, prefetched=50).prefetch_rate == pytest.approx(0.5)


def test_memory_and_residency_are_read():
    assert Memory.of(STATS) == Memory(budget_bytes=1000, peak_bytes=900)
    assert resident_param_bytes(STATS, "moe") == 3 * 4096


def test_tiers_name_where_each_expert_is():
    residency = {
        "layers": [0, 1], "experts": 2, "param": ["ready", "absent", "loading", "absent"],
        "optim": ["clean", "dirty", "absent", "absent"], "heat": [1.0, 2.0, 3.0, 4.0],
    }  # fmt: skip
    placed = ExpertTiers.of(residency)
    assert placed.tiers == ((TIERS[0], TIERS[2]), (TIERS[1], TIERS[3]))
    assert placed.heat == ((1.0, 2.0), (3.0, 4.0))
