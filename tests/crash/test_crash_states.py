"""The power fails at every write, flush and transaction of a life; whatever reached the disks, the promise holds.

Last acknowledged step <= reopened step <= last started; every record whole and of that step; what was acknowledged before
any commit (a namespace) is there; and the reopened store can be trained on.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from random import Random

import pytest

from paramstore.testing.volumes import Keep, drop_write, keep_all, keep_none, keep_random, tear_write
from paramstore_testkit.crash.check import Verdict
from paramstore_testkit.crash.initialization import begin
from paramstore_testkit.crash.life import HOST_BYTES, KEYS, NAME, VOLUME_BYTES, Life
from paramstore_testkit.crash.states import Promise
from paramstore_testkit.disks.journal import Replay
from paramstore_testkit.disks.machine import Machine
from paramstore_testkit.oracles.experts import State, check_expert
from paramstore_testkit.oracles.trained_model import extra_of
from paramstore_testkit.stores.small_store import read_record, reader
from paramstore_testkit.trial import telling

LIMIT_S = 120
ACTS = (
    "train few", "write back", "train few", "commit", "train", "evict", "rollback", "train few", "commit", "reopen", "train",
    "commit beside training", "train", "commit beside training", "train", "commit beside training", "commit",
    "train few", "commit",
)  # fmt: skip
"""A life; by the last of its acts the first steps are dropped, and their extents written again."""

Keeps = dict[int, Keep]


async def reopened(machine: Machine, steps: Mapping[int, State]) -> Verdict:
    """What a daemon finds. Readers of it see every record of every step as the model has it."""
    store = machine.start()
    namespace = store.namespaces.get(NAME)
    if namespace is None or namespace.steps.committed_step is None:
        return Verdict(namespace is not None, None, ())
    found = namespace.steps.ledger.steps()
    for step in found:
        view = await reader(store, at=step)
        assert view.namespace.steps.ledger.step(step).extra == extra_of(step)
        for key in KEYS:
            _, fields = await read_record(store, view, key)
            check_expert(fields, steps[step][key], key=key, step=step)
    return Verdict(True, namespace.steps.committed_step, tuple(found))


async def go_on(machine: Machine, steps: Mapping[int, State], seed: int) -> None:
    """A trainer takes the store up again, and crashes once more."""
    await machine.kill()
    heir = Life(machine, seed=seed, steps=steps)
    await heir.resume()
    await heir.live_through(("train few", "commit"))
    await machine.crash()
    assert (await reopened(machine, heir.model.steps)).step == heir.committed


def crash_states(replay: Replay, source: Random) -> Iterator[tuple[str, Keeps]]:
    """Which of the unflushed writes may be there: none, all, all but one, one torn, one volume's only, any."""
    volumes = list(replay.disks)
    yield "none", dict.fromkeys(volumes, keep_none)
    unflushed = replay.unflushed
    if not unflushed:
        return
    everything: Keeps = dict.fromkeys(volumes, keep_all)
    yield "all", everything
    for volume in volumes[1:]:
        yield f"all but volume {volume}", {**everything, volume: keep_none}
    for volume, number, sectors in unflushed:
        yield f"write {number} of volume {volume} lost", {**everything, volume: drop_write(number)}
        kept = source.randrange(1, sectors)
        others = source.choice((keep_all, keep_none))
        torn = {**dict.fromkeys(volumes, others), volume: tear_write(number, kept)}
        yield f"write {number} of volume {volume} torn after {kept} sectors, {others.__name__} elsewhere", torn
    for _ in range(2):
        seed = source.randrange(1 << 30)
        yield f"random {seed}", {volume: keep_random(seed + volume) for volume in volumes}


async def try_all(life: Life, *, seed: int, share: float, volume_count: int) -> int:
    """Crashes in a `share` of all states, every point of the life in at least one; gives how many."""
    source, promise = Random(seed), Promise()
    replay = Replay(volume_count=volume_count, volume_bytes=VOLUME_BYTES)
    tried, where = 0, ""
    with telling(lambda: f"crash after event {where}"):
        for number, event in enumerate([None, *life.journal.events]):
            if event is not None:
                replay.advance(event)
                promise.hear(event)
            states = list(crash_states(replay, source))
            for name, keeps in states[:2] + [state for state in states[2:] if source.random() < share]:
                tried, where = tried + 1, f"{number} ({str(event)[:80]}), writes kept: {name}"
                machine = replay.machine(keeps, host_budget_bytes=HOST_BYTES)
                verdict = await reopened(machine, life.model.steps)
                promise.check(verdict)
                if verdict.step is not None and tried % 16 == 0:
                    await go_on(machine, life.model.steps, tried)
    return tried


def crash_everywhere(*, seed: int, share: float, volume_count: int) -> int:
    machine = Machine(
        seed=seed, volume_count=volume_count, volume_bytes=VOLUME_BYTES, volume_size_bytes=VOLUME_BYTES,
        host_budget_bytes=HOST_BYTES,
    )  # fmt: skip
    life = Life(machine, seed=seed)

    async def scenario() -> int:
        await begin(life)
        await life.live_through(ACTS)
        return await try_all(life, seed=seed, share=share, volume_count=volume_count)

    return life.run(scenario(), limit_s=LIMIT_S)


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    """Thousands of crashes log nothing: the note on a failure names its seed."""
    caplog.set_level(logging.ERROR, logger="paramstore.testing.volumes")
    caplog.set_level(logging.ERROR, logger="paramstore.storage")


@pytest.mark.slow
@pytest.mark.parametrize(("volume_count", "share"), [(1, 1.0), (2, 0.5)])
def test_a_crash_at_any_point_leaves_a_whole_committed_step(volume_count: int, share: float) -> None:
    tried = crash_everywhere(seed=volume_count, share=share, volume_count=volume_count)
    assert tried > 300
