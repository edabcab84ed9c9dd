"""More of what clients of the simulation do: reading back, answers for people, and what a stranger tries."""

from __future__ import annotations

from typing import Any

from paramstore.wire import messages as m
from paramstore.wire.codec import encode
from paramstore_testkit.sim.client import SimClient
from paramstore_testkit.sim.holdings import PAGE_BYTES, ClientView
from paramstore_testkit.sim.model import Broken
from paramstore_testkit.sim.operations import READER, STRANGER, now_in, operation, some_keys, states_since

# --- reading back


@operation("read", 4)
def read(c: SimClient, view: ClientView) -> None:
    model, record, upload, since = view.model, c.world.record, c.upload, 0
    key = c.random.choice(model.keys)
    page = None if upload is None else upload.take(record)
    if page is None or upload is None:
        return

    def arrived() -> None:
        nonlocal since
        since = now_in(view)

    def done(result: Any) -> None:
        value = model.known(key, (result["epoch"], result["version"]))
        states = states_since(view, since)[: 1 if view.is_writer else None]
        if all(state[key] != value for state in states) and not (view.is_writer and model.is_broken):
            raise Broken(f"{c}: read {key} as {value}, it is {states[0][key]}")
        memory = upload.view(page, record)
        if wrong := record.wrong_field(memory, value.numbers):
            raise Broken(f"{c}: a record of {value} holds {bytes(memory[wrong.offset_bytes :][:16])!r} in {wrong.name}")
        free()

    def free() -> None:
        upload.give_back(page, record)

    message = m.Read(c._id(), view.handle, key, upload.segment, page * PAGE_BYTES)
    c.ask(message, arrived=arrived, done=done, failed=lambda _: free(), view=view)


# --- answers for people


@operation("residency", 0.2)
def residency(c: SimClient, view: ClientView) -> None:
    c.ask(m.Residency(c._id(), view.handle), view=view)


@operation("stats", 0.2, READER, STRANGER)
def stats(c: SimClient, view: ClientView) -> None:
    def done(result: Any) -> None:
        host = result["tiers"]["host"]
        if host["used_bytes"] > host["budget_bytes"]:
            raise Broken(f"{c}: {host['used_bytes']} bytes of a budget of {host['budget_bytes']}")

    c.ask(m.Stats(c._id()), done=done)


@operation("namespaces", 0.3)
def namespaces(c: SimClient, view: ClientView) -> None:
    def done(result: Any) -> None:
        for row in result:
            model = c.world.models[row["name"]]
            model.observe_committed(row["committed_step"], is_resolved=False)

    c.ask(m.Namespaces(c._id()), done=done)


@operation("verify", 0.5)
def verify(c: SimClient, view: ClientView) -> None:
    name = c.random.choice((None, view.model.name))
    keys = None if name is None else some_keys(c, view, 3)

    def done(result: Any) -> None:
        for finding in (*result["copy_findings"], *result["findings"]):
            is_faulty = finding.get("steps") == () or "fails" in finding["reason"] or c.world.fired_now("flush error")
            if not (c.world.has_faults and is_faulty):
                raise Broken(f"{c}: verify found {finding}")
            c.world.mark("scrub found damage")
        beside()

    def beside() -> None:
        if view.model.started:
            c.world.mark("verify beside a commit")

    rate = c.random.choice((None, 1 << 20))
    c.ask(m.Verify(c._id(), name, keys, rate), arrived=beside, done=done, allowed=("CapacityError", "TicketCancelled"))


# --- a stranger's


@operation("die", 0.4)
def die(c: SimClient, view: ClientView) -> None:
    """Dies, in the middle of a frame or between two, with requests under way and leases."""
    if c.leases:
        c.world.mark("client died with leases")
    if any(asked.kind == "Apply" for asked in c.asked.values()):
        c.world.mark("client died during its apply")
    tail = b""
    if c.random.random() < 0.5:
        frame = bytes(encode(m.Acquire(c._id(), view.handle, view.model.keys, "param", 1.0)))
        tail = frame[: c.random.randrange(1, len(frame))]
        c.world.mark("client died within a frame")
    c.disconnect(is_dead=True, tail=tail)


@operation("hang_up", 0.3)
def hang_up(c: SimClient, view: ClientView) -> None:
    """Hangs up, while its process lives on and reads what it leased."""
    if c.leases:
        c.world.mark("lease outlived its connection")
    c.disconnect(is_dead=False)
    c.world.loop.call_later(c.random.random() * 5.0, c.end_lingering)


def refused(c: SimClient, message: Any, *errors: str) -> None:
    """Sends `message`, which must be refused with one of `errors`."""

    def done(result: Any) -> None:
        raise Broken(f"{c}: {message} must be refused with {errors}, it came to {result}")

    c.ask(message, done=done, allowed=errors)
    c.world.mark("request that must be refused")


@operation("nonsense", 1.5, STRANGER)
def nonsense(c: SimClient, view: ClientView) -> None:
    """Sends a request that is well-formed and wrong."""
    number, handle, key = c._id(), view.handle, view.model.keys[0]
    tries: tuple[tuple[Any, ...], ...] = (
        (m.Acquire(number, handle, [(99, 0)], "param", 1.0), "UnknownKey", "WriterFenced", "StepDropped"),
        (m.Acquire(number, handle, [key], "optim", 1.0), "SchemaMismatch"),
        (m.Acquire(number, handle + 1000, [key], "param", 1.0), "LeaseError"),
        (m.Prefetch(number, handle, [(0, 99)], "param"), "UnknownKey", "WriterFenced", "StepDropped"),
        (m.OpenUpload(number, 1 << 40), "CapacityError"),
        (m.OpenNamespace(number, "nowhere", "read"), "UnknownNamespace"),
        (m.OpenNamespace(number, view.model.name, "append"), "ConfigError"),
        (m.Verify(number, "nowhere"), "UnknownNamespace"),
        (m.Push(number, handle, [(0, 0, 12345, 0)]), "ProtocolError"),
        (m.Read(number, handle, key, 12345, 0), "ProtocolError"),
    )
    refused(c, *c.random.choice(tries))
