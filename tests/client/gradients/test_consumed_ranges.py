"""What becomes of the ranges of requests, in whatever order they are answered."""

from __future__ import annotations

from itertools import permutations, product

import pytest

import paramstore_client as ps
from paramstore.wire import messages as m
from paramstore_client.gradients.consumed_ranges import ConsumedRanges, Consumer, leaves_pending
from paramstore_client.gradients.upload_area import Range

KEYS = [(0, expert) for expert in range(3)]
APPLY = m.Apply(1, 1, 0.1, 0.9, 0.999, 1e-8, 0.0, 1.0)
OTHERS: list[Consumer] = [m.Abort(1, 1), m.Rollback(1, 1, 1), m.InitializeBegin(1, 1)]
CLOSE = m.CloseNamespace(1, 1)


@pytest.mark.parametrize(
    ("error", "after_apply", "after_others"),
    [
        (ps.ConfigError, True, True), (ps.SchemaMismatch, True, True), (ps.StepMismatch, True, True), (ps.StepPrepared, True, True),
        (ps.StepFailed, False, True), (ps.StepDropped, False, True), (ps.CatalogError, False, True), (ps.VolumeError, False, True),
        (ps.LeaseError, False, False), (ps.RankLost, False, False), (ps.WriterFenced, False, False),
        (ps.StoreUnavailable, False, False), (ps.ParamStoreError, False, True),
    ],
)  # fmt: skip
def test_what_a_request_that_failed_has_left(error: type[ps.ParamStoreError], after_apply: bool, after_others: bool) -> None:
    assert leaves_pending(APPLY, error("no")) is after_apply
    assert [leaves_pending(other, error("no")) for other in OTHERS] == [after_others] * len(OTHERS)
    assert not leaves_pending(CLOSE, error("no"))


@pytest.mark.parametrize("refused", list(product([False, True], repeat=3)))
@pytest.mark.parametrize("order", list(permutations(range(3))))
@pytest.mark.parametrize("looks_between", [False, True])
def test_the_next_request_that_takes_effect_consumes_what_refused_ones_left(
    namespace: ps.Namespace, refused: tuple[bool, ...], order: tuple[int, ...], looks_between: bool
) -> None:
    area = namespace._area
    ranges = dict(zip(KEYS, area.take(len(KEYS), 4096, most_bytes=1 << 20), strict=True))
    free = area.free_bytes()
    claims = ConsumedRanges(area)
    made = [claims.add(APPLY, {key: place}) for key, place in ranges.items()]
    left: dict[tuple[int, int], Range] = {}
    for index in order:
        claims.settle(made[index], ps.StepPrepared("no") if refused[index] else None)
        if looks_between:
            left.update(claims.take_left())
    left.update(claims.take_left())
    wanted = [key for index, key in enumerate(KEYS) if all(refused[index:])]
    assert left == {key: ranges[key] for key in wanted}
    assert area.free_bytes() == free + 4096 * (len(KEYS) - len(wanted))
    assert claims._claims == [], "nothing is kept once all are answered"


def test_what_is_kept_of_answered_requests_behind_one_that_is_not_does_not_grow(namespace: ps.Namespace) -> None:
    claims = ConsumedRanges(namespace._area)
    first = claims.add(APPLY, {})
    for _ in range(100):
        claims.settle(claims.add(APPLY, {}), None)
        assert claims.take_left() == {}
    assert len(claims._claims) == 2
    claims.settle(first, None)
    claims.take_left()
    assert claims._claims == []
