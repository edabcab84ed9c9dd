"""`paramstore verify` and a real daemon: damage by hand is named exactly, training beside it goes on, its end is prompt."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import paramstore_client as ps
from paramstore.core.key import ExpertKey
from paramstore_testkit.processes.daemon_process import DaemonProcess

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("in_time")]

SPOILT: tuple[ExpertKey, ...] = ((0, 2), (1, 1))
KEYS = [(layer, expert) for layer in range(2) for expert in range(4)]
SHAPE = (64, 64)
OPTIONS = ps.AdamW(lr=0.1)
SLOWLY = 1
"""Bytes a second: such a scrub ends only when it is ended."""
END_S = 5.0

Serve = Callable[..., DaemonProcess]
ValueOf = Callable[[ExpertKey], dict[str, torch.Tensor]]


def spoil(directory: Path, value: torch.Tensor) -> int:
    """Flips a bit of the only place of the volume that holds `value`, a record's first field; gives the record's offset."""
    path = directory / "volume" / "volume-000.data"
    content = path.read_bytes()
    place = content.find(value.numpy().tobytes())
    assert place > 0
    with path.open("r+b") as file:
        file.seek(place + 1000)
        file.write(bytes([content[place + 1000] ^ 1]))
        file.flush()
        os.fsync(file.fileno())
    schema = ps.adamw_schema({"w": SHAPE}, param_dtype="float32")
    return place - schema.stored.fields[0].offset_bytes


def verify(daemon: DaemonProcess, *arguments: str) -> tuple[int, dict[str, Any]]:
    """Exit code and result of the command, run as a user does."""
    command = [sys.executable, "-m", "paramstore", "verify", "--json", *arguments, daemon.address]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert done.stderr == ""
    return done.returncode, json.loads(done.stdout)


def train(namespace: ps.Namespace, step: int, keys: list[ExpertKey]) -> None:
    namespace.push({key: {"w": torch.ones(SHAPE)} for key in keys})
    namespace.apply(OPTIONS).wait()
    namespace.commit(step).wait()


def test_bytes_flipped_by_hand_are_named_exactly_and_other_keys_go_on(
    directory: Path, serve: Serve, value_of: ValueOf
) -> None:
    daemon = serve(directory).start()
    whole = [key for key in KEYS if key not in SPOILT]
    with ps.connect(daemon.address) as store, store.open_namespace("moe", mode="write") as writer:
        code, result = verify(daemon)
        assert (code, result["found"], result["records"]) == (0, 0, len(KEYS))
        places = {key: spoil(directory, value_of(key)["w"]) for key in SPOILT}
        code, result = verify(daemon)
        assert code == 4
        assert result["found"] == len(SPOILT)
        found = {tuple(finding["key"]): finding for finding in result["findings"]}
        assert {key: (finding["volume"], finding["offset_bytes"]) for key, finding in found.items()} == {
            key: (0, place) for key, place in places.items()
        }
        assert all(finding["namespace"] == "moe" and finding["steps"] == [1] for finding in found.values())
        assert all("field 'master/w'" in finding["reason"] for finding in found.values())
        train(writer, 2, whole)
        reader = store.open_namespace("moe", at=1, min_lease_slots=len(whole))
        with reader, writer.acquire(whole) as lease, reader.acquire(whole) as first:
            assert all(torch.equal(first[key]["w"], value_of(key)["w"]) for key in whole)
            assert not any(torch.equal(lease[key]["w"], first[key]["w"]) for key in whole)
        code, result = verify(daemon, "--namespace", "moe")
        assert code == 4
        assert sorted((tuple(finding["key"]), finding["steps"]) for finding in result["findings"]) == [
            (key, [1, 2]) for key in sorted(SPOILT)
        ]
        assert result["records"] == len(KEYS) + len(whole)
        assert store.stats()["namespaces"]["moe"]["broken"] is None
        assert store.stats()["verify"]["last"]["found"] == len(SPOILT)
        with pytest.raises(ps.CorruptRecord, match=str(places[SPOILT[0]])):
            writer.acquire([SPOILT[0]])
    daemon.stop()
    assert "Traceback" not in daemon.stderr


def test_a_store_that_trains_and_commits_beside_it_is_whole_and_goes_on(directory: Path, serve: Serve) -> None:
    daemon = serve(directory).start()
    with ps.connect(daemon.address) as store, store.open_namespace("moe", mode="write") as writer:
        results: list[dict[str, Any]] = []
        ticket = store.verify()
        for step in range(2, 22):
            train(writer, step, KEYS[step % 3 :])
            if ticket.done():
                results.append(ticket.wait())
                ticket = store.verify("moe", bytes_per_s=None if step % 2 else "20MB")
        results.append(ticket.wait(10.0))
        assert len(results) > 1
        assert [result["findings"] for result in results] == [[]] * len(results)
        assert all(result["bytes_read"] == result["bytes_total"] for result in results)
        assert writer.steps()[-1] == 21
        for key in KEYS:
            with writer.acquire([key]) as lease:
                assert torch.isfinite(lease[key]["w"]).all()
    daemon.stop()
    again = serve(directory).start()
    code, result = verify(again)
    assert (code, result["found"]) == (0, 0)


def test_a_rate_is_kept(directory: Path, serve: Serve) -> None:
    daemon = serve(directory).start()
    rate = 1 << 20
    code, result = verify(daemon, "--rate", str(rate))
    assert code == 0
    assert 0 < result["bytes_read"] <= rate * result["seconds"]


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL])
def test_the_daemons_end_ends_it_and_the_store_reopens(end: signal.Signals, directory: Path, serve: Serve) -> None:
    daemon = serve(directory).start()
    with ps.connect(daemon.address) as store:
        ticket = store.verify(bytes_per_s=SLOWLY)
        assert store.stats()["verify"]["running"]["records_total"] in (0, len(KEYS))
        started_s = time.monotonic()
        daemon.signal(end)
        with pytest.raises(ps.StoreUnavailable):
            ticket.wait(END_S)
        assert daemon.wait() == (0 if end is signal.SIGTERM else -signal.SIGKILL)
        assert time.monotonic() - started_s < END_S
    assert "Traceback" not in daemon.stderr
    again = serve(directory).start()
    assert verify(again)[0] == 0


def test_a_client_that_goes_away_leaves_no_scrub_behind(
    directory: Path, serve: Serve, until: Callable[[Callable[[], object]], None]
) -> None:
    daemon = serve(directory).start()
    with ps.connect(daemon.address) as store:
        with ps.connect(daemon.address) as other:
            ticket = other.verify(bytes_per_s=SLOWLY)
            until(lambda: store.stats()["verify"]["running"])
            ticket.abandon()
        until(lambda: not store.stats()["verify"]["running"])
        assert store.stats()["verify"]["last"]["state"] == "cancelled"
        assert store.verify().wait()["found"] == 0
