"""What a pipeline is as a value."""

from __future__ import annotations

from typing import Any

import pytest

from paramstore.errors import ConfigError
from paramstore_client.moe.pipeline_plan import REUSES, SPLITS, Pipeline, PipelineSearch, pipelines_of


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


@pytest.mark.parametrize(
    "wrong",
    [
        {"splits": ()}, {"splits": "experts"}, {"splits": ("rows",)}, {"splits": ("tokens", "tokens")}, {"splits": ["tokens"]},
        {"reuses": ("S5",)}, {"reuses": (1,)}, {"most_parts": 0}, {"most_parts": 65}, {"host_bytes": -1},
    ],
    ids=str,
)  # fmt: skip
def test_what_is_no_search_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        PipelineSearch(**wrong)


def test_a_search_is_among_what_it_names() -> None:
    search = PipelineSearch(splits=("tokens", "experts"), reuses=("S4", "S1"), host_bytes=7)
    assert pipelines_of(search, 1) == (Pipeline(1, "tokens", "S4", 7), Pipeline(1, "tokens", "S1", 7))
    assert {(each.split, each.reuse) for each in pipelines_of(search, 2)} == {(one, two) for one in SPLITS for two in ("S4", "S1")}
    assert search.digest not in {PipelineSearch().digest, 0}
