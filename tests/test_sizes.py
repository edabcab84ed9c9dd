"""Sizes as people write them: every unit, exactly; what is none is refused."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paramstore.errors import ConfigError
from paramstore.sizes import SIZE_UNITS, format_size, parse_size


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("64GiB", 64 << 30), ("1.5MB", 1_500_000), ("4096", 4096), ("0.5 KiB", 512), (" 2TiB ", 2 << 40), ("7B", 7), (12, 12),
        ("9007199254740993", 9007199254740993), ("64G", 64 << 30), ("64g", 64 << 30), ("64gib", 64 << 30), ("1.5G", 3 << 29),
        ("64GB", 64 * 10**9), ("64gb", 64 * 10**9), ("1 gib", 1 << 30), ("2k", 2048), ("3M", 3 << 20), ("600TB", 600 * 10**12),
        ("1b", 1), ("0", 0),
    ],
)  # fmt: skip
def test_sizes_are_read_exactly(text: str | int, size_bytes: int) -> None:
    assert parse_size(text) == size_bytes


@pytest.mark.parametrize("unit", SIZE_UNITS)
def test_every_unit_is_taken_in_any_case(unit: str) -> None:
    assert {parse_size(f"5{word}") for word in (unit, unit.lower(), unit.upper())} == {5 * SIZE_UNITS[unit]}


@pytest.mark.parametrize("text", ["1", "64", "12.5", "4095"])
def test_a_small_number_without_a_unit_is_refused_with_what_was_meant(text: str) -> None:
    with pytest.raises(ConfigError, match=f"^size '{text}' has no unit: did you mean {text}GiB\\? Bytes are written {text}B$"):
        parse_size(text)


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "1 gob", "64 G iB", "1e9", "64GiB free", "1.GiB", "inf", 1.5, None, ["1"]])
def test_what_is_no_size_is_refused(text: object) -> None:
    with pytest.raises(ConfigError, match="size"):
        parse_size(text)


@given(st.text() | st.from_regex(r"\d{1,500}(\.\d+)?(GiB|MB)?", fullmatch=True))
def test_any_text_is_a_size_or_a_config_error(text: str) -> None:
    with suppress(ConfigError):
        assert parse_size(text) >= 0


@pytest.mark.parametrize(
    ("size_bytes", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (64 << 30, "64 GiB"), (3 << 40, "3 TiB")]
)
def test_sizes_are_shown_in_the_largest_unit(size_bytes: int, text: str) -> None:
    assert format_size(size_bytes) == text
