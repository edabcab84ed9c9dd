"""Real daemons over real files, killed at a point of their work."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping

import pytest

from paramstore_testkit.processes.killable_serve import KillableDaemons

AT_POINT = "killed at "


@pytest.fixture(scope="module")
def daemons(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KillableDaemons]:
    """Daemons that run torch's AdamW."""
    with KillableDaemons(tmp_path_factory.mktemp("daemons") / "log") as daemons:
        yield daemons


@pytest.fixture(scope="module")
def plain_daemons(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KillableDaemons]:
    """Daemons without torch."""
    with KillableDaemons(tmp_path_factory.mktemp("daemons") / "log", is_plain=True) as daemons:
        yield daemons


@pytest.fixture
def tell(capsys: pytest.CaptureFixture[str]) -> Callable[[str, Mapping[str, int]], None]:
    """Shows what a run did, whether or not it failed: a run that did nothing is no evidence."""

    def show(title: str, counts: Mapping[str, int]) -> None:
        at_points = {what: count for what, count in counts.items() if what.startswith(AT_POINT)}
        told = {what: count for what, count in counts.items() if what not in at_points and count}
        if at_points:
            told[f"killed at {len(at_points)} named points"] = sum(at_points.values())
        with capsys.disabled():
            sys.stdout.write(f"\n{title}: {', '.join(f'{count} {what}' for what, count in sorted(told.items()))}\n")

    return show
