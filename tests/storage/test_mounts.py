"""Which file systems the catalog accepts."""

from __future__ import annotations

from pathlib import Path

import pytest

from paramstore.errors import CatalogError
from paramstore.storage.mounts import check_catalog_place, mount_of, parse_mounts

TABLE = """\
/dev/sda1 / ext4 rw,relatime 0 0
server:/export /home nfs4 rw,vers=4.2 0 0
/dev/pmem0 /mnt/with\\040space ext4 rw,dax=always 0 0
/dev/pmem1 /mnt/old xfs rw,dax 0 0
/dev/pmem2 /mnt/inode xfs rw,dax=inode 0 0
/dev/sdb1 /home/local xfs rw 0 0
/dev/sdc1 /mnt/old ext4 rw 0 0
"""


def test_the_longest_mount_point_wins() -> None:
    mounts = parse_mounts(TABLE)
    assert mount_of(Path("/home/me"), mounts) == mounts[1]
    assert mount_of(Path("/home/local/me"), mounts) == mounts[5]
    assert mount_of(Path("/homely"), mounts) == mounts[0]


def test_of_two_mounts_on_one_point_the_later_hides_the_earlier() -> None:
    mounts = parse_mounts(TABLE)
    assert mount_of(Path("/mnt/old/catalog"), mounts) == mounts[6]


def test_spaces_in_a_mount_point_are_read() -> None:
    assert parse_mounts(TABLE)[2].point == "/mnt/with space"


def test_a_network_file_system_is_refused() -> None:
    with pytest.raises(CatalogError, match="/home, a nfs4 file system"):
        check_catalog_place(Path("/home/me/catalog"), parse_mounts(TABLE))


def test_a_dax_mount_is_refused() -> None:
    with pytest.raises(CatalogError, match="mounted with dax"):
        check_catalog_place(Path("/mnt/with space/catalog"), parse_mounts(TABLE))


@pytest.mark.parametrize("path", ["/var/lib/catalog", "/home/local/catalog", "/mnt/inode/catalog", "/mnt/old/catalog"])
def test_local_file_systems_are_accepted(path: str) -> None:
    check_catalog_place(Path(path), parse_mounts(TABLE))


def test_the_mount_table_of_this_process_is_read(tmp_path: Path) -> None:
    check_catalog_place(tmp_path)
