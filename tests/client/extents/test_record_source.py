"""A tier whose visits read from the volumes: the daemon's bytes, past its memory, and no damaged ones."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import paramstore_client as ps
from paramstore.testing.memory_namespace import MemoryNamespace
from paramstore_client.extents import record_source
from paramstore_client.extents.extent_reader import ExtentReader
from paramstore_client.extents.volume_reads import KvikioReads
from paramstore_client.namespace import Namespace, acquire_extents
from paramstore_testkit.processes.daemon_process import DaemonProcess

KEYS = [(0, expert) for expert in range(4)]


def loads(daemon: DaemonProcess) -> int:
    """How many `param` copies the daemon was asked for, whether it had them or not."""
    with ps.connect(daemon.address) as store:
        param: Any = store.stats()["namespaces"]["m"]["param"]
    return int(param["hits"] + param["misses"] + param["joins"] + param["prefetched"])


def expected(reader: Namespace, key: tuple[int, int]) -> dict[str, torch.Tensor]:
    with reader.acquire([key]) as lease:
        return lease.clone()[key]


def check(tier: ps.DeviceTier, reader: Namespace, keys: list[tuple[int, int]]) -> None:
    with tier.acquire(keys) as lease:
        held = {key: {name: tensor.clone() for name, tensor in lease[key].items()} for key in keys}
    for key in keys:
        for name, tensor in expected(reader, key).items():
            assert torch.equal(held[key][name], tensor), (key, name)


def test_what_a_visit_lacks_comes_past_the_daemons_memory(daemon: DaemonProcess, reader: Namespace) -> None:
    with ps.DeviceTier(reader, 3, device="cpu", reads="volumes") as tier:
        before = loads(daemon)
        with tier.acquire(KEYS[:3]):
            pass
        with tier.acquire([KEYS[3]]):
            assert loads(daemon) == before
        assert tier.stats.bytes_copied == 4 * reader.schema.record_bytes
        assert "from the volumes" in str(tier.describe()["volumes"])
        for keys in (KEYS[:2], KEYS[2:], [KEYS[3], KEYS[0]]):
            check(tier, reader, keys)


def test_by_kvikio_it_comes_into_the_slots_themselves(reader: Namespace, fake_kvikio: Any) -> None:
    kvikio = fake_kvikio()
    with ps.DeviceTier(reader, 2, device="cpu", reads="volumes") as tier:
        assert tier._records is not None
        tier._records.reader = ExtentReader(reader.schema.stored, tier.device, direct=KvikioReads(kvikio))
        check(tier, reader, KEYS[:2])
        assert kvikio.read_count == 2
        assert tier.describe()["volumes"] == "records are read from the volumes by kvikio"


def test_a_damaged_record_is_in_no_slot_and_the_tier_goes_on(reader: Namespace, volume: Path) -> None:
    with ps.DeviceTier(reader, 2, device="cpu", reads="volumes") as tier, volume.open("r+b", buffering=0) as file:
        with acquire_extents(reader, [KEYS[1]]) as lease:
            place = lease[KEYS[1]].extent.offset_bytes + reader.schema.stored.fields[0].offset_bytes + 5
        (byte,) = os.pread(file.fileno(), 1, place)
        os.pwrite(file.fileno(), bytes([byte ^ 2]), place)
        try:
            with pytest.raises(ps.CorruptRecord, match=r"\(0, 1\)"):
                tier.acquire(KEYS[:2])
        finally:
            os.pwrite(file.fileno(), bytes([byte]), place)
        assert tier.keys == [KEYS[0]]
        check(tier, reader, KEYS[:2])


def test_where_others_have_leased_all_extents_the_host_gives_the_bytes(
    daemon: DaemonProcess, reader: Namespace, caplog: pytest.LogCaptureFixture
) -> None:
    with ps.connect(daemon.address) as other, ps.DeviceTier(reader, 2, device="cpu", reads="volumes") as tier:
        with acquire_extents(other.open_namespace("m"), KEYS * 2), caplog.at_level(logging.WARNING):
            check(tier, reader, KEYS[:2])
            check(tier, reader, KEYS[2:])
        assert caplog.text.count("comes through the daemon's memory") == 1


def test_a_daemon_that_leases_fewer_than_a_visit_lacks_leases_them_in_parts(
    daemon: DaemonProcess, reader: Namespace, caplog: pytest.LogCaptureFixture
) -> None:
    before = loads(daemon)
    with ps.connect(daemon.address) as other, ps.DeviceTier(reader, 4, device="cpu", reads="volumes") as tier:
        with acquire_extents(other.open_namespace("m"), [KEYS[0]] * 7), caplog.at_level(logging.WARNING):  # one of eight is left
            tier.acquire(KEYS).release()
        assert (loads(daemon), caplog.text) == (before, "")
        check(tier, reader, KEYS)


def test_a_lease_that_does_not_come_in_time_is_the_hosts_affair(reader: Namespace, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float | None] = []

    def slow(reader: Namespace, keys: list[tuple[int, int]], *, timeout_s: float | None = None) -> object:
        asked.append(timeout_s)
        raise ps.WaitTimeout("the daemon reads for sums")

    with ps.DeviceTier(reader, 2, device="cpu", reads="volumes") as tier:
        monkeypatch.setattr(record_source, "acquire_extents", slow)
        tier.acquire(KEYS[:2], timeout_s=7.0).release()
        check(tier, reader, KEYS[:2])
    assert set(asked) == {7.0}


def test_what_has_no_extents_to_lease_is_refused_when_the_tier_is_made(daemon: DaemonProcess, reader: Namespace) -> None:
    with pytest.raises(ps.ConfigError, match="reads"):
        ps.DeviceTier(reader, 2, device="cpu", reads="drive")
    with pytest.raises(ps.ConfigError, match="reads='volumes'"):
        ps.DeviceTier(MemoryNamespace.of_swiglu(), 2, device="cpu", reads="volumes")
    with ps.connect(daemon.address) as store:
        trained = store.create_namespace("t", ps.adamw_schema({"w": (8, 8)}), layers=1, experts=1)
        with pytest.raises(ps.SchemaMismatch, match="is trained"):
            ps.DeviceTier(trained, 1, device="cpu", reads="volumes")
        trained.close()
