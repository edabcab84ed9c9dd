"""Checks a store on file systems that come back from a crash, with the code by which a daemon opens it."""

from __future__ import annotations

import mmap
from collections.abc import Mapping, Sequence

from paramstore.config import Config
from paramstore.daemon import assembly, volume_places
from paramstore.storage.catalog.base import Catalog, Contents
from paramstore.storage.recovery import open_store
from paramstore.storage.volume.base import Volume
from paramstore.testing.volumes import ReadOnly, WrappedVolume
from paramstore_testkit.crash.check import Verdict, verify_ledger, verify_space
from paramstore_testkit.crash.life import NAME
from paramstore_testkit.oracles.experts import State


def reopen(config: Config, steps: Mapping[int, State]) -> Verdict:
    """Opens the store at `config.dir` and reads every record of every retained step. On return nothing is open any more.

    Raises AssertionError, ParamStoreError.
    """
    lock = assembly.take_lock(config)
    try:
        catalog, contents = assembly._open_catalog(config)
        try:
            return _with_volumes(config, catalog, contents, steps)
        finally:
            catalog.close()
    finally:
        lock.release()


def _with_volumes(config: Config, catalog: Catalog, contents: Contents, steps: Mapping[int, State]) -> Verdict:
    volumes = volume_places.open_volumes(config, contents)
    try:
        volume_places.adopt_new_volumes(catalog, contents, volumes)
        aligned: dict[int, Volume] = {index: AlignedReads(volume) for index, volume in volumes.items()}
        return _verify(config, contents, aligned, steps)
    finally:
        for volume in volumes.values():
            volume.close()


def _verify(config: Config, contents: Contents, volumes: Mapping[int, Volume], steps: Mapping[int, State]) -> Verdict:
    store_uuid = contents.store_uuid
    recovered = open_store(contents, volumes, retained_steps=config.retained_steps, held_steps=config.held_steps)
    for ledger in recovered.ledgers.values():
        verify_ledger(ledger, recovered, volumes, store_uuid, steps)
    verify_space(recovered, volumes, [extent for ledger in recovered.ledgers.values() for extent in ledger.extents()])
    found = recovered.ledgers.get(NAME)
    if found is None:
        return Verdict(False, None, ())
    return Verdict(True, found.committed_step, tuple(found.steps()))


class AlignedReads(ReadOnly, WrappedVolume):
    """`inner` for buffers at any address: O_DIRECT wants whole pages, and the checks read into a bytearray."""

    def read(self, offset_bytes: int, into: Sequence[memoryview]) -> None:
        for buffer in into:
            with mmap.mmap(-1, buffer.nbytes) as pages:
                with memoryview(pages) as aligned:
                    super().read(offset_bytes, [aligned])
                buffer.cast("B")[:] = pages[:]
            offset_bytes += buffer.nbytes
