"""Ranking by heat: who fits where, and what traces and numbers say."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import pytest

from paramstore.core.heat import HEAT_BYTES, NO_HEAT, SAMPLE_KEYS, GivenHeat, heat_of, pack_heat, rank_records, unpack_heat
from paramstore.core.key import ExpertKey, KeySpace
from paramstore.core.schema import Schema
from paramstore.core.trace import Trace, TraceEvent, TraceEventKind, TraceHeader
from paramstore.errors import ConfigError, ProtocolError, UnknownKey

KEYS = KeySpace.of(2, 8)
SCHEMA = Schema.param({"w": ((4,), "float32")})


def classes(heat: dict[ExpertKey, float], fitting: list[int], keys: KeySpace = KEYS) -> dict[ExpertKey, int | None]:
    """As a policy's counts are ranked; given numbers are ranked the same where they are few."""
    ranking = rank_records(keys, lambda key: heat.get(key, 0.0), fitting, copies=lambda _: 1, standing=0)
    assert len(keys) > SAMPLE_KEYS or ranking == GivenHeat.of(heat).ranking(fitting)
    return {key: ranking.class_of(key, heat.get(key, 0.0)) for key in keys}


def trace_of(*experts: tuple[int, ...], layers: int = 2, count: int = 8) -> Trace:
    header = TraceHeader("t", SCHEMA.describe(), list(range(layers)), count, "by hand")
    acquired = [TraceEvent(TraceEventKind.ACQUIRE, 0, each) for each in experts]
    return Trace(header, (TraceEvent(TraceEventKind.PREFETCH, 1, (7,)), *acquired, TraceEvent(TraceEventKind.STEP, 0, ())))


def test_as_many_of_the_hottest_go_to_the_fastest_class_as_fit() -> None:
    seed = random.randrange(1 << 30)
    draw = random.Random(seed)
    for _ in range(50):
        heat = {key: draw.choice([0.0, 1.0, 2.0, draw.random()]) for key in KEYS}
        heat[0, 0] = 1.0
        fitting = [draw.randint(0, 10) for _ in range(3)]
        found = classes(heat, fitting)
        used = sorted((key for key in KEYS if heat[key]), key=lambda key: (-heat[key], key))
        assert found == expected_classes(used, heat, fitting), f"seed {seed}"


def test_what_stands_in_memory_comes_last_and_a_record_takes_the_room_of_its_copies() -> None:
    seed = random.randrange(1 << 30)
    draw = random.Random(seed)
    for _ in range(50):
        heat = {key: draw.choice([0.0, draw.random()]) for key in KEYS}
        heat[0, 0] = 1.0
        copies, standing = {key: draw.randint(1, 3) for key in KEYS}, draw.randint(0, len(KEYS))
        fitting = [draw.randint(0, 16) for _ in range(3)]
        ranking = rank_records(KEYS, heat.__getitem__, fitting, copies=copies.__getitem__, standing=standing)
        hottest = sorted((key for key in KEYS if heat[key]), key=lambda key: (-heat[key], key))
        taken = [key for key in [*hottest[standing:], *hottest[:standing]] for _ in range(copies[key])]
        found = {key: ranking.class_of(key, heat[key]) for key in KEYS}
        assert found == expected_classes(taken, heat, fitting), f"seed {seed}"


def expected_classes(taken: list[ExpertKey], heat: dict[ExpertKey, float], fitting: list[int]) -> dict[ExpertKey, int | None]:
    """taken: the records that are used, in the order in which they take room, each as often as it takes any."""
    first, second = taken[: fitting[0]], taken[fitting[0] : fitting[0] + fitting[1]]
    unused = None if fitting[0] + fitting[1] > len(taken) else 2
    return {key: 0 if key in first else 1 if key in second else 2 if heat[key] else unused for key in KEYS}


def test_records_that_are_not_used_prefer_no_class_while_a_faster_one_has_room_beyond_those_that_are() -> None:
    one: dict[ExpertKey, float] = {(0, 3): 1.0}
    assert classes(one, [2, 16]) == {key: 0 if key == (0, 3) else None for key in KEYS}
    assert classes(one, [1, 16]) == {key: 0 if key == (0, 3) else 1 for key in KEYS}
    assert classes(one, [0, 16]) == dict.fromkeys(KEYS, 1)


def test_nothing_is_decided_where_nobody_knows_of_a_use() -> None:
    assert classes({}, [4, 16]) == dict.fromkeys(KEYS, None)


LARGE = KeySpace.of(128, 256)


def test_given_heat_of_few_records_among_many_is_ranked_exactly() -> None:
    draw = random.Random(5)
    hot = draw.sample(list(LARGE), 20)
    ranking = GivenHeat.of({key: 1.0 + place for place, key in enumerate(reversed(hot))}).ranking([10, 99_999])
    assert [key for key in hot if ranking.class_of(key, 20.0 - hot.index(key)) == 0] == hot[:10]


