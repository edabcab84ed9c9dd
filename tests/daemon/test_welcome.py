"""Who is welcome, and what they are told; the conversation itself is in `test_session.py`."""

from __future__ import annotations

import asyncio
import os

import pytest

from paramstore.daemon.welcome import refusal_of, welcome_to
from paramstore.wire import messages as m
from paramstore_testkit.disks.machine import Machine


@pytest.mark.parametrize("minor", [0, m.PROTOCOL_MINOR, m.PROTOCOL_MINOR + 1])
def test_minors_are_not_compared(minor: int) -> None:
    assert refusal_of(m.Hello(7, m.MAGIC, m.PROTOCOL_MAJOR, minor, 1)) is None


@pytest.mark.parametrize("major", [0, m.PROTOCOL_MAJOR + 1])
def test_another_major_is_refused_and_both_versions_are_named(major: int) -> None:
    refusal = refusal_of(m.Hello(7, m.MAGIC, major, 5, 1))
    assert refusal is not None
    assert (refusal.id, refusal.error) == (7, "VersionMismatch")
    assert f"speaks protocol {major}.5, this daemon {m.PROTOCOL_MAJOR}.{m.PROTOCOL_MINOR}" in refusal.message


def test_a_client_is_told_what_it_must_know() -> None:
    async def scenario() -> None:
        machine = Machine()
        store = machine.start()
        assert welcome_to(store) == {
            "major": m.PROTOCOL_MAJOR, "minor": m.PROTOCOL_MINOR, "store_uuid": store.store_uuid.hex(), "pid": os.getpid(),
            "wait_timeout_s": machine.config.wait_timeout_s,
        }  # fmt: skip

    asyncio.run(scenario())
