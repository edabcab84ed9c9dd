"""The kernel's figures of a process."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from pathlib import Path

import pytest

from paramstore.bench.process import cpu_s, resident_bytes, rss_anon_bytes, written_bytes

MIB = 1 << 20


def test_cpu_time_grows_with_work_of_any_thread_and_is_close_to_the_kernels_own() -> None:
    before_s, own_before_s = cpu_s(os.getpid()), sum(os.times()[:2])
    sum(range(300_000))
    used_s = cpu_s(os.getpid()) - before_s
    assert used_s > 0
    assert used_s == pytest.approx(sum(os.times()[:2]) - own_before_s, abs=0.05)


def test_private_memory_grows_by_what_is_touched() -> None:
    private = mmap.mmap(-1, 16 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # no heap, which may have room already
    before_bytes = rss_anon_bytes(os.getpid())
    private[:: mmap.PAGESIZE] = bytes(16 * MIB // mmap.PAGESIZE)
    assert rss_anon_bytes(os.getpid()) - before_bytes >= 15 * MIB


def test_shared_memory_is_not_counted_as_private() -> None:
    shared = mmap.mmap(-1, 16 * MIB)
    before_bytes = rss_anon_bytes(os.getpid()), resident_bytes(os.getpid())
    shared[:: mmap.PAGESIZE] = bytes(16 * MIB // mmap.PAGESIZE)
    assert rss_anon_bytes(os.getpid()) - before_bytes[0] < 8 * MIB
    assert resident_bytes(os.getpid()) - before_bytes[1] >= 15 * MIB


def test_bytes_sent_to_storage_are_counted(tmp_path: Path) -> None:
    before_bytes = written_bytes(os.getpid())
    with (tmp_path / "file").open("wb") as file:
        file.write(os.urandom(MIB))
        file.flush()
        os.fsync(file.fileno())
    kind = subprocess.run(["stat", "-f", "-c", "%T", str(tmp_path)], check=True, capture_output=True, text=True).stdout
    assert "tmpfs" in kind or written_bytes(os.getpid()) - before_bytes >= MIB


HOLD_AND_FREE = """
import os
from paramstore.bench.process import peak_bytes, reset_peak
reset_peak()
before_bytes = peak_bytes(os.getpid())
held = bytearray(os.urandom(64 << 20))
del held
assert peak_bytes(os.getpid()) >= before_bytes + (64 << 20)
reset_peak()
assert peak_bytes(os.getpid()) < before_bytes + (64 << 20)
"""


def test_a_peak_stays_after_its_memory_is_freed_and_is_forgotten_when_asked() -> None:
    """In a process of its own: of a large one the kernel may take back idle pages meanwhile."""
    subprocess.run([sys.executable, "-c", HOLD_AND_FREE], check=True, timeout=60)


def test_process_that_is_gone_is_an_error() -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    with pytest.raises(ProcessLookupError):
        cpu_s(ended.pid)