def test_given_heat_is_walked_once_and_not_for_each_ranking() -> None:
    class Unwalked(list[Any]):
        def __iter__(self) -> Any:
            raise AssertionError("walked again")

    given = GivenHeat.of({key: 1.0 + place for place, key in enumerate(KEYS)})
    assert GivenHeat(given.heats, Unwalked(given.ranks)).ranking([4, 99]) == given.ranking([4, 99])


@pytest.mark.parametrize("used", [10, 32_768])
def test_the_hottest_record_is_of_a_class_that_fits_but_few_of_many(used: int) -> None:
    draw = random.Random(5)
    heat = {key: 1.0 + place for place, key in enumerate(draw.sample(list(LARGE), used))}
    found = classes(heat, [10, 1, 99_999], LARGE)
    fast = [key for key in LARGE if found[key] == 0]
    assert max(heat, key=heat.__getitem__) in fast
    assert len(fast) < 200


def test_a_large_namespace_is_judged_by_a_sample_that_is_nearly_right() -> None:
    keys = KeySpace.of(64, 256)
    assert len(keys) > SAMPLE_KEYS
    draw = random.Random(7)
    heat = {key: draw.random() + key[0] / 64 for key in keys}
    hot = sum(found == 0 for found in classes(heat, [4000, 99_999], keys).values())
    assert 3500 < hot < 4500


def test_of_a_sample_too_the_hottest_come_last_as_far_as_they_stand_in_memory() -> None:
    keys = KeySpace.of(64, 256)
    draw = random.Random(7)
    heat = {key: draw.random() for key in keys}
    ranking = rank_records(keys, heat.__getitem__, [4000, 99_999], copies=lambda _: 2, standing=4000)
    found = {key for key in keys if ranking.class_of(key, heat[key]) == 0}
    places = {key: place for place, key in enumerate(sorted(keys, key=heat.__getitem__, reverse=True))}
    assert 1700 < len(found) < 2300
    assert min(map(places.__getitem__, found)) > 3500
    assert max(map(places.__getitem__, found)) < 6500


def test_a_sample_looks_at_every_layer_and_at_all_experts_alike() -> None:
    keys, seen = KeySpace.of(512, 256), list[ExpertKey]()
    rank_records(keys, lambda key: seen.append(key) or 1.0, [1, 1], copies=lambda _: 1, standing=0)  # type: ignore[func-returns-value]
    assert len(set(seen)) == len(seen) == SAMPLE_KEYS
    assert max(b - a for a, b in pairwise(sorted({layer for layer, _ in seen}))) <= 2
    assert len({expert for _, expert in seen}) > 200


def test_the_heat_of_a_trace_counts_its_leases() -> None:
    assert heat_of(trace_of((0, 3), (3,)), KEYS, namespace="moe") == {(0, 0): 1.0, (0, 3): 2.0}


def test_a_trace_of_another_model_is_refused_with_both_shapes() -> None:
    with pytest.raises(ConfigError, match=r"'t' is of 16 experts in each of 2 layers, namespace 'moe' has 8 in 2"):
        heat_of(trace_of(count=16), KEYS, namespace="moe")


def test_packed_heat_comes_back_in_its_order() -> None:
    heat = {(0, 1): 3, (1, 7): 0.5, (1, 0): 0}
    packed = pack_heat(heat, KEYS, namespace="moe")
    found = unpack_heat(packed, KEYS).heats
    assert len(packed) == HEAT_BYTES * len(KEYS)
    assert list(found) == [(0, 1), (1, 7)]
    assert found[0, 1] == pytest.approx(6 * found[1, 7])


def test_a_record_that_is_used_a_little_is_no_unused_one() -> None:
    found = unpack_heat(pack_heat({(0, 1): 1e11, (1, 7): 5, (1, 0): 0}, KEYS, namespace="moe"), KEYS).heats
    assert list(found) == [(0, 1), (1, 7)]


def test_heat_of_nothing_is_no_heat() -> None:
    assert pack_heat({(0, 0): 0}, KEYS, namespace="moe") == b"" == pack_heat({}, KEYS, namespace="moe")
    assert unpack_heat(b"", KEYS).ranking([4, 4]) == NO_HEAT.ranking([4, 4])


def test_heat_for_a_key_that_does_not_exist_is_refused() -> None:
    with pytest.raises(UnknownKey, match=r"\(2, 0\) is not in namespace 'moe'"):
        pack_heat({(2, 0): 1.0}, KEYS, namespace="moe")


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf"), "much", None, True])
def test_a_heat_that_is_no_number_is_refused_with_its_key(value: object) -> None:
    with pytest.raises(ConfigError, match=r"heat\[\(0, 1\)\]="):
        pack_heat({(0, 1): value}, KEYS, namespace="moe")  # type: ignore[dict-item]


@pytest.mark.parametrize("length", [1, HEAT_BYTES, HEAT_BYTES * len(KEYS) - 1, HEAT_BYTES * len(KEYS) + HEAT_BYTES])
def test_packed_heat_of_another_length_is_refused(length: int) -> None:
    with pytest.raises(ProtocolError, match=f"heat takes {length} bytes, 16 keys have 64"):
        unpack_heat(bytes(length), KEYS)
