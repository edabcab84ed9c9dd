"""What an import notes of its checkpoint is read back, and nothing else is taken for it."""

from __future__ import annotations

import pytest

from paramstore_client.handle.origin import PATH_MAX, Origin


def test_origin_comes_back_from_its_bytes() -> None:
    origin = Origin("a" * 16, "/models/first", 3)
    assert Origin.from_extra(origin.to_extra()) == origin
    assert Origin.from_extra(b'{"import": {"fingerprint": "a", "source": "b"}}') == Origin("a", "b", None), "it is older"
    assert len(Origin("a", "x" * 10_000).to_extra()) < PATH_MAX + 100


@pytest.mark.parametrize("extra", [b"", b"my own", b"\xff", b"[]", b"{}", b'{"import": 3}', b'{"import": {"fingerprint": "a"}}'])
def test_other_bytes_are_no_origin(extra: bytes) -> None:
    assert Origin.from_extra(extra) is None
