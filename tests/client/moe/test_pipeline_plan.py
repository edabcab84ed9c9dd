"""What a pipeline is as a value."""

from __future__ import annotations

from typing import Any

import pytest

from paramstore.errors import ConfigError
from paramstore_client.moe.pipeline_plan import REUSES, SPLITS, Pipeline


@pytest.mark.parametrize("wrong", [{"parts": 0}, {"parts": 65}, {"split": "rows"}, {"reuse": "S5"}, {"host_bytes": -1}], ids=str)
def test_what_is_no_pipeline_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Pipeline(**wrong)


def test_only_one_part_that_keeps_all_is_plain() -> None:
    assert Pipeline().is_plain
    assert not any(Pipeline(parts=parts, reuse=reuse).is_plain for parts, reuse in ((2, "keep"), (1, "S1")))


def test_experts_or_tokens_are_split() -> None:
    assert (Pipeline(parts=4).expert_parts, Pipeline(parts=4).chunks) == (4, 1)
    by_tokens = Pipeline(parts=4, split="tokens")
    assert (by_tokens.expert_parts, by_tokens.chunks) == (1, 4)


def test_each_strategy_has_rows_and_activations_in_its_own_way() -> None:
    ways = {reuse: Pipeline(reuse=reuse) for reuse in REUSES}
    assert [reuse for reuse, way in ways.items() if way.sends_again] == ["S2", "S4"]
    assert [reuse for reuse, way in ways.items() if way.copies_rows] == ["S1", "S3"]
    assert [reuse for reuse, way in ways.items() if way.computes_again] == ["S3", "S4"]


def test_ranks_that_differ_have_other_numbers() -> None:
    all_numbers = [Pipeline(parts, split, reuse).numbers for parts in (1, 2) for split in SPLITS for reuse in REUSES]
    assert len(set(all_numbers)) == len(all_numbers)
