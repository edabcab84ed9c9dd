"""Scenarios meet what they are made for, and tell what goes wrong in them."""

from __future__ import annotations

from collections import Counter

import pytest

from paramstore_client.device.device_lease import DeviceStats
from paramstore_client.device.tier import DeviceTier
from paramstore_testkit.streams.scenario import ACTS, SCENARIOS, Outcome, TierLife, simulate

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.slow
def test_lives_do_every_act_and_meet_hits_evictions_stale_copies_and_loads_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    acts: Counter[str] = Counter()
    stats: list[DeviceStats] = []

    def live(seed: int) -> list[str]:
        life = TierLife(seed)
        for name in ACTS:
            act = getattr(life, name)
            setattr(life, name, lambda text, name=name, act=act: (acts.update([name]), act(text)))
        monkeypatch.setattr(DeviceTier, "report", lambda tier: stats.append(tier.stats))
        return life.live()

    for seed in range(3):
        assert simulate(seed, live) == Outcome([], []), f"seed {seed}"
    assert acts.keys() == ACTS.keys()
    for count in ("hits", "late", "misses", "refetches", "evictions", "useful", "wasted"):
        assert any(getattr(one, count) for one in stats), count


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_scenario_is_the_same_for_the_same_seed(scenario: object) -> None:
    outcomes = [simulate(5, scenario, is_lazy=True) for _ in range(2)]  # type: ignore[arg-type]
    assert outcomes[0] == outcomes[1] == Outcome([], [])


def test_what_refuses_to_go_on_is_wrong() -> None:
    def refuse(seed: int) -> list[str]:
        raise AssertionError("no")

    assert simulate(0, refuse) == Outcome(["refused: no"], [])
