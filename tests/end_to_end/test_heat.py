"""Volumes of different speed, in a whole store on real files: the hottest records come to lie, and are read, on the faster one.

What the test says of speeds stands in for the probe; reads are counted, not timed.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from paramstore.config import Config
from paramstore.core.heat import pack_heat
from paramstore.core.key import ExpertKey
from paramstore.core.schema import Schema
from paramstore.engine.store import Store
from paramstore.engine.tables.namespace import View
from paramstore.errors import ProtocolError, VolumeError
from paramstore_testkit.oracles.images import filled_values, initial_of
from paramstore_testkit.stores.assembled import MIB, at_speeds, config, with_store
from paramstore_testkit.stores.small_store import create, keys_of, lease, leased, train, writer

pytestmark = pytest.mark.slow

EXPERTS = 32
PARAM = Schema.param({"w": ((65, 1024), "float32")})
TRAINED = Schema.adamw({"w": (48, 512)}, param_dtype="float32", updates="touched")
SLOW, FAST = 0, 1
SPEEDS = at_speeds(1e9, 3e9)
HEAT: dict[ExpertKey, float] = {(0, expert): float(1 + expert * 7 % EXPERTS) for expert in range(EXPERTS)}
"""A number of its own for each key, in no order."""


def two_volumes(directory: Path, volume_mib: int | None = None) -> Config:
    directory.mkdir(exist_ok=True)
    return config(
        directory / "store", volumes=(directory / "slow", directory / "fast"), retained_steps=1, held_steps=0,
        volume_size_bytes=volume_mib and volume_mib * MIB,
    )  # fmt: skip


def hottest(store: Store, view: View, *, copies: int = 1) -> set[ExpertKey]:
    """The hottest keys that fit on the fast volume."""
    fitting = store.transfers.space.share_bytes("moe")[0] // (copies * view.namespace.schema.record_bytes)
    assert 0 < fitting < EXPERTS
    return set(sorted(HEAT, key=HEAT.__getitem__, reverse=True)[:fitting])


async def imported(store: Store, heat: dict[ExpertKey, float]) -> View:
    view = await store.admission.create("moe", PARAM.describe(), layers=[0], experts=EXPERTS, host_bytes=None)
    await initialized(store, view, heat)
    await store.committer.commit(view, 0, b"")
    return view


async def initialized(store: Store, view: View, heat: dict[ExpertKey, float]) -> None:
    await store.initializer.begin(view, heat=pack_heat(heat, view.namespace.keys, namespace="moe"))
    for number, key in enumerate(view.namespace.keys):
        await store.initializer.put(view, key, initial_of(PARAM, filled_values(PARAM, number)))
    await store.initializer.end(view)


async def trained_by_heat(store: Store, view: View, *, first: int) -> None:
    """Leases each key as often as its heat says, then trains and commits all of them twice."""
    for key, heat in HEAT.items():
        for _ in range(int(heat)):
            store.access.release(view, (await lease(store, view, [key])).lease_id)
    for step in (first, first + 1, first + 2):
        await train(store, view)
        await store.committer.commit(view, step, b"")


def on(view: View, volume: int) -> set[ExpertKey]:
    """The keys whose newest record lies there."""
    located = {key: view.namespace.on_volume(key) for key in view.namespace.keys}
    return {key for key, record in located.items() if record is not None and record.extent.volume == volume}


def test_an_import_brings_the_hottest_that_fit_to_the_fast_volume_and_there_they_are_read(tmp_path: Path) -> None:
    async def use(store: Store) -> None:
        view = await imported(store, HEAT)
        hot = hottest(store, view)
        assert on(view, FAST) == hot
        await store.evict(view, None, "param")
        before = [store.transfers.traffic[index].reads for index in (SLOW, FAST)]
        for key in sorted(hot):
            store.access.release(view, (await lease(store, view, [key])).lease_id)
        after = [store.transfers.traffic[index].reads for index in (SLOW, FAST)]
        assert [b - a for a, b in zip(before, after, strict=True)] == [0, len(hot)]
        volumes = (await store.stats())["volumes"]
        assert isinstance(volumes, dict)
        assert [(volume["speed_class"], volume["read_bytes_per_s"]) for volume in volumes.values()] == [(1, 1e9), (0, 3e9)]
        values = await leased(store, view, keys_of(view)[:4])
        assert [value["w"].flatten()[0].item() for value in values.values()] == [0, 1, 2, 3]

    with_store(two_volumes(tmp_path), use, make_measure=SPEEDS)


@pytest.mark.parametrize(
    ("heat", "speeds"), [({}, (1e9, 3e9)), (HEAT, (1e9, 1.4e9)), (HEAT, ())], ids=["no heat", "nearly equal", "not measured"]
)
def test_without_heat_and_without_a_clear_difference_records_are_spread_as_ever(
    tmp_path: Path, heat: dict[ExpertKey, float], speeds: tuple[float, ...]
) -> None:
    async def use(store: Store) -> None:
        assert on(await imported(store, heat), FAST) == {(0, expert) for expert in range(1, EXPERTS, 2)}

    with_store(two_volumes(tmp_path), use, make_measure=at_speeds(*speeds))


def test_training_moves_the_hottest_records_to_the_fast_volume_as_it_writes_them(tmp_path: Path) -> None:
    async def use(store: Store) -> None:
        view = await create(store, schema=TRAINED, experts=EXPERTS)
        await trained_by_heat(store, view, first=1)
        hot = hottest(store, view, copies=2)
        assert len(on(view, FAST) & hot) >= 0.9 * len(hot)

    with_store(two_volumes(tmp_path), use, make_measure=SPEEDS)


def test_a_volume_that_is_added_later_takes_the_hottest(tmp_path: Path) -> None:
    async def first(store: Store) -> None:
        await create(store, schema=TRAINED, experts=EXPERTS)

    async def later(store: Store) -> None:
        view = await writer(store)
        await trained_by_heat(store, view, first=1)
        hot = hottest(store, view, copies=2)
        assert len(on(view, FAST) & hot) >= 0.9 * len(hot)

    settings = {"retained_steps": 1, "held_steps": 0}
    with_store(config(tmp_path / "store", volumes=(tmp_path / "slow",), volume_size_bytes=48 * MIB, **settings), first)
    added = config(
        tmp_path / "store", volumes=(tmp_path / "slow",), add_volumes=(tmp_path / "fast",), volume_size_bytes=24 * MIB, **settings
    )
    with_store(added, later, make_measure=SPEEDS)


def test_a_fast_volume_that_is_fenced_or_full_refuses_nobody(tmp_path: Path) -> None:
    async def fenced(store: Store) -> None:
        store.transfers.space.fences.fail_flush(FAST, VolumeError("the disk is gone"))
        view = await store.admission.create("moe", PARAM.describe(), layers=[0], experts=EXPERTS, host_bytes=None)
        await initialized(store, view, HEAT)  # to commit needs every volume
        assert on(view, SLOW) == set(view.namespace.keys)

    async def full(store: Store) -> None:
        space = store.transfers.space
        while (extent := space.reserve(MIB, speed_class=0)) is not None and extent.volume == FAST:
            pass
        view = await imported(store, HEAT)
        assert len(on(view, SLOW)) >= EXPERTS - 3
        assert on(view, SLOW) | on(view, FAST) == set(view.namespace.keys)

    with_store(two_volumes(tmp_path / "fenced"), fenced, make_measure=SPEEDS)
    with_store(two_volumes(tmp_path / "full", 32), full, make_measure=SPEEDS)


def test_heat_of_another_number_of_keys_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    async def use(store: Store) -> None:
        view = await create(store, schema=PARAM, experts=EXPERTS, step=None)
        before = on(view, FAST) | on(view, SLOW)
        with pytest.raises(ProtocolError, match="heat takes 4 bytes, 32 keys have 128"):
            await store.initializer.begin(view, heat=bytes(4))
        assert on(view, FAST) | on(view, SLOW) == before == set(view.namespace.keys)

    with_store(two_volumes(tmp_path), use, make_measure=SPEEDS)
