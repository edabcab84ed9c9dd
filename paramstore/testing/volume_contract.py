"""The contract of every volume, as tests: each implementation's test module subclasses VolumeContract.

It needs no test framework, so it can also run in a bare process (`run_contract`).
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from paramstore.errors import VolumeError
from paramstore.storage.volume.base import ALIGNMENT_BYTES, Volume
from paramstore.testing.volumes import page_aligned


class VolumeContract:
    """Tests of any volume. A test module subclasses it and provides the fixture `volume`: fresh, at least 8 MiB, zeros."""

    def test_new_volume_reads_zeros(self, volume: Volume) -> None:
        found = page_aligned(1 << 20, seed=1)
        volume.read(0, [found])
        assert bytes(found) == bytes(1 << 20)

    def test_what_is_written_is_read_back(self, volume: Volume) -> None:
        data, found = page_aligned(1 << 20, seed=2), page_aligned(1 << 20)
        volume.write(8192, [data])
        volume.read(8192, [found])
        assert found == data
        volume.flush()
        volume.read(8192, [found])
        assert found == data

    def test_a_write_changes_nothing_outside_its_range(self, volume: Volume) -> None:
        around = page_aligned(4 * ALIGNMENT_BYTES)
        volume.write(ALIGNMENT_BYTES, [page_aligned(2 * ALIGNMENT_BYTES, seed=3)])
        volume.read(0, [around])
        assert bytes(around[:ALIGNMENT_BYTES]) == bytes(around[3 * ALIGNMENT_BYTES :]) == bytes(ALIGNMENT_BYTES)

    def test_buffers_are_transferred_one_after_the_other(self, volume: Volume) -> None:
        lengths = [4096, 1 << 20, 12288]
        data = [page_aligned(length, seed=length) for length in lengths]
        volume.write(4096, data)
        found = page_aligned(sum(lengths))
        volume.read(4096, [found])
        assert bytes(found) == b"".join(data)
        parts = [page_aligned(length) for length in reversed(lengths)]
        volume.read(4096, parts)
        assert b"".join(parts) == bytes(found)

    def test_more_buffers_than_one_system_call_takes(self, volume: Volume) -> None:
        count = 1025
        data, found = page_aligned(count * 4096, seed=4), page_aligned(count * 4096)
        volume.write(0, [data[at * 4096 : (at + 1) * 4096] for at in range(count)])
        volume.read(0, [found[at * 4096 : (at + 1) * 4096] for at in range(count)])
        assert found == data

    def test_read_only_memory_can_be_written(self, volume: Volume) -> None:
        found = page_aligned(4096)
        volume.write(0, [page_aligned(4096, seed=5).toreadonly()])
        volume.read(0, [found])
        assert found == page_aligned(4096, seed=5)

    def test_no_buffers_are_no_transfer(self, volume: Volume) -> None:
        volume.read(volume.size_bytes, [])
        volume.write(volume.size_bytes, [])

    def test_a_range_outside_is_refused_and_changes_nothing(self, volume: Volume) -> None:
        size_bytes = volume.size_bytes
        for offset_bytes in (size_bytes - 4096, size_bytes, 1 << 50, -4096):
            assert _refuses(lambda at=offset_bytes: volume.read(at, [page_aligned(8192)]))  # type: ignore[misc]
            assert _refuses(lambda at=offset_bytes: volume.write(at, [page_aligned(8192, seed=6)]))  # type: ignore[misc]
        assert volume.size_bytes == size_bytes
        found = page_aligned(4096, seed=7)
        volume.read(size_bytes - 4096, [found])
        assert bytes(found) == bytes(4096)

    def test_an_unaligned_range_is_a_bug(self, volume: Volume) -> None:
        for offset_bytes, length_bytes in ((512, 4096), (0, 512)):
            try:
                volume.write(offset_bytes, [page_aligned(length_bytes)])
            except AssertionError:
                continue
            raise AssertionError(f"{length_bytes} bytes at {offset_bytes} were taken")

    def test_growth_keeps_the_bytes_and_adds_zeros(self, volume: Volume) -> None:
        before_bytes = volume.size_bytes
        data, found = page_aligned(8192, seed=8), page_aligned(8192, seed=9)
        volume.write(before_bytes - 8192, [data])
        volume.grow(before_bytes + (1 << 20))
        assert volume.size_bytes == before_bytes + (1 << 20)
        volume.read(before_bytes, [found])
        assert bytes(found) == bytes(8192)
        volume.write(before_bytes, [data])
        volume.flush()
        both = page_aligned(16384)
        volume.read(before_bytes - 8192, [both])
        assert bytes(both) == bytes(data) * 2

    def test_growth_never_shrinks(self, volume: Volume) -> None:
        before_bytes = volume.size_bytes
        volume.grow(4096)
        assert volume.size_bytes == before_bytes

    def test_disjoint_ranges_from_several_threads_while_it_grows(self, volume: Volume) -> None:
        def work(number: int) -> bool:
            data, found = page_aligned(65536, seed=number), page_aligned(65536)
            offset_bytes = number * 65536
            for _ in range(4):
                volume.write(offset_bytes, [data])
                volume.read(offset_bytes, [found])
            return found == data

        size_bytes = volume.size_bytes
        with ThreadPoolExecutor(max_workers=8) as pool:
            works = [pool.submit(work, number) for number in range(32)]
            grows = [pool.submit(volume.grow, size_bytes + step * 65536) for step in range(1, 9)]
            flushes = [pool.submit(volume.flush) for _ in range(4)]
            assert all(future.result() for future in works)
            for future in (*grows, *flushes):
                future.result()
        assert volume.size_bytes == size_bytes + 8 * 65536

    def test_description_names_what_status_shows(self, volume: Volume) -> None:
        described = volume.describe()
        assert described["index"] == volume.index
        assert described["tier"] == volume.tier.value
        assert described["size_bytes"] == volume.size_bytes
        assert isinstance(described["mode"], str)
        assert isinstance(described["reason"], str)
        assert isinstance(described["path"], str)


def _refuses(call: Callable[[], None]) -> bool:
    """Whether `call` raises VolumeError."""
    try:
        call()
    except VolumeError:
        return True
    return False


def run_contract(make: Callable[[str], Volume]) -> list[str]:
    """Runs every test of the contract on a volume of its own; gives their names. make: makes a volume from the test's name."""
    contract = VolumeContract()
    names = [name for name in dir(contract) if name.startswith("test_")]
    for name in names:
        volume = make(name)
        getattr(contract, name)(volume)
        volume.close()
    return names
