"""What a store is found to be before a run: none yet, served or not."""

from __future__ import annotations

import pytest

from paramstore.run.home import Home
from paramstore.run.store import RunStore, look
from paramstore_testkit.processes.forked_daemon import ForkedDaemon


def test_a_store_is_new_or_there_and_a_daemons_budget_is_told(tmp_path_factory: pytest.TempPathFactory) -> None:
    directory = tmp_path_factory.mktemp("s") / "store"
    home = Home("m", directory, directory, "n", is_default=False)
    assert look(home) == RunStore(is_new=True)
    with ForkedDaemon(directory, "--host-budget", "48MiB"):
        assert look(home) == RunStore(is_new=False, budget_bytes=48 << 20)
    assert look(home) == RunStore(is_new=False)
    (directory / "run").rename(directory / "run.old")
    assert look(home) == RunStore(is_new=False)  # whoever opens it says what is wrong
