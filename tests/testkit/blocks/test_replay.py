"""Images of crash states: whatever a check has changed in them is undone, and nothing else is touched."""

from __future__ import annotations

import os
from pathlib import Path

from paramstore_testkit.blocks.mounts import DISK_BYTES, make_image
from paramstore_testkit.blocks.replay import Images, data_ranges

PAGE = 4096


def test_the_ranges_of_a_sparse_file_are_where_somebody_wrote() -> None:
    image = make_image(64 * PAGE, owner=os.getpid())
    for page in (3, 4, 63):
        os.pwrite(image, b"x", page * PAGE)
    assert list(data_ranges(image, 64 * PAGE)) == [(3 * PAGE, 5 * PAGE), (63 * PAGE, 64 * PAGE)]
    os.close(image)


def test_a_file_without_data_has_no_ranges() -> None:
    image = make_image(8 * PAGE, owner=os.getpid())
    assert list(data_ranges(image, 8 * PAGE)) == []
    os.close(image)


def test_releasing_makes_every_image_what_is_durable(tmp_path: Path) -> None:
    images = Images(tmp_path, 2, kind="ext4", owner=os.getpid())
    durable = {index: bytearray(DISK_BYTES["ext4"]) for index in range(2)}
    for index, page in ((0, 5), (1, 700)):
        durable[index][page * PAGE : page * PAGE + 4] = b"kept"
        images.views[index][page * PAGE : page * PAGE + 4] = b"kept"
    images.views[0][5 * PAGE + 1] = 0  # within a page that was durable
    images.views[1][9 * PAGE] = 1  # where nothing was
    images.release(durable, durable)
    assert all(bytes(images.views[index]) == bytes(durable[index]) for index in durable)
