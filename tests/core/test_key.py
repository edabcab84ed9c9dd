"""Names of namespaces, and which keys a namespace has."""

from __future__ import annotations

import pytest

from paramstore.core.key import EXPERTS_MAX, KEYS_MAX, LAYER_INDEX_MAX, LAYERS_MAX, RUN_KEYS, KeySpace, check_name
from paramstore.errors import ConfigError, UnknownKey


@pytest.mark.parametrize("name", ["a", "moe-30b.v2_x", "A" * 64, "0", "..a", "a.."])
def test_a_good_name_is_given_back(name: str) -> None:
    assert check_name(name) == name


@pytest.mark.parametrize("name", ["", "A" * 65, "a b", "a/b", "ä", "a\n", "\0", ".", "..", "." * 64])
def test_a_bad_name_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="namespace name"):
        check_name(name)


def test_a_count_of_layers_means_the_indices_from_zero() -> None:
    assert KeySpace.of(3, 2) == KeySpace((0, 1, 2), 2)


def test_layers_may_be_given_in_any_order() -> None:
    assert KeySpace.of([7, 3, 5], 1).layers == (3, 5, 7)


@pytest.mark.parametrize(
    "layers", [0, -1, [], [1, 1], [-1, 2], LAYERS_MAX + 1, 10**12, range(LAYERS_MAX + 1), [LAYER_INDEX_MAX + 1]]
)
def test_an_empty_or_absurd_set_of_layers_is_refused(layers: object) -> None:
    with pytest.raises(ConfigError, match="layers="):
        KeySpace.of(layers, 1)  # type: ignore[arg-type]


@pytest.mark.parametrize("experts", [0, -1, EXPERTS_MAX + 1])
def test_an_empty_or_absurd_number_of_experts_is_refused(experts: int) -> None:
    with pytest.raises(ConfigError, match="experts="):
        KeySpace.of(1, experts)


def test_the_limits_themselves_are_accepted() -> None:
    assert len(KeySpace.of(LAYERS_MAX, KEYS_MAX // LAYERS_MAX)) == KEYS_MAX
    assert len(KeySpace.of(KEYS_MAX // EXPERTS_MAX, EXPERTS_MAX)) == KEYS_MAX
    assert KeySpace.of([LAYER_INDEX_MAX], 1).layers == (LAYER_INDEX_MAX,)


def test_more_keys_than_the_tables_are_made_for_are_refused_before_anything_is_made_of_them() -> None:
    with pytest.raises(ConfigError, match=rf"{LAYERS_MAX * EXPERTS_MAX} keys, .* at most {KEYS_MAX}"):
        KeySpace.of(LAYERS_MAX, EXPERTS_MAX)


def test_iteration_goes_layer_by_layer_and_agrees_with_length_and_membership() -> None:
    space = KeySpace.of([1, 4], 2)
    keys = list(space)
    assert keys == [(1, 0), (1, 1), (4, 0), (4, 1)]
    assert len(space) == len(keys)
    assert all(key in space for key in keys)


@pytest.mark.parametrize("key", [(0, 0), (2, 0), (1, 2), (1, -1), (1,), (1, 0, 0), [1, 0], "10", None, (1, "0")])
def test_what_is_not_a_key_of_the_space_is_not_in_it(key: object) -> None:
    assert key not in KeySpace.of([1, 4], 2)


def test_check_accepts_keys_of_the_space() -> None:
    KeySpace.of([1, 4], 2).check([(1, 0), (4, 1)], namespace="moe")


@pytest.mark.parametrize("key", [(2, 0), (1, 2), (4, -1)])
def test_check_names_the_first_wrong_key_and_the_namespace(key: tuple[int, int]) -> None:
    with pytest.raises(UnknownKey, match=rf"key \({key[0]}, {key[1]}\) is not in namespace 'moe': layers 1, 4, experts 0 to 1"):
        KeySpace.of([1, 4], 2).check([(1, 0), key, (9, 9)], namespace="moe")


def test_many_layers_are_named_shortly() -> None:
    with pytest.raises(UnknownKey, match="layers 2 to 40,"):
        KeySpace.of(range(2, 41), 1).check([(0, 0)], namespace="moe")
    with pytest.raises(UnknownKey, match=r"layers 0, 2, .*, 30, \.\.\., experts"):
        KeySpace.of(range(0, 100, 2), 1).check([(1, 0)], namespace="moe")


def test_runs_are_the_keys_in_order_each_of_one_layer_and_none_too_long() -> None:
    for space in (KeySpace.of([1, 4], 3), KeySpace.of([5, 2], RUN_KEYS), KeySpace.of(2, 2 * RUN_KEYS + 1)):
        runs = list(space.runs())
        assert [key for run in runs for key in run] == list(space)
        assert all(len({layer for layer, _ in run}) == 1 and 0 < len(run) <= RUN_KEYS for run in runs)
        assert len(runs) == len(space.layers) * -(-space.experts // RUN_KEYS)
