"""Bytes of a volume come through the host's memory, and by kvikio itself from a real volume to the host's, without a GPU.

kvikio runs in a process of its own, as libraries are found at its start. `make kvikio` gets what it needs; where that cannot be
had the test is skipped, and says so.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from paramstore.errors import VolumeError
from paramstore_client.connection.volume_file import VolumeFile
from paramstore_client.extents.volume_reads import BounceReads, KvikioReads
from paramstore_testkit.processes.daemon_process import DaemonProcess

DIRECTORY = Path(__file__).parents[3] / ".kvikio"
LIMIT_S = 60.0
PROGRAM = """
import json, os, sys
import torch
import paramstore_client as ps
from paramstore_client.extents.extent_reader import ExtentReader, reads_of_kvikio
from paramstore_client.namespace import acquire_extents

told = {}
with ps.connect(sys.argv[1]) as store:
    reader = store.open_namespace("m")
    part = reader.schema.stored
    by = ExtentReader(part, torch.device("cpu"), direct=reads_of_kvikio())
    image = torch.zeros(part.image_bytes, dtype=torch.uint8)
    keys = reader.keys()
    with acquire_extents(reader, keys) as lease:
        told["equal"] = 0
        for key in keys:
            image.fill_(0x5A)
            by.read(lease, key, image)
            with reader.acquire([key]) as held:
                told["equal"] += torch.equal(image[part.header_bytes:], held.image(key)[part.header_bytes:])
        place = lease[keys[1]].extent.offset_bytes + part.fields[0].offset_bytes + 77
        file = os.open(sys.argv[2], os.O_RDWR)
        (byte,) = os.pread(file, 1, place)
        os.pwrite(file, bytes([byte ^ 1]), place)
        os.fsync(file)
        try:
            by.read(lease, keys[1], image)
        except ps.CorruptRecord as error:
            told["damaged"] = str(error)
        os.pwrite(file, bytes([byte]), place)
        os.fsync(file)
        os.close(file)
        by.read(lease, keys[1], image)
    told |= {"direct": by.is_direct, "refusal": by.refusal}
print(json.dumps(told))
"""


def library_path() -> str:
    """Directories of the libraries that kvikio loads."""
    found = {str(path.parent) for path in DIRECTORY.rglob("*.so*") if path.name.startswith("lib")}
    return ":".join(sorted(found))


@pytest.mark.skipif(not (DIRECTORY / "whole").exists(), reason="kvikio is not in .kvikio: `make kvikio` gets it from pip and apt")
def test_kvikio_reads_records_of_a_real_volume_and_damage_is_seen(daemon: DaemonProcess, volume: Path, tmp_path: Path) -> None:
    paths = [*filter(None, sys.path), str(DIRECTORY / "python")]
    environment = {**os.environ, "LD_LIBRARY_PATH": library_path(), "PYTHONPATH": ":".join(paths)}
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, daemon.address, str(volume)], env=environment, capture_output=True, text=True,
        timeout=LIMIT_S, cwd=tmp_path, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    told = json.loads(ended.stdout.splitlines()[-1])
    assert told["direct"], told["refusal"]
    assert told["equal"] == 4
    assert "another device sum" in told["damaged"]


def test_without_kvikio_reads_say_so_where_they_are_made() -> None:
    with pytest.raises(VolumeError, match="kvikio cannot be imported"):
        KvikioReads(object())


def test_a_bounce_reads_all_of_a_long_image_and_says_where_a_volume_ends(tmp_path: Path) -> None:
    data = random.Random(50).randbytes((9 << 20) + 4096)
    (tmp_path / "volume").write_bytes(data)
    descriptor = os.open(tmp_path / "volume", os.O_RDONLY)
    file, reads = VolumeFile(descriptor), BounceReads(is_pinned=False)
    os.close(descriptor)
    image = torch.zeros(9 << 20, dtype=torch.uint8)
    reads.read(file, 4096, image)
    assert image.numpy().tobytes() == data[4096:]
    with pytest.raises(VolumeError, match="ends at byte"):
        reads.read(file, 8192, image)


class OnGpu(bytearray):
    """Memory that says that it is a GPU's, as far as reads by kvikio ask."""

    is_cuda, device = True, "cuda:3"

    @property
    def nbytes(self) -> int:
        return len(self)


def test_a_read_by_kvikio_waits_for_what_is_queued_on_its_target(
    tmp_path: Path, fake_kvikio: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Never run on a GPU: what stands for the stream notes when it was waited for."""
    waited: list[tuple[str, int]] = []
    kvikio, into = fake_kvikio(), OnGpu(4096)
    monkeypatch.setattr(
        torch.cuda, "current_stream",
        lambda device: SimpleNamespace(synchronize=lambda: waited.append((device, kvikio.read_count))),
    )  # fmt: skip
    (tmp_path / "volume").write_bytes(bytes([7]) * 4096)
    with (tmp_path / "volume").open("rb") as opened:
        KvikioReads(kvikio).read(VolumeFile(opened.fileno()), 0, into)  # type: ignore[arg-type]
    assert (waited, bytes(into)) == ([("cuda:3", 0)], bytes([7]) * 4096)
