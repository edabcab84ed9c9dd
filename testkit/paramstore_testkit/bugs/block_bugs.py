"""Bugs to plant in the process of a run, which a replay of block devices must find. Each leaves out what makes something durable.

ext4 makes a new file's name durable with the first flush of the file itself, so that a forgotten flush of the directory alone is
not seen on it; `forget_creation` leaves out both.
"""

from __future__ import annotations

from typing import Any

from paramstore.daemon import volume_places
from paramstore.storage.format.notes import format_volume
from paramstore.storage.volume.backing_file import BackingFile
from paramstore.storage.volume.file_volume import FileVolume
from paramstore_testkit.bugs import canaries, daemon_bugs
from paramstore_testkit.bugs.canaries import nothing
from paramstore_testkit.bugs.daemon_bugs import replace_in


def plant(name: str) -> None:
    """Plants the bug of that name, one of these or a canary, in this process, for good."""
    if name in BUGS:
        BUGS[name]()
    else:
        canaries.plant(name)


def forget_growth() -> None:
    """Does not make a volume's new size durable before the catalog counts on it."""
    replace_in(BackingFile, _sync_apart=nothing)


def forget_creation() -> None:
    """Does not make a new volume's file, name and first pages durable before the catalog counts on them."""
    create, flush = FileVolume.create, FileVolume.flush
    steps = {"_sync_apart": BackingFile._sync_apart, "_make_name_durable": BackingFile._make_name_durable}

    def create_quietly(*arguments: Any, **named: Any) -> FileVolume:
        replace_in(BackingFile, **dict.fromkeys(steps, nothing))
        try:
            return create(*arguments, **named)
        finally:
            replace_in(BackingFile, **steps)

    def format_quietly(*arguments: Any) -> None:
        replace_in(FileVolume, flush=nothing)
        try:
            format_volume(*arguments)
        finally:
            replace_in(FileVolume, flush=flush)

    replace_in(FileVolume, create=staticmethod(create_quietly))
    replace_in(volume_places, format_volume=format_quietly)


BUGS = {
    "acknowledge_early": daemon_bugs.acknowledge_early,
    "forget_growth": forget_growth,
    "forget_creation": forget_creation,
}
