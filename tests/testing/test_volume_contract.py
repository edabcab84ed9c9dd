from collections.abc import Sequence

import pytest

from paramstore.storage.volume.base import Volume
from paramstore.testing.volume_contract import VolumeContract, run_contract
from paramstore.testing.volumes import MemoryVolume


class ForgetfulVolume(MemoryVolume):
    """Writes only the first of several buffers."""

    def write(self, offset_bytes: int, data: Sequence[memoryview]) -> None:
        super().write(offset_bytes, data[:1])


class ShrinkingVolume(MemoryVolume):
    """Takes `grow` for `resize`."""

    def grow(self, size_bytes: int) -> None:
        super().grow(size_bytes)
        del self._bytes[size_bytes:]


def test_every_test_of_the_contract_runs_on_a_volume_of_its_own() -> None:
    made: list[str] = []

    def make(name: str) -> Volume:
        made.append(name)
        return MemoryVolume(8 << 20)

    assert run_contract(make) == made == [name for name in dir(VolumeContract) if name.startswith("test_")]


@pytest.mark.parametrize("kind", [ForgetfulVolume, ShrinkingVolume])
def test_a_volume_that_breaks_the_contract_does_not_pass(kind: type[MemoryVolume]) -> None:
    with pytest.raises(AssertionError):
        run_contract(lambda name: kind(8 << 20))
