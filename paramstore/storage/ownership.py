"""Checks whether a file in the store's directories is one that the daemon may write to.

Whoever can write there can put a link to somebody else's file, or a file of their own, in place of ours: what the daemon wrote
would go into a file that it should not change, or could be read by them.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path


def objection_to(status: os.stat_result) -> str:
    """Says, for a message, why a file is not ours; "" if it is a regular file of this user or root, under one name."""
    if not stat.S_ISREG(status.st_mode):
        return "it is not a regular file"
    if status.st_uid not in (os.geteuid(), 0):
        return f"it belongs to user {status.st_uid}: run as that user, or chown it"
    if status.st_nlink > 1:
        return f"it has {status.st_nlink} names (hard links), and may be somebody else's file: copy it and remove the link"
    return ""


def objection_to_tree(directory: Path, names: tuple[str, ...]) -> str:
    """Says why `directory`, or a file in it with one of `names`, is not ours; "" if all that exist are ours. Raises OSError."""
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
