"""Whether a file in the store's directories is one that the daemon may write to.

Whoever can write there can put a link to somebody else's file in place of ours, or a file that he goes on owning: what the
daemon wrote into it would go where it should not, or be read by him.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path


def objection_to(status: os.stat_result) -> str:
    """Why a file is none of ours, for a message; "" if it is a regular file of this user or root, under one name."""
    if not stat.S_ISREG(status.st_mode):
        return "it is not a regular file"
    if status.st_uid not in (os.geteuid(), 0):
        return f"it belongs to user {status.st_uid}: run as that user, or chown it"
    if status.st_nlink > 1:
        return f"it has {status.st_nlink} names (hard links), and may be somebody else's file: copy it and remove the link"
    return ""


def objection_to_tree(directory: Path, names: tuple[str, ...]) -> str:
    """Why `directory`, or a file of these names in it, is none of ours; "" if all that is there is. Raises OSError."""
    try:
        if not stat.S_ISDIR(directory.lstat().st_mode):
            return f"{directory}: it is not a directory"
    except FileNotFoundError:
        return ""
    for name in names:
        try:
            objection = objection_to((directory / name).lstat())
        except FileNotFoundError:
            continue
        if objection:
            return f"{directory / name}: {objection}"
    return ""
