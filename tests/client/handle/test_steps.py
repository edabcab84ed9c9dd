"""What a handle asks and gives back about steps as they come; what it makes of steps is in `test_namespace.py`."""

from __future__ import annotations

import asyncio
import copy
import pickle
import threading
from collections import deque
from collections.abc import Coroutine
from typing import Any

import pytest

import paramstore_client as ps
from paramstore.wire import messages as m
from paramstore_client.handle.steps import Refreshed
from paramstore_testkit.wire.fake_daemon import FakeDaemon, FakeSession

LIMIT_S = 10.0


@pytest.fixture
def reader(store: ps.Store, namespace: ps.Namespace) -> ps.Namespace:
    """A reader's handle, on step 1."""
    namespace.commit(1).wait()
    return store.open_namespace("moe")


def tell(daemon: FakeDaemon, *answers: tuple[int, int] | ps.ParamStoreError) -> None:
    """Has waits for a step answered so, in this order; what comes after is held."""
    left = deque(answers)

    def answer(session: FakeSession, request: m.AwaitStep) -> None:
        if not left:
            session.held.append(request)
        elif isinstance(told := left.popleft(), ps.ParamStoreError):
            session.send(m.Failed(request.id, type(told).__name__, str(told)))
        else:
            session.send(m.Done(request.id, {"step": told[0], "sequence": told[1]}))

    daemon.script(m.AwaitStep, answer)


def asked(daemon: FakeDaemon) -> list[tuple[int | None, int | None]]:
    return [(request.after, request.sequence) for request in daemon.requests(m.AwaitStep)]


def run(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(scenario, LIMIT_S))


# --- one step


def test_a_reader_waits_for_steps_beyond_its_own_and_a_writer_beyond_the_committed_one(
    daemon: FakeDaemon, namespace: ps.Namespace, reader: ps.Namespace
) -> None:
    tell(daemon, (2, 4), (3, 5), (7, 6), (8, 7))
    assert (reader.wait_for_step(), reader.committed_step, reader.view_step) == (2, 2, 1)
    assert namespace.wait_for_step(timeout_s=2.5) == 3
    assert namespace.wait_for_step() == 7
    assert reader.wait_for_step(5) == 8
    assert asked(daemon) == [(None, None), (1, None), (3, None), (5, None)]
    assert [request.timeout_s for request in daemon.requests(m.AwaitStep)][:2] == [daemon.wait_timeout_s, 2.5]


def test_a_wait_that_ran_out_says_so(daemon: FakeDaemon, reader: ps.Namespace) -> None:
    tell(daemon, ps.WaitTimeout("no step after 1"))
    with pytest.raises(ps.WaitTimeout, match="no step after 1"):
        reader.wait_for_step(timeout_s=0.0)


