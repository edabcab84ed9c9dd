"""A rank gets its share of a processor and no more; the groups are gone however their owner ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from paramstore_testkit.nodes import quota as module
from paramstore_testkit.nodes.quota import Hierarchy, Quota, find_hierarchy, missing_reason, open_quotas

BURN = """
import time
start_s = time.monotonic()
while time.process_time() < 0.15: pass
print(time.monotonic() - start_s)
"""
HOLD = """
import json, signal, subprocess
from paramstore_testkit.nodes.quota import open_quotas

with open_quotas(2, share=0.5) as quotas:
    words = [*quotas[1].entering(), "sh", "-c", "echo in >&2; exec sleep infinity"]
    rank = subprocess.Popen(words, stderr=subprocess.PIPE, start_new_session=True)
    rank.stderr.readline()
    print(json.dumps([str(quota.group) for quota in quotas]), flush=True)
    signal.pause()
"""
ENTER = """
import sys
from pathlib import Path
from paramstore_testkit.nodes.quota import Quota

Quota(Path(sys.argv[1])).enter()
print(Path("/proc/self/cgroup").read_text())
"""
END_S = 60.0


@pytest.fixture
def possible() -> None:
    if reason := missing_reason():
        pytest.skip(reason)


@pytest.mark.parametrize(
    ("version", "share", "limits"),
    [
        (1, 0.4, {"cpu.cfs_period_us": "5000", "cpu.cfs_quota_us": "2000"}),
        (2, 0.4, {"cpu.max": "2000 5000"}),
        (2, 0.1, {"cpu.max": "1000 10000"}),  # the kernel takes no quota below 1000
        (2, 1.5, {"cpu.max": "7500 5000"}),
    ],
)
def test_a_share_becomes_a_quota_of_a_short_period(version: int, share: float, limits: dict[str, str]) -> None:
    assert Hierarchy(Path("/groups"), version).limits(share) == limits


def test_the_first_hierarchy_that_shares_out_processors_is_found(tmp_path: Path) -> None:
    unified, mounts = tmp_path / "unified", tmp_path / "mounts"
    unified.mkdir()
    (unified / "cgroup.subtree_control").write_text("memory pids\n")
    two = f"cgroup {tmp_path}/cpuset cgroup rw,cpuset 0 0\ncgroup2 {unified} cgroup2 rw 0 0\n"
    mounts.write_text(two)
    with pytest.raises(OSError, match=rf"cgroup.subtree_control: .*{unified}"):
        find_hierarchy(mounts)
    mounts.write_text(f"{two}cgroup {tmp_path}/both cgroup rw,cpu,cpuacct 0 0\n")
    assert find_hierarchy(mounts) == Hierarchy(tmp_path / "both", 1)
    (unified / "cgroup.subtree_control").write_text("cpu memory\n")
    assert find_hierarchy(mounts) == Hierarchy(unified, 2)


def test_a_machine_without_such_groups_is_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = Hierarchy(tmp_path, 2)
    monkeypatch.setattr(module, "find_hierarchy", lambda: found)
    assert missing_reason() == "this kernel has no cpu.max"
    assert list(tmp_path.iterdir()) == []
    found = Hierarchy(tmp_path / "missing", 1)
    assert "No such file" in (missing_reason() or "")


@pytest.mark.slow
@pytest.mark.usefixtures("possible")
def test_a_rank_computes_no_longer_than_its_share() -> None:
    with open_quotas(1, share=0.25) as (quota,):
        words = [*quota.entering(), sys.executable, "-S", "-c", BURN]
        told = subprocess.run(words, capture_output=True, check=True, timeout=END_S).stdout
    assert float(told) > 0.3  # 0.15 s at a quarter of a processor are 0.6 s; more on a busy machine


@pytest.mark.usefixtures("possible")
def test_groups_are_gone_after_an_error() -> None:
    with suppress(KeyError), open_quotas(3, share=0.5) as quotas:
        assert all(quota.group.is_dir() for quota in quotas)
        raise KeyError
    assert len({*quotas}) == 3
    assert not any(quota.group.exists() for quota in quotas)


@pytest.mark.slow
@pytest.mark.usefixtures("possible")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_groups_are_gone_with_who_is_in_them_when_a_signal_ends_their_owner(number: signal.Signals) -> None:
    with subprocess.Popen([sys.executable, "-c", HOLD], stdout=subprocess.PIPE, start_new_session=True) as owner:
        assert owner.stdout is not None
        groups = [Path(group) for group in json.loads(owner.stdout.readline())]
        assert (groups[1] / "cgroup.procs").read_text()
        os.killpg(owner.pid, number)  # as Ctrl-C does
        owner.communicate(timeout=END_S)  # the guard and the rank write there too: it ends when they have
    assert not any(group.exists() for group in groups)


def test_a_group_that_is_not_there_is_not_entered(tmp_path: Path) -> None:
    words = [*Quota(tmp_path / "missing").entering(), "echo", "ran"]
    assert subprocess.run(words, capture_output=True, timeout=END_S, check=False).stdout == b""


@pytest.mark.usefixtures("possible")
def test_a_process_can_enter_by_itself() -> None:
    with open_quotas(1, share=0.5) as (quota,):
        done = subprocess.run([sys.executable, "-c", ENTER, str(quota.group)], capture_output=True, timeout=END_S, check=True)
        assert quota.group.name.encode() in done.stdout
