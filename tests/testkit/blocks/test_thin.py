"""What a commit carries while a device fills up: more each time, and never more than a commit may."""

from __future__ import annotations

from paramstore_testkit.blocks.thin import EXTRA_BYTES_MAX, growing_extra


def test_what_a_commit_carries_grows_with_its_step_up_to_a_limit() -> None:
    sizes = [len(growing_extra(step)) for step in range(1, 100)]
    assert sizes == sorted(sizes)
    assert sizes[0] < sizes[10]
    assert sizes[-1] == EXTRA_BYTES_MAX


def test_no_two_steps_carry_the_same() -> None:
    assert growing_extra(98) != growing_extra(99)
