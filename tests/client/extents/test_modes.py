"""A mode is what reads have shown."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from paramstore.errors import VolumeError
from paramstore_client.extents import modes
from paramstore_client.extents.extent_reader import ExtentReader
from paramstore_client.extents.modes import Mode, driver_read_count, prove_mode
from paramstore_client.extents.volume_reads import KvikioReads, VolumeReads
from paramstore_client.namespace import Namespace, acquire_extents

CPU, KEY = torch.device("cpu"), (0, 1)
DEVICE: Any = SimpleNamespace(type="cuda")
"""Stands for a GPU where only its kind is asked for; the bytes go to the host."""


@pytest.fixture
def on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has readers and images on the host, whatever device is named."""
    full = torch.full
    monkeypatch.setattr(modes, "ExtentReader", lambda part, _, direct, warn: ExtentReader(part, CPU, direct=direct, warn=warn))
    monkeypatch.setattr(torch, "full", lambda shape, value, dtype, device: full(shape, value, dtype=dtype))


def proven(
    reader: Namespace, make: Callable[[bool], VolumeReads], *, device: torch.device = CPU, counts: tuple[int | None, ...] = ()
) -> tuple[Mode, str]:
    with acquire_extents(reader, [KEY]) as lease:
        return prove_mode(lease, KEY, device, make_reads=make, count_reads=iter(counts).__next__)


def absent(must_be_gds: bool) -> VolumeReads:
    raise VolumeError("kvikio cannot be imported: there is none")


def test_without_kvikio_it_is_the_host(reader: Namespace) -> None:
    assert proven(reader, absent) == (Mode.HOST, "kvikio cannot be imported: there is none")


def test_kvikio_whose_bytes_are_wrong_is_the_host(reader: Namespace, fake_kvikio: Any) -> None:
    def nothing(target: Any, _: int) -> int:
        target[:] = 0
        return len(target)

    mode, reason = proven(reader, lambda _: KvikioReads(fake_kvikio(nothing)))
    assert (mode, "header root" in reason) == (Mode.HOST, True)


def test_right_bytes_on_the_host_are_kvikios_own_mode(reader: Namespace, fake_kvikio: Any) -> None:
    assert proven(reader, lambda _: KvikioReads(fake_kvikio())) == (Mode.KVIKIO_COMPAT, "the bytes go to cpu")


@pytest.mark.parametrize(("counts", "mode"), [
    ((7, 8), Mode.GDS), ((7, 7), Mode.CUFILE_COMPAT), ((None, None), Mode.CUFILE_COMPAT), ((None, 3), Mode.CUFILE_COMPAT),
])  # fmt: skip
@pytest.mark.usefixtures("on_the_host")
def test_only_the_drivers_count_tells_gds_from_cufiles_own_way(
    reader: Namespace, fake_kvikio: Any, counts: tuple[int | None, ...], mode: Mode
) -> None:
    kvikio = fake_kvikio()
    found, _ = proven(reader, lambda must: KvikioReads(kvikio, must_be_gds=must), device=DEVICE, counts=counts)
    assert found == mode
    assert [settings["compat_mode"] for settings in kvikio.settings] == [kvikio.CompatMode.AUTO, kvikio.CompatMode.OFF]


@pytest.mark.usefixtures("on_the_host")
def test_what_cannot_be_opened_without_compatibility_is_kvikios_own_mode(
    reader: Namespace, fake_kvikio: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def make(must_be_gds: bool) -> VolumeReads:
        def refused(target: Any, _: int) -> int:
            raise RuntimeError("CUDA_ERROR_NO_DEVICE")

        return KvikioReads(fake_kvikio(refused) if must_be_gds else fake_kvikio())

    mode, reason = proven(reader, make, device=DEVICE, counts=(1, 2))
    assert (mode, "CUDA_ERROR_NO_DEVICE" in reason) == (Mode.KVIKIO_COMPAT, True)
    assert "from here on" not in caplog.text, "who reads goes on by kvikio"


def test_the_drivers_count_is_that_of_its_reads_that_were_done(tmp_path: Path) -> None:
    stats = tmp_path / "stats"
    assert driver_read_count(stats) is None
    stats.write_text("NVFS statistics(ver: 4.0)\nReads\t\t\t\t: n=12 ok=11 err=1 readMiB=5\nWrites\t\t: n=3 ok=3\n")
    assert driver_read_count(stats) == 11
    stats.write_text("IO stats: Disabled\n")
    assert driver_read_count(stats) is None
