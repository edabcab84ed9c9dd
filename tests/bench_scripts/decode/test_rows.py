"""Limits and rows of decoding: what is compared with memory, what with arithmetic and lacking bytes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from paramstore.errors import StepMismatch
from paramstore_bench.decode.rows import (
    RING,
    Answer,
    Cell,
    PairedAnswer,
    Used,
    Work,
    check_logits,
    check_near,
    count_rows_of,
    peer_row_of,
    row_of,
)

DECODING, PROMPT, LONG = Work(16, new=10), Work(64), Work(4096, hides_loads=True)


def answer(seconds: float, *, lacking_bytes: float = 0.0, absent: float = 0.0) -> Answer:
    used = Used(uses=4.0, absent=absent, late=1.0, lacking_bytes=lacking_bytes, read_bytes=2 * lacking_bytes)
    return Answer(seconds, torch.zeros(1), used)


def pair(ours_s: float, memory_s: float, lacking_bytes: float = 0.0, absent: float = 0.0) -> PairedAnswer:
    return PairedAnswer(answer(ours_s, lacking_bytes=lacking_bytes, absent=absent), answer(memory_s), rate=2.0)


def test_works_are_named_and_counted_by_what_is_timed() -> None:
    assert (DECODING.name, DECODING.tokens, PROMPT.name, PROMPT.tokens) == ("decode", 10, "prefill of 64 tokens", 64)


def test_a_token_waits_for_its_bytes_and_a_prompt_computes_beside_them() -> None:
    assert pair(9.0, 3.0, lacking_bytes=8.0).limit_s(Cell(DECODING, 0.5, 1)) == 7.0
    assert pair(9.0, 3.0, lacking_bytes=8.0).limit_s(Cell(PROMPT, 0.5, 1)) == 4.0
    assert pair(9.0, 3.0, lacking_bytes=2.0).limit_s(Cell(PROMPT, 0.5, 1)) == 3.0
    assert pair(9.0, 3.0, lacking_bytes=8.0).limit_s(Cell(LONG, 0.5, 1)) == 3.0, "whatever it loads is hidden"


def test_a_resident_model_is_held_against_memory_and_others_against_the_limit() -> None:
    pairs = [pair(2.0, 1.8, 4.0), pair(4.0, 3.8, 4.0), pair(2.0, 2.0, 4.0)]
    resident = row_of(Cell(DECODING, 1.0, 1), pairs, record_bytes=8, facts={"slots": 3.0})
    assert (resident.ratio, resident.ratio_min, resident.ratio_max) == (0.95, 0.9, 1.0)
    assert (resident.holds, resident.against, resident.parts["slots"]) == (True, "the model in memory", 3.0)
    half = row_of(Cell(DECODING, 0.5, 1), pairs, record_bytes=8, facts={})
    assert (half.ratio, half.parts["of_memory"], half.holds) == (1.9, 0.95, True)
    prompt = row_of(Cell(PROMPT, 0.5, 2), [pair(4.0, 1.0, 4.0)], record_bytes=8, facts={})
    assert (prompt.ratio, prompt.holds, prompt.value, prompt.limit) == (0.5, False, 16.0, 32.0)


def test_what_the_machine_can_do_beside_reads_is_told_with_a_prompt() -> None:
    pairs = [replace(pair(8.0, 4.0, 8.0), both_s=both_s) for both_s in (5.0, 6.0, 7.0)]
    row = row_of(Cell(PROMPT, 0.5, 1), pairs, record_bytes=8, facts={})
    assert (row.parts["memory_beside_reads_s"], row.parts["of_memory_beside_reads"], row.ratio) == (6.0, 0.75, 0.5)
    assert "of_memory_beside_reads" not in row_of(Cell(DECODING, 0.5, 1), [pair(8.0, 4.0, 8.0)], record_bytes=8, facts={}).parts


@pytest.mark.parametrize(("threads", "holds"), [(1, False), (2, True)])
def test_a_ring_that_hides_its_loads_is_held_against_memory(threads: int, holds: bool) -> None:
    row = row_of(Cell(LONG, 0.5, threads, RING), [pair(10.0, 9.2, 99.0)], record_bytes=8, facts={"layer_load_s": 1.0})
    assert (row.ratio, row.holds, row.against) == (pytest.approx(0.92), holds, "the model in memory")
    assert row.case == f"50% of the experts in host memory, {threads} threads, ring"
    assert row.parts["layer_load_s"] == 1.0


def test_what_a_ring_reads_twice_and_what_is_absent_is_judged_by_counts() -> None:
    cell = Cell(LONG, 0.5, 1, RING)
    absent, reads = count_rows_of(cell, [pair(1.0, 1.0, 16.0)] * 3, record_bytes=8)
    assert (absent.value, absent.holds, reads.value, reads.holds) == (0.0, True, 1.0, True)
    assert (reads.parts["uses"], reads.parts["late"], reads.parts["absent"]) == (4.0, 1.0, 0.0)
    absent, reads = count_rows_of(cell, [pair(1.0, 1.0, 20.0), pair(1.0, 1.0, 20.0, absent=1.0)], record_bytes=8)
    assert (absent.value, absent.holds, reads.value, reads.holds) == (1.0, False, 1.25, False), "one prompt is enough"


def test_one_bit_of_the_logits_is_an_error() -> None:
    check_logits(answer(1.0), answer(2.0), what="x")
    with pytest.raises(StepMismatch, match="round 3"):
        check_logits(answer(1.0), Answer(1.0, torch.ones(1)), what="round 3")


def test_beside_a_peer_the_figure_is_how_many_times_its_speed() -> None:
    pairs = [(answer(1.0), answer(seconds)) for seconds in (12.0, 10.0, 15.0)]
    cell = Cell(Work(16, new=4), 0.5, 1)
    row = peer_row_of(cell, pairs, peer="another", against="its best", record_bytes=8, bound=10.0)
    assert (row.value, row.limit, row.ratio, row.ratio_min, row.ratio_max, row.holds) == (4.0, 4 / 12, 12.0, 10.0, 15.0, True)
    assert (row.name, row.against) == ("decode beside another", "its best")
    assert peer_row_of(cell, pairs, peer="another", against="", record_bytes=8, bound=16.0).holds is False
    assert peer_row_of(cell, pairs, peer="another", against="", record_bytes=8, bound=None).holds is None


def test_logits_of_another_model_are_refused() -> None:
    check_near("peer", torch.tensor([1.0, 0.99]), torch.ones(2))
    with pytest.raises(StepMismatch, match=r"peer computes another model: .* cosine of 0\.707"):
        check_near("peer", torch.tensor([1.0, 0.0]), torch.ones(2))
