import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from paramstore.daemon.volume_places import adopt_new_volumes
from paramstore.errors import VolumeError
from paramstore.storage.format.notes import read_superblock
from paramstore.storage.recovery import open_store
from paramstore.storage.volume.backing_file import volume_path
from paramstore.storage.volume.base import Granularity, granularity_of
from paramstore.storage.volume.pmem_volume import PmemVolume
from paramstore.testing.catalogs import MemoryCatalog
from paramstore.testing.volume_contract import VolumeContract
from paramstore.testing.volumes import MemoryVolume, page_aligned
from paramstore_native import libpmem2
from paramstore_testkit.crash.pmem_lines import Pmem
from paramstore_testkit.disks.journal import Flushed, Journal, Persisted, Wrote

pytestmark = [pytest.mark.pmem, pytest.mark.skipif(bool(libpmem2.missing_reason()), reason=libpmem2.missing_reason())]
SIZE_BYTES = 8 << 20
STORE_BYTES = 16 << 20
SHARED_MEMORY = Path("/dev/shm")

RUN_CONTRACT = """
import sys
from pathlib import Path
from paramstore.storage.volume.pmem_volume import PmemVolume
from paramstore.testing.volume_contract import run_contract

directory, granularity = Path(sys.argv[1]), sys.argv[2]

def make(name):
    (directory / name).parent.mkdir(parents=True, exist_ok=True)
    volume = PmemVolume.create(directory / name, index=0, size_bytes=8 << 20, granularity=granularity)
    assert volume.describe()["granularity"] == granularity, volume.describe()
    assert "is set" in volume.describe()["reason"], volume.describe()
    return volume

sys.stdout.write(str(len(run_contract(make))))
"""


class TestPmemVolumeOnAnOrdinaryFile(VolumeContract):
    @pytest.fixture
    def volume(self, tmp_path: Path) -> Iterator[PmemVolume]:
        volume = PmemVolume.create(tmp_path, index=1, size_bytes=SIZE_BYTES)
        yield volume
        volume.close()


@pytest.mark.slow
@pytest.mark.skipif(not SHARED_MEMORY.is_dir(), reason=f"no {SHARED_MEMORY}")
@pytest.mark.parametrize("granularity", ["byte", "cache_line"])
def test_the_contract_holds_with_finer_granularity(granularity: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    # The library reads its switch when it is loaded, so this needs a process of its own.
    directory = SHARED_MEMORY / f"{tmp_path_factory.getbasetemp().name}-{os.getpid()}-{granularity}"
    directory.mkdir()
    environment = {**os.environ, libpmem2.FORCE_VARIABLE: granularity.upper(), "PYTHONPATH": os.pathsep.join(sys.path)}
    try:
        ran = subprocess.run(
            [sys.executable, "-c", RUN_CONTRACT, str(directory), granularity],
            env=environment, capture_output=True, text=True, check=False, timeout=60,
        )  # fmt: skip
    finally:
        for path in sorted(directory.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        directory.rmdir()
    assert ran.returncode == 0, ran.stderr
    assert int(ran.stdout) == sum(name.startswith("test_") for name in dir(VolumeContract))


def test_a_closed_volume_opens_with_its_bytes(tmp_path: Path) -> None:
    data, found = page_aligned(8192, seed=1), page_aligned(8192)
    volume = PmemVolume.create(tmp_path, index=0, size_bytes=SIZE_BYTES)
    volume.write(4096, [data])
    volume.flush()
    volume.close()
    again = PmemVolume.open(tmp_path, index=0)
    assert again.size_bytes == SIZE_BYTES
    again.read(4096, [found])
    again.close()
    assert found == data


def test_a_granularity_the_device_has_not_is_refused_and_leaves_no_new_file(tmp_path: Path) -> None:
    with pytest.raises(VolumeError, match=r"volume 0 .*: cannot map with pmem_granularity=byte: libpmem2: requested"):
        PmemVolume.create(tmp_path, index=0, size_bytes=SIZE_BYTES, granularity="byte")
    assert list(tmp_path.iterdir()) == []


def test_flush_reports_a_failing_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(descriptor: int) -> None:
        raise OSError(5, "Input/output error")

    volume = PmemVolume.create(tmp_path, index=0, size_bytes=SIZE_BYTES)
    monkeypatch.setattr(os, "fdatasync", fail)
    with pytest.raises(VolumeError, match="flush failed: Input/output error"):
        volume.flush()
    volume.close()


def test_where_the_granularity_is_forced_flush_trusts_it_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    monkeypatch.setenv(libpmem2.FORCE_VARIABLE, "BYTE")
    monkeypatch.setattr(os, "fdatasync", synced.append)
    volume = PmemVolume.create(tmp_path, index=0, size_bytes=SIZE_BYTES)
    monkeypatch.setattr(type(volume._mapping), "persists_writes", True)
    volume.flush()
    assert len(synced) == 1
    assert "`flush` makes writes durable" in str(volume.describe()["reason"])
    volume.close()


def test_where_every_write_persists_there_is_nothing_to_flush(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(libpmem2.FORCE_VARIABLE, raising=False)
    for granularity, is_flushed in (("byte", False), ("cache_line", False), ("page", True)):
        journal = Journal()
        volume = Pmem(0, journal, granularity=granularity, size_bytes=SIZE_BYTES).volume()
        assert granularity_of(volume).persists_writes is not is_flushed
        volume.write(4096, [page_aligned(4096, seed=1)])
        volume.flush()
        kinds = [type(event) for event in journal.events]
        assert kinds == [Wrote, Flushed if is_flushed else Persisted]


def test_a_store_made_on_persistent_memory_is_refused_on_pages_and_opens_as_a_file() -> None:
    made = Pmem(0, Journal(), granularity="cache_line", size_bytes=STORE_BYTES)
    catalog = MemoryCatalog()
    contents = catalog.load()
    adopt_new_volumes(catalog, contents, {0: made.volume()})
    assert read_superblock(made.volume()).granularity is Granularity.CACHE_LINE
    assert open_store(contents, {0: made.volume()}).superblocks[0].granularity is Granularity.CACHE_LINE
    moved = Pmem(0, Journal(), granularity="page", size_bytes=STORE_BYTES)
    moved.image[:] = made.image
    with pytest.raises(VolumeError, match=r"volume 0 .* was made on persistent memory, .* cache_line, and has .* page"):
        open_store(contents, {0: moved.volume()})
    open_store(contents, {0: MemoryVolume.of(made.image, index=0)})


def test_a_truncated_file_is_an_error_and_no_signal(tmp_path: Path) -> None:
    volume = PmemVolume.create(tmp_path, index=0, size_bytes=SIZE_BYTES)
    os.truncate(volume_path(tmp_path, 0), 4096)
    for call in (volume.read, volume.write):
        with pytest.raises(VolumeError, match=f"truncated to 4096 bytes, expected {SIZE_BYTES}"):
            call(8192, [page_aligned(4096)])
    volume.close()


def test_an_ordinary_file_says_that_it_is_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    volume = PmemVolume.create(tmp_path, index=0, size_bytes=SIZE_BYTES)
    described = volume.describe()
    volume.close()
    assert (described["mode"], described["granularity"], described["tier"]) == ("pmem", "page", "pmem")
    assert "not byte-addressable persistent memory" in str(described["reason"])
    assert "not byte-addressable persistent memory" in caplog.text
