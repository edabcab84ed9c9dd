"""A finding says where, as far as that is known, and what."""

from __future__ import annotations

from paramstore.fsck.findings import Finding


def test_a_finding_names_its_whole_place() -> None:
    found = Finding(what="chunk 3 is wrong", volume=0, offset=4096, namespace="moe", key=(0, 7), step=12)
    assert found.describe() == "volume 0, offset 4096, namespace moe, key (0, 7), step 12: chunk 3 is wrong"


def test_what_is_not_known_of_the_place_is_left_out() -> None:
    assert Finding(what="it is torn", step=0).describe() == "step 0: it is torn"
    assert Finding(what="there is no catalog").describe() == "there is no catalog"


def test_as_json_every_field_is_there() -> None:
    values = Finding(what="w", key=(1, 2)).as_json()
    assert values == {"what": "w", "volume": None, "offset": None, "namespace": None, "key": (1, 2), "step": None}
