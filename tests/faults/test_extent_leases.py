"""Volumes fail beneath extents that another process has leased: what it leased stays right, and goes back when it is killed."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import paramstore_client as ps
from paramstore_client.extents.extent_reader import ExtentReader
from paramstore_client.namespace import Namespace, acquire_extents
from paramstore_testkit.processes.killable_serve import KillableDaemons

pytestmark = pytest.mark.soak
EXPERTS, LIMIT_S = 4, 20.0
SCHEMA = ps.param_schema({"w": ((64, 64), torch.float32)})
HOLDER = """
import sys
import torch
import paramstore_client as ps
from paramstore_client.extents.extent_reader import ExtentReader
from paramstore_client.namespace import acquire_extents

with ps.connect(sys.argv[1]) as store:
    reader = store.open_namespace("m")
    part = reader.schema.stored
    by, image = ExtentReader(part, torch.device("cpu"), direct=None), torch.zeros(part.image_bytes, dtype=torch.uint8)
    lease = acquire_extents(reader, reader.keys())
    print("leased", flush=True)
    for _ in sys.stdin:
        found = []
        for key in reader.keys():
            image.fill_(0x5A)
            by.read(lease, key, image)
            found.append(image[part.fields[0].offset_bytes :][:4].view(torch.float32).item())
        print(found, flush=True)
"""
"""Leases all there is, and reads it whenever it is given a line."""


@pytest.fixture
def daemons(tmp_path: Path) -> Iterator[KillableDaemons]:
    with KillableDaemons(tmp_path / "log", is_plain=True) as daemons:
        yield daemons
        daemons.kill()


def fill(store: ps.Store, name: str) -> None:
    """Makes an inference namespace whose experts have their number for a value."""
    with store.create_namespace(name, SCHEMA, layers=1, experts=EXPERTS) as made:
        made.initialize(lambda key: {"w": torch.full((64, 64), float(key[1]))})
        made.commit(1).wait()


def read_past_the_daemon(reader: Namespace) -> list[float]:
    """The values of all experts, by a lease of their extents."""
    part = reader.schema.stored
    by, image = ExtentReader(part, torch.device("cpu"), direct=None), torch.zeros(part.image_bytes, dtype=torch.uint8)
    with acquire_extents(reader, reader.keys()) as lease:
        found = []
        for key in reader.keys():  # noqa: SIM118 - a namespace is no mapping
            by.read(lease, key, image)
            found.append(image[part.fields[0].offset_bytes :][:4].view(torch.float32).item())
        return found


def test_leased_extents_of_volumes_that_are_fenced_meanwhile_stay_right_and_are_leased_on(
    daemons: KillableDaemons, tmp_path: Path
) -> None:
    switches, expected = tmp_path / "switches", [float(expert) for expert in range(EXPERTS)]
    switches.mkdir()
    address = daemons.start(tmp_path / "store", flags={"extent_leases": EXPERTS}, switches=switches)
    assert address is not None
    with ps.connect(address) as store:
        fill(store, "m")
        reader = store.open_namespace("m")
        with subprocess.Popen(
            [sys.executable, "-c", HOLDER, address], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as holder:
            try:
                assert holder.stdin is not None
                assert holder.stdout is not None
                assert holder.stdout.readline() == "leased\n"
                (switches / "fdatasync").touch()
                with pytest.raises(ps.VolumeError, match="flush failed"):
                    fill(store, "other")
                assert all(volume["fenced"] for volume in store.stats()["volumes"].values())
                holder.stdin.write("read\n")
                holder.stdin.flush()
                assert holder.stdout.readline() == f"{expected}\n"
                with pytest.raises(ps.CapacityError, match="extent_leases=4"):
                    acquire_extents(reader, reader.keys())
            finally:
                holder.kill()
        assert leased_again(reader) == expected
    daemons.kill()
    (switches / "fdatasync").unlink()
    again = daemons.start(tmp_path / "store", flags={"extent_leases": EXPERTS}, switches=switches)
    assert again is not None
    with ps.connect(again) as store:
        assert read_past_the_daemon(store.open_namespace("m")) == expected


def leased_again(reader: Namespace) -> list[float]:
    """What is read past the daemon once a process that was killed has its leases no more."""
    deadline_s = time.monotonic() + LIMIT_S
    while True:
        try:
            return read_past_the_daemon(reader)
        except ps.CapacityError:
            assert time.monotonic() < deadline_s, "the killed process's extents stay leased"
