"""Rows of decoding with guesses beside decoding without: what is asked where, and from when a demand read is waited for."""

from __future__ import annotations

import pytest

from paramstore_bench.guesses.speculating import Cell, Decoded, limited, rows_of, waits_of


def run(seconds: float, *, hits: int = 50, read_bytes: int = 1000, waits_s: tuple[float, ...] = (1e-3,)) -> Decoded:
    return Decoded(seconds, visited=100, hits=hits, read_bytes=read_bytes, waits_s=waits_s)


def transfer(expert: int, urgency: str, submitted_s: float, ended_s: float) -> list[object]:
    return ["load", "experts", 0, expert, urgency, 10, submitted_s, submitted_s, ended_s]


def test_a_wait_begins_where_the_client_asks_or_the_read_is_submitted() -> None:
    asked = {(0, 1): [10.0, 50.0], (0, 2): [10.0], (0, 3): [30.0]}
    rows = [
        transfer(1, "demand", 10.5, 12.0), transfer(2, "demand", 4.0, 13.0), transfer(3, "prefetch", 5.0, 6.0),
        transfer(4, "demand", 5.0, 6.0), transfer(3, "demand", 5.0, 6.0),
    ]  # fmt: skip
    assert waits_of(rows, asked) == [1.5, 3.0], "a guess that is awaited counts from there; others' reads are not ours"


def test_two_runs_are_added_to_one() -> None:
    assert run(1.0).with_more(run(0.5, hits=70, read_bytes=10, waits_s=(2.0, 3.0))) == Decoded(
        1.5, visited=200, hits=120, read_bytes=1010, waits_s=[1e-3, 2.0, 3.0]
    )


def test_a_quarter_is_asked_for_hits_and_loads_and_all_for_speed_and_waits() -> None:
    pairs = [(run(1.0, hits=85, read_bytes=1200), run(1.0)), (run(2.0, hits=85, read_bytes=1200), run(2.2))]
    speed, waits, hits, loads = rows_of(Cell(0.25, 1, 1), pairs, tokens=10, compute_s=1.0, record_bytes=8)
    assert (speed.ratio, speed.ratio_min, speed.ratio_max, speed.holds) == (pytest.approx(1.05), 1.0, pytest.approx(1.1), True)
    assert (speed.target and speed.target.bound, waits.ratio, waits.holds) == (0.98, 1.0, True)
    assert (hits.value, hits.holds, loads.ratio, loads.holds) == (pytest.approx(0.35), True, 1.2, True)
    half = rows_of(Cell(0.5, 1, 1), pairs, tokens=10, compute_s=1.0, record_bytes=8)
    assert [row.holds for row in half[2:]] == [None, None]
    more = [(run(1.0, hits=85, read_bytes=1400), run(1.0))]
    assert rows_of(Cell(0.25, 1, 1), more, tokens=10, compute_s=1.0, record_bytes=8)[3].holds is False


def test_a_slow_volume_within_reach_is_asked_for_more_speed() -> None:
    pairs = [(run(1.0), run(1.1))]
    for bytes_per_s, bound in ((1000.0, 1.15), (500.0, 0.98)):
        rows = rows_of(limited(Cell(0.5, 1, 1), bytes_per_s), pairs, tokens=10, compute_s=1.0, record_bytes=8)
        assert len(rows) == 2
        assert rows[0].target is not None
        assert (rows[0].target.bound, rows[0].parts["load_of_compute"]) == (bound, 1000.0 / bytes_per_s)


def test_longer_waits_and_slower_tokens_are_short() -> None:
    pairs = [(run(1.1, waits_s=(1e-3, 2e-3)), run(1.0))]
    speed, waits = rows_of(Cell(0.1, 1, 1), pairs, tokens=10, compute_s=1.0, record_bytes=8)[:2]
    assert (speed.holds, waits.holds) == (False, False)
    assert (waits.value, waits.limit) == (2000.0, 1000.0)