def test_a_wait_that_is_given_up_is_taken_back(
    daemon: FakeDaemon, reader: ps.Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paramstore_client.handle.steps.ANSWER_GRACE_S", 0.0)
    daemon.hold(m.AwaitStep)
    with pytest.raises(ps.WaitTimeout, match="no answer within"):
        reader.wait_for_step(timeout_s=0.0)
    (cancel,) = daemon.wait_for(m.Cancel)
    assert cancel.target == daemon.requests(m.AwaitStep)[0].id


def test_a_wait_ends_with_the_daemon(daemon: FakeDaemon, reader: ps.Namespace) -> None:
    daemon.script(m.AwaitStep, lambda session, _: session.sock.shutdown(2))
    with pytest.raises(ps.StoreUnavailable):
        reader.wait_for_step()


def test_a_forked_child_waits_for_no_step(daemon: FakeDaemon, reader: ps.Namespace, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as child:
        child.setattr("paramstore_client.this_process.pid", -1)
        with pytest.raises(ps.ForkedClient):
            reader.wait_for_step()
        with pytest.raises(ps.ForkedClient):
            run(anext(reader.steps_as_they_come()))  # type: ignore[arg-type]  # it is a coroutine
    assert asked(daemon) == []


def test_an_older_daemon_is_asked_for_no_step_and_counts_no_changes(daemon: FakeDaemon, namespace: ps.Namespace) -> None:
    namespace.commit(1).wait()
    daemon.minor = m.STEPS_MINOR - 1
    with ps.connect(daemon.path, timeout_s=5.0) as store:
        reader = store.open_namespace("moe")
        for call in (reader.wait_for_step, reader.steps_as_they_come):
            with pytest.raises(ps.VersionMismatch, match=r"speaks protocol 1\.4, .* needs 1\.5"):
                call()
        moved = reader.refresh()
        assert (moved, moved.changed_keys, moved.changed_bytes) == (1, None, None)
    assert daemon.requests(m.AwaitStep) == []


# --- refresh


def test_a_refresh_gives_a_number_that_says_how_much_has_changed(namespace: ps.Namespace, reader: ps.Namespace) -> None:
    namespace.commit(2).wait()
    moved = reader.refresh()
    assert (moved, moved.changed_keys, moved.changed_bytes) == (2, 3, 96)
    assert (f"{moved}", type(reader.view_step), moved + 1) == ("2", int, 3)


def test_the_change_of_view_is_counted_before_the_answer_and_after_it(
    daemon: FakeDaemon, namespace: ps.Namespace, reader: ps.Namespace
) -> None:
    """What stands is not used on while the daemon, which has moved the view, counts."""
    namespace.commit(2).wait()
    seen: list[int] = []

    def answer(session: FakeSession, request: m.Refresh) -> None:
        while reader.view_change_count == before:
            pass
        seen.append(reader.view_change_count)
        session.send(m.Done(request.id, {"step": 2, "keys": 0, "bytes": 0}))

    before = reader.view_change_count
    daemon.script(m.Refresh, answer)
    reader.refresh()
    assert seen == [before + 1]
    assert reader.view_change_count == before + 2


def test_what_a_refresh_gives_can_be_copied_and_sent() -> None:
    moved = Refreshed.counted(m.Done(1, {"step": 4, "keys": 2, "bytes": 64}))
    for other in (copy.deepcopy(moved), pickle.loads(pickle.dumps(moved))):
        assert (other, other.changed_keys, other.changed_bytes) == (4, 2, 64)


# --- steps as they come


def test_steps_come_one_after_the_other_by_their_commits_and_without_a_thread(daemon: FakeDaemon, reader: ps.Namespace) -> None:
    timeout = ps.WaitTimeout("none yet")
    tell(daemon, timeout, (2, 4), (9, 6), timeout, timeout, (3, 7))
    threads = threading.active_count()

    async def scenario() -> None:
        came = []
        async for step in reader.steps_as_they_come():
            came.append(step)
            assert threading.active_count() == threads
            if len(came) == 3:
                break
        assert came == [2, 9, 3]

    run(scenario())
    assert asked(daemon) == [(None, None), (None, None), (None, 4), (None, 6), (None, 6), (None, 6)]


def test_a_writer_that_waits_again_for_its_first_step_skips_none_of_its_own(daemon: FakeDaemon, namespace: ps.Namespace) -> None:
    namespace.commit(1).wait()
    tell(daemon, ps.WaitTimeout("none yet"), (2, 4))

    async def scenario() -> None:
        steps = namespace.steps_as_they_come()
        namespace.commit(2).wait()
        assert await anext(steps) == 2
        await steps.aclose()

    run(scenario())
    assert asked(daemon) == [(1, None), (1, None)]


@pytest.mark.parametrize("came_before", [0, 1])
def test_a_task_that_is_cancelled_takes_its_wait_back(came_before: int, daemon: FakeDaemon, reader: ps.Namespace) -> None:
    tell(daemon, *[(2, 4)][:came_before])

    async def follow() -> None:
        async for _ in reader.steps_as_they_come():
            pass

    async def scenario() -> None:
        task = asyncio.create_task(follow())
        await asyncio.to_thread(daemon.wait_for, m.AwaitStep, 1 + came_before)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        (cancel,) = await asyncio.to_thread(daemon.wait_for, m.Cancel)
        assert cancel.target == daemon.requests(m.AwaitStep)[-1].id
        assert reader.steps() == [1]
        assert reader._connection._tickets == {}, "it is answered, and the connection has forgotten it"

    run(scenario())


def test_an_iterator_that_is_closed_between_two_steps_waits_for_nothing(daemon: FakeDaemon, reader: ps.Namespace) -> None:
    tell(daemon, (2, 4))

    async def scenario() -> None:
        steps = reader.steps_as_they_come()
        assert await anext(steps) == 2
        await steps.aclose()
        assert len(asked(daemon)) == 1
        with pytest.raises(StopAsyncIteration):
            await anext(steps)

    run(scenario())


def test_the_iterator_raises_when_its_handle_or_the_store_is_closed(
    daemon: FakeDaemon, store: ps.Store, reader: ps.Namespace
) -> None:
    tell(daemon, ps.LeaseError("namespace 'moe' was closed"))

    async def scenario() -> None:
        with pytest.raises(ps.LeaseError, match="was closed"):
            await anext(reader.steps_as_they_come())
        waiting = asyncio.create_task(anext(reader.steps_as_they_come()))  # type: ignore[arg-type]  # it is a coroutine
        await asyncio.to_thread(daemon.wait_for, m.AwaitStep, 2)
        later = reader.steps_as_they_come()
        reader.close()
        with pytest.raises(ps.UnknownNamespace):
            await anext(later)
        with pytest.raises(ps.UnknownNamespace):
            reader.steps_as_they_come()
        store.close()
        with pytest.raises(ps.StoreUnavailable):
            await waiting

    run(scenario())


def test_the_iterator_raises_where_the_daemon_is_silent(
    daemon: FakeDaemon, reader: ps.Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paramstore_client.handle.steps.ANSWER_GRACE_S", 0.01)
    reader.wait_timeout_s = 0.0
    daemon.hold(m.AwaitStep)

    async def scenario() -> None:
        with pytest.raises(ps.WaitTimeout, match="no answer within"):
            await anext(reader.steps_as_they_come())

    run(scenario())
    assert len(daemon.wait_for(m.Cancel)) == 1
