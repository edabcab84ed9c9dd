"""A run adds up what its seeds met, says what was too rare, and tells where a failing seed failed."""

from __future__ import annotations

import logging
import re

import pytest

from paramstore_testkit.sim import lives
from paramstore_testkit.sim.markers import LEAST, MARKERS
from paramstore_testkit.sim.model import Broken
from paramstore_testkit.sim.operations import OPERATIONS
from paramstore_testkit.sim.plan import OPERATIONS as DRAWN
from paramstore_testkit.sim.run import Figures, report, run_seed
from paramstore_testkit.sim.world import TRACE_LINES


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL + 1)


def test_figures_add_up_over_seeds() -> None:
    figures = Figures()
    worlds = [run_seed(seed, figures, requests=60) for seed in (1, 2)]
    assert figures.requests == sum(world.done_requests for world in worlds) >= 120
    assert figures.trace_hashes == {1: worlds[0].trace_hash, 2: worlds[1].trace_hash}
    assert "2 seeds" in report(figures)


def test_what_was_met_too_rarely_is_named() -> None:
    figures = Figures()
    figures.markers.update(dict.fromkeys(MARKERS, LEAST))
    assert figures.missed() == {}
    figures.markers["writer fenced"] -= 1
    assert figures.missed() == {"writer fenced": LEAST - 1}


def test_a_failure_says_its_seed_its_request_and_the_end_of_the_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise Broken("planted")

    monkeypatch.setattr(lives, "check_tables", fail)
    with pytest.raises(Broken) as found:
        run_seed(3, Figures(), requests=200)
    *lines, where = found.value.__notes__[0].splitlines()
    assert 0 < len(lines) <= TRACE_LINES
    assert all(re.match(r"\d+\.\d{6} \w+ ", line) for line in lines)
    assert "run_seed(3)" in where


def test_every_operation_whose_share_is_drawn_is_there() -> None:
    assert set(DRAWN) <= set(OPERATIONS)
