"""The role of the thread that reads: one has it, the others wait, and no interrupt leaves it taken by nobody."""

from __future__ import annotations

import threading

import pytest

from paramstore_client.connection import reader_role
from paramstore_client.connection.reader_role import ReaderRole

LIMIT_S = 5.0


def test_one_has_the_role_until_its_token_is_emptied() -> None:
    role, first, second = ReaderRole(), [True], [True]
    assert role.try_take(first)
    assert role.is_taken
    assert not role.try_take(second)
    assert (role.had(first), role.had(second)) == (True, False)
    first.clear()
    assert not role.is_taken
    assert role.try_take(second)
    assert not role.had(first)


def waiting(role: ReaderRole, woken: list[int]) -> threading.Thread:
    thread = threading.Thread(target=lambda: (role.await_change(LIMIT_S, lambda: False), woken.append(1)))
    thread.start()
    while not role._waiting:
        pass
    return thread


@pytest.mark.parametrize("is_told", [True, False], ids=["told", "not told, as an interrupt came"])
def test_who_waits_looks_again(is_told: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader_role, "LOOK_S", LIMIT_S if is_told else 0.01)
    role, token, woken = ReaderRole(), [True], list[int]()
    role.try_take(token)
    thread = waiting(role, woken)
    token.clear()
    if is_told:
        role.tell()
    thread.join(LIMIT_S)
    assert woken == [1]
    assert not role._waiting


def test_nobody_waits_for_a_role_that_is_free_or_for_what_is_over() -> None:
    role, token = ReaderRole(), [True]
    role.await_change(LIMIT_S, lambda: False)
    role.try_take(token)
    role.await_change(LIMIT_S, lambda: True)
    role.tell()
    assert not role._waiting
