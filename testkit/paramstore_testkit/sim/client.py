"""A client of the simulation: its process, its connection, its requests under way, what it has open and leased.

Every request must be answered once, in time, by a result or by an error that it may meet. The bytes that a client is given are
compared with the model when they come, and again when it gives them back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from paramstore.wire import messages as m
from paramstore.wire.codec import LENGTH, decode_answer, encode
from paramstore_testkit.sim.holdings import Asked, ClientView, Lease, Upload
from paramstore_testkit.sim.model import Broken, Key, State, pattern
from paramstore_testkit.sim.net import SimProcess, SimSegment, SimSocket
from paramstore_testkit.sim.world import World

HANG_S = 3600.0
"""Longest time that a request may take, however slow the disks are."""
LATE_S = 1.0
"""Longest time after its timeout at which a lease may be answered."""


class SimClient:
    """One client. The world lets it `act`; `operations` decides what it does then."""

    def __init__(self, world: World, number: int, role: str) -> None:
        self.world = world
        self.number = number
        self.role = role
        self.random = world.random
        self.process: SimProcess | None = None
        self.sock: SimSocket | None = None
        self.is_welcome = False
        self.is_exclusive = False
        """Whether a request is under way beside which it asks for nothing else."""
        self.asked: dict[int, Asked] = {}
        self.next_id = 1
        self.views: dict[int, ClientView] = {}
        self.leases: dict[int, Lease] = {}
        self.mapped: dict[int, SimSegment] = {}
        self.to_unmap: dict[int, None] = {}
        self.upload: Upload | None = None
        self.lingering: list[tuple[SimProcess, list[Lease]]] = []
        """Processes of connections that ended, and their leases, which they still read."""
        self.wants_rollback = False
        self.wants_refresh = False
        self.opens_at: int | None = None
        """Step at which it opens as writer next, since a step is prepared."""
        self.wants_commit = False
        """Whether the values that it initialized are not committed yet."""

    def __repr__(self) -> str:
        return f"{self.role}{self.number}"

    # --- connection

    def connect(self) -> None:
        if self.process is None or not self.process.is_alive:
            self.process = self.world.new_process()
        self.sock = SimSocket(self.world.machine.network, self.process)
        self.sock.on_sent = self._received
        self.sock.on_closed = self._closed
        self.world.machine.listener.connect(self.sock)
        self.ask(m.Hello(self._id(), m.MAGIC, m.PROTOCOL_MAJOR, m.PROTOCOL_MINOR, self.process.pid), done=self._welcome)

    def _welcome(self, _: object) -> None:
        self.is_welcome = True

    def _closed(self) -> None:
        """Ends the client's side after the daemon hung up."""
        if self.sock is not None and self.sock.is_closed:
            self.disconnect(is_dead=False)

    def stops_writing(self, view: ClientView) -> None:
        """Tells the model that this opening, if it is the writer's, ends."""
        if view.model.writer is view:
            view.model.pending, view.model.writer = {}, None
        if self.world.creators.get(view.model.name) is self:
            del self.world.creators[view.model.name]

    def disconnect(self, *, is_dead: bool, tail: bytes = b"") -> None:
        """Ends the connection: by the client's death (its process ends too), or because somebody hung up."""
        sock, process = self.sock, self.process
        if sock is None or process is None:
            return
        self.sock, self.is_welcome, self.is_exclusive, self.wants_rollback = None, False, False, False
        for view in self.views.values():
            self.stops_writing(view)
        sock.on_sent, sock.on_closed = (lambda data, fds: None), (lambda: None)
        sock.hang_up(tail)
        leases = list(self.leases.values())
        self.check_leases(leases)
        if is_dead:
            process.kill()
        elif leases:
            self.lingering.append((process, leases))
            self.process = None
        self.asked.clear()
        self.views.clear()
        self.leases.clear()
        self.mapped.clear()
        self.to_unmap.clear()
        self.upload = None

    def end_lingering(self) -> None:
        """Ends processes whose connection ended before."""
        for process, leases in self.lingering:
            self.check_leases(leases)
            process.kill()
        self.lingering.clear()

    def daemon_gone(self) -> None:
        """Forgets everything, since the machine went down; leased bytes must be as they were."""
        for _, leases in self.lingering:
            self.check_leases(leases)
        self.lingering.clear()
        self.disconnect(is_dead=False)
        self.lingering.clear()

    # --- requests

    def _id(self) -> int:
        self.next_id += 1
        return self.next_id - 1

    def ask(
        self, message: Any, *, done: Callable[[Any], None] | None = None, failed: Callable[[str], None] | None = None,
        arrived: Callable[[], None] | None = None, allowed: Iterable[str] = (), view: ClientView | None = None,
        timeout_s: float | None = None, is_exclusive: bool = False,
    ) -> int:  # fmt: skip
        """Sends a request. arrived: called right before the core handles it; done, failed: called when the core answers, with the
        result or the error's class name. allowed: errors that it may meet beside those of its view and of faults."""
        world = self.world
        due_s = world.loop.time() + (HANG_S if timeout_s is None else timeout_s + LATE_S)
        asked = Asked(type(message).__name__, done, failed, frozenset(allowed), due_s, view, is_exclusive)
        self.asked[message.id] = asked
        self.is_exclusive = self.is_exclusive or is_exclusive

        def reached() -> None:
            asked.turn = world.loop.turns
            world.trace(self, asked.kind, message)
            if arrived is not None:
                arrived()

        self._deliver(encode(message), reached)
        return int(message.id)

    def tell(self, message: Any) -> None:
        """Sends a one-way message."""
        self._deliver(encode(message), lambda: self.world.trace(self, type(message).__name__, message))

    def _deliver(self, frame: bytearray, reached: Callable[[], None]) -> None:
        assert self.sock is not None
        data = bytes(frame)
        if self.random.random() < 0.02 and len(data) > 8:
            cut = self.random.randrange(1, len(data))
            self.sock.deliver(data[:cut], None)
            data = data[cut:]
        self.sock.deliver(data, reached)

    def _received(self, data: memoryview, fds: Sequence[int]) -> None:
        try:
            self._answered(decode_answer(data[LENGTH.size :]), fds)
        except BaseException as error:  # noqa: BLE001 - the core, which called us, would take it for its own
            self.world.loop.fail(error)

    def _answered(self, answer: Any, fds: Sequence[int]) -> None:
        kind = type(answer)
        if kind is m.Unmap:
            self.to_unmap.update(dict.fromkeys(answer.segments))
            return
        asked = self.asked.pop(answer.id, None)
        if asked is not None and asked.is_exclusive:
            self.is_exclusive = False
        if asked is None:
            raise Broken(f"{self}: an answer to {answer.id}, which nobody asked: {answer}")
        if kind is m.Failed:
            self.world.trace(self, "!", answer.error)
            self.world.check_error(str(self), asked, answer.error, answer.message)
            if answer.error == "StepDropped" and asked.view is not None and not asked.view.is_writer:
                self.wants_refresh = True
            if asked.failed is not None:
                asked.failed(answer.error)
            return
        self.world.trace(self, "=", answer.id)
        for segment, fd in zip(getattr(answer, "segments", ()), fds, strict=True) if fds and kind is m.Granted else ():
            self.mapped[segment[0]] = self.world.machine.memory.segments[fd]
        if kind is m.Uploaded:
            answer = (answer.segment, self.world.machine.memory.segments[fds[0]])
        if asked.done is not None:
            asked.done(answer.result if kind is m.Done else answer)

    # --- leases

    def granted(self, view: ClientView, keys: Sequence[Key], answer: Any, states: Sequence[State]) -> Lease:
        """Checks what was leased: identities and bytes, all of one of `states`."""
        model = view.model
        identities = [(epoch, version) for _, _, epoch, version in answer.slots]
        seen = zip(keys, identities, strict=True)
        values = [model.known(key, identity) for key, identity in seen]
        if not any(all(state.get(key) == value for key, value in zip(keys, values, strict=True)) for state in states):
            asked_for = [state.get(keys[0]) for state in states[:3]]
            raise Broken(f"{self}: {list(zip(keys, identities, strict=True))} is not what it asked for ({asked_for} for the first)")
        copies = []
        param = self.world.param
        for key, value, slot in zip(keys, values, answer.slots, strict=True):
            memory = self.mapped.get(slot[0])
            if memory is None:
                raise Broken(f"{self}: leased bytes are in segment {slot[0]}, which it never got")
            view_of = memory.view(slot[1], param.length_bytes)
            if param.wrong_field(view_of, (value.master,)):
                raise Broken(f"{self}: {key} of {model.name} in {slot[2:]} holds {bytes(view_of[:16])!r}, not {value}")
            copies.append((key, view_of, pattern(value.master, param.fields[0].elements)))
        return Lease(view, copies, frozenset(slot[0] for slot in answer.slots))

    def check_leases(self, leases: Iterable[Lease]) -> None:
        """Checks that leased bytes have not changed."""
        for lease in leases:
            for key, memory, expected in lease.copies:
                if memory[: len(expected)] != expected:
                    raise Broken(f"{self}: leased bytes of {key} of {lease.view.model.name} changed to {bytes(memory[:16])!r}")

    def release(self, lease_ids: Sequence[int]) -> None:
        self.check_leases([self.leases[lease_id] for lease_id in lease_ids])
        for lease_id in lease_ids:
            del self.leases[lease_id]
        self.tell(m.Release(list(lease_ids)))
        self.give_back_segments()

    def give_back_segments(self) -> None:
        """Acknowledges the segments that the daemon wants back and nothing here reads."""
        if not self.to_unmap or self.sock is None:
            return
        used = frozenset().union(*(lease.segments for lease in self.leases.values()))
        gone = [segment for segment in self.to_unmap if segment not in used]
        if gone:
            for segment in gone:
                del self.to_unmap[segment]
                self.mapped.pop(segment, None)
            self.tell(m.Unmapped(gone))
