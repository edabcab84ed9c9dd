import pytest

from paramstore.errors import CorruptRecord
from paramstore.storage.format.sealing import PREFIX_BYTES, seal, unseal

MAGIC = b"PSTESTED"


def sealed(length_bytes: int = 40, total_bytes: int = 64) -> bytearray:
    data = bytearray(range(total_bytes))
    seal(data, MAGIC, length_bytes)
    return data


def test_what_was_sealed_opens_with_its_length() -> None:
    assert unseal(sealed(40), MAGIC, "thing") == 40
    assert unseal(memoryview(sealed(64)), MAGIC, "thing", length_bytes=64) == 64


def test_every_flipped_bit_of_a_sealed_structure_is_found() -> None:
    whole = sealed(40)
    for bit in range(40 * 8):
        data = bytearray(whole)
        data[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CorruptRecord, match="thing"):
            unseal(data, MAGIC, "thing")


def test_bytes_after_the_structure_do_not_matter() -> None:
    data = sealed(40)
    data[40] ^= 0xFF
    assert unseal(data, MAGIC, "thing") == 40


def test_another_length_than_expected_is_refused() -> None:
    with pytest.raises(CorruptRecord, match="says it has 40 bytes, expected 48"):
        unseal(sealed(40), MAGIC, "thing", length_bytes=48)


@pytest.mark.parametrize("kept_bytes", [0, 1, PREFIX_BYTES - 1, PREFIX_BYTES, 39])
def test_a_cut_structure_is_refused(kept_bytes: int) -> None:
    with pytest.raises(CorruptRecord):
        unseal(sealed(40)[:kept_bytes], MAGIC, "thing")


def test_zeros_are_no_structure() -> None:
    with pytest.raises(CorruptRecord, match="no thing: starts with"):
        unseal(bytes(4096), MAGIC, "thing")


def test_a_newer_format_version_is_named() -> None:
    data = sealed()
    data[8] = 9
    with pytest.raises(CorruptRecord, match="thing of format version 9; this program reads version 1"):
        unseal(data, MAGIC, "thing")
