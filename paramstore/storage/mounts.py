"""File systems: which one a path lies on, how much it has left, and whether the catalog may lie there.

LMDB maps its file and relies on the local page cache and on its meta page being written whole: network file
systems and DAX mappings do not give that. Where the mount table cannot be read (no /proc) nothing is refused.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import NamedTuple

from paramstore.errors import CatalogError

MOUNT_TABLE = Path("/proc/self/mounts")
NETWORK_TYPES = frozenset(
    {"nfs", "nfs3", "nfs4", "cifs", "smb3", "smbfs", "9p", "afs", "ncpfs", "fuse.sshfs", "fuse.glusterfs"}
)
DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
DAX_OPTIONS = frozenset({"dax", "dax=always"})


def shown(path: Path) -> str:
    """A path as text that can be written anywhere, whatever this process's locale makes of its bytes."""
    return os.fsencode(path).decode(errors="backslashreplace")


class Mount(NamedTuple):
    """One line of the mount table."""

    point: str
    type: str
    options: frozenset[str]


def free_bytes(place: Path | int) -> int:
    """Bytes that the file system of a path or an open descriptor has left for this user. Raises OSError."""
    status = os.statvfs(place)
    return status.f_bavail * status.f_frsize


def parse_mounts(table: str) -> list[Mount]:
    """Parses a table in the format of /proc/mounts, in its order; later mounts hide earlier ones."""
    mounts = []
    for line in table.splitlines():
        fields = line.split(" ")
        if len(fields) >= 4:
            point = os.fsdecode(os.fsencode(fields[1]).decode("unicode_escape").encode("latin-1"))
            mounts.append(Mount(point, fields[2], frozenset(fields[3].split(","))))
    return mounts


def mount_of(path: Path, mounts: list[Mount]) -> Mount | None:
    """The mount that `path`, absolute and without links, lies on."""
    found: Mount | None = None
    for mount in mounts:
        if path.is_relative_to(mount.point) and (found is None or len(mount.point) >= len(found.point)):
            found = mount
    return found


def check_catalog_place(path: Path, mounts: list[Mount] | None = None) -> None:
    """Raises CatalogError if the catalog may not lie at `path`. mounts: None for this process's."""
    if mounts is None:
        try:
            mounts = parse_mounts(MOUNT_TABLE.read_text(errors="surrogateescape"))
        except OSError:
            return  # no mount table, nothing to judge by
    mount = mount_of(path.resolve(), mounts)
    if mount is None:
        return
    if mount.type in NETWORK_TYPES:
        raise CatalogError(
            f"catalog {path} lies on {mount.point}, a {mount.type} file system: LMDB needs a local one; "
            "use another --dir"
        )
    if mount.options & DAX_OPTIONS:
        raise CatalogError(
            f"catalog {path} lies on {mount.point}, which is mounted with dax: LMDB is not safe there; "
            "use another --dir and give the persistent memory as --volume"
        )
