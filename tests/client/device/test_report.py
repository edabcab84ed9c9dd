"""The report of a device names each volume's mode, and why."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import paramstore_client as ps
from paramstore_client.device import report
from paramstore_client.namespace import acquire_extents
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
        reader = store.open_namespace("m")
        told = ps.device_report(reader)
        assert told["device"] == "cpu"
        words, reasons = told["volumes"], told["reasons"]
        assert isinstance(words, dict)
        assert isinstance(reasons, dict)
        if leases:
            assert set(words) == {0, 1} == set(reasons)
            assert set(words.values()) <= {"host", "kvikio compat"}
            assert all(reasons.values())
            stats: Any = store.stats()["extents"]
            assert stats == {"leased": 0, "leases_max": 4, "modes": {str(number): [str(word)] for number, word in words.items()}}
            reader.close()
            assert store.stats()["extents"]["modes"] == {}  # type: ignore[index]
        else:
            assert (words, "extent_leases" in reasons[None]) == ({}, True)
        with pytest.raises(ps.ConfigError, match="namespace"):
            ps.device_report(object())  # type: ignore[arg-type]


def test_leases_that_others_have_and_a_dropped_step_are_reasons_and_one_lease_a_volume_is_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {**QUIET, "PARAMSTORE_EXTENT_LEASES": "4"}
    asked: list[object] = []
    with ForkedDaemon(tmp_path / "store", "--host-budget", "64MiB", environment=settings) as daemon, ps.connect(
        daemon.address
    ) as store:
        made = store.create_namespace("m", ps.param_schema({"w": ((8, 8), torch.float32)}), layers=1, experts=4)
        made.initialize(lambda _: {"w": torch.ones(8, 8)})
        made.commit(1).wait()
        reader = store.open_namespace("m")
        with acquire_extents(reader, reader.keys()):
            taken = ps.device_report(reader)
        assert (taken["volumes"], "extent_leases=4" in taken["reasons"][None]) == ({}, True)  # type: ignore[index]

        def noted(namespace: ps.Namespace, keys: list[tuple[int, int]]) -> object:
            asked.append(keys)
            return acquire_extents(namespace, keys)

        monkeypatch.setattr(report, "acquire_extents", noted)
        assert set(ps.device_report(reader)["volumes"]) == {0}  # type: ignore[call-overload]
        assert asked == [[(0, 0)]]

        def dropped(namespace: ps.Namespace, keys: list[tuple[int, int]]) -> object:
            raise ps.StepDropped("step 1 is gone")

        monkeypatch.setattr(report, "acquire_extents", dropped)
        assert ps.device_report(reader) == {"device": "cpu", "volumes": {}, "reasons": {None: "step 1 is gone"}}
