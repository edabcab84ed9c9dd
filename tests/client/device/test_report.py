"""The report of a device names each volume's mode, and why."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import paramstore_client as ps
from paramstore_testkit.processes.daemon_process import QUIET
from paramstore_testkit.processes.forked_daemon import ForkedDaemon


@pytest.mark.parametrize("leases", [0, 4])
def test_every_volume_has_a_word_or_there_is_a_reason(tmp_path: Path, leases: int) -> None:
    settings = {**QUIET, "PARAMSTORE_EXTENT_LEASES": str(leases)}
    volumes = ("--volume", str(tmp_path / "a"), "--volume", str(tmp_path / "b"))
    with ForkedDaemon(tmp_path / "store", "--host-budget", "64MiB", *volumes, environment=settings) as daemon, ps.connect(
        daemon.address
    ) as store:
        made = store.create_namespace("m", ps.param_schema({"w": ((8, 8), torch.float32)}), layers=1, experts=4)
        made.initialize(lambda _: {"w": torch.ones(8, 8)})
        made.commit(1).wait()
        report = ps.device_report(store.open_namespace("m"))
        assert report["device"] == "cpu"
        words, reasons = report["volumes"], report["reasons"]
        assert isinstance(words, dict)
        assert isinstance(reasons, dict)
        if leases:
            assert set(words) == {0, 1} == set(reasons)
            assert set(words.values()) <= {"host", "kvikio compat"}
            assert all(reasons.values())
        else:
            assert (words, "extent_leases" in reasons[None]) == ({}, True)
        with pytest.raises(ps.ConfigError, match="namespace"):
            ps.device_report(object())  # type: ignore[arg-type]
