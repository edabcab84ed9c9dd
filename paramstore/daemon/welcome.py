"""The first answer of a session: what every client must know of the daemon, or why the two cannot talk."""

from __future__ import annotations

import os

from paramstore.engine.store import Store
from paramstore.errors import VersionMismatch
from paramstore.wire import messages as m


def refusal_of(hello: m.Hello) -> m.Failed | None:
    """The refusal of a client with another major version; None if it is welcome. Minor versions are told, not compared."""
    if hello.major == m.PROTOCOL_MAJOR:
        return None
    message = (
        f"the client speaks protocol {hello.major}.{hello.minor}, this daemon {m.PROTOCOL_MAJOR}.{m.PROTOCOL_MINOR}: "
        "install the same version of paramstore on both sides"
    )
    return m.Failed(hello.id, VersionMismatch.__name__, message)


def welcome_to(store: Store) -> dict[str, object]:
    """The facts that answer `Hello`."""
    return {
        "major": m.PROTOCOL_MAJOR, "minor": m.PROTOCOL_MINOR, "store_uuid": store.store_uuid.hex(), "pid": os.getpid(),
        "wait_timeout_s": store.config.wait_timeout_s,
    }  # fmt: skip
