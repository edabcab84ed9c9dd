"""What the clients of one simulated seed share: the machine, the model of its namespaces, and what they met."""


from __future__ import annotations

import zlib
from collections import Counter, deque
from collections.abc import Callable
from random import Random

from paramstore_testkit.sim.holdings import Asked, ClientView
from paramstore_testkit.sim.loop import VirtualLoop
from paramstore_testkit.sim.machine import SimMachine
from paramstore_testkit.sim.model import Broken, Image, NamespaceModel
from paramstore_testkit.sim.net import SimProcess
from paramstore_testkit.sim.plan import Plan

TRACE_LINES = 50
FAULT_ERRORS = frozenset({"VolumeError", "CorruptRecord", "CatalogError", "WaitTimeout", "CapacityError", "StepFailed"})
"""Errors that a request may meet once a fault has happened in this life of the daemon."""
ACQUIRE_MARKERS = {
    "WaitTimeout": "lease wait timed out", "CapacityError": "lease above the cap", "LeaseError": "own leases in the way",
    "TicketCancelled": "lease cancelled", "VolumeError": "read error reached who asked",
}  # fmt: skip


class World:
    """Owner of everything that one seed makes."""

    def __init__(self, plan: Plan, loop: VirtualLoop, random: Random) -> None:
        self.plan = plan
        self.loop = loop
        self.random = random
        self.machine = SimMachine(loop, random, plan)
        schema = self.machine.schema
        self.param = Image(schema.part("param").fields, schema.part("param").image_bytes)
        self.record = Image(schema.stored.fields, schema.record_bytes)
        self.gradient = Image(schema.gradient_fields(), schema.gradient_bytes)
        self.initial = Image(schema.initial_fields(), schema.initial_bytes)
        keys = [(layer, expert) for layer in range(plan.layers) for expert in range(plan.experts)]
        self.models = {
            name: NamespaceModel(name, keys, retained_steps=plan.retained_steps) for name in ("moe", "eval")[: plan.namespaces]
        }
        self.creators: dict[str, object] = {}
        """Client that makes a namespace, by its name."""
        self.markers: Counter[str] = Counter()
        self.requests: Counter[str] = Counter()
        self.errors: Counter[str] = Counter()
        self.trace_hash = 0
        self._trace: deque[tuple[float, str, str, object]] = deque(maxlen=TRACE_LINES)
        self._pids = 1000
        self._fired_before: Counter[str] = Counter()
        self.is_quiet = False
        """Whether clients act no more in this life of the daemon."""

    @property
    def done_requests(self) -> int:
        """Number of requests that reached the core."""
        return self.machine.network.frames_read

    def mark(self, name: str) -> None:
        self.markers[name] += 1

    def trace(self, client: object, kind: str, detail: object) -> None:
        if kind != "=":
            self.requests[kind] += 1
        line = (round(self.loop.time(), 7), str(client), kind, detail)
        self._trace.append(line)
        self.trace_hash = zlib.crc32(f"{line[0]} {line[1]} {kind} {detail if kind in '=!' else ''}".encode(), self.trace_hash)

    def trace_lines(self) -> list[str]:
        return [f"{seconds:.6f} {client} {kind} {detail}" for seconds, client, kind, detail in self._trace]

    def new_process(self) -> SimProcess:
        self._pids += 1
        return SimProcess(self.loop, self._pids)

    def next_step(self, model: NamespaceModel) -> int:
        model.next_step += self.random.randint(1, 3)
        return model.next_step

    def later(self, seconds: float, act: Callable[[], None]) -> None:
        """Calls `act` after `seconds`, if this life of the daemon lasts so long and clients still act."""

        def run() -> None:
            try:
                if not self.is_quiet and self.machine.is_up:
                    act()
            except BaseException as error:  # noqa: BLE001 - a callback's error would only be logged
                self.loop.fail(error)

        self.loop.call_later(seconds, run)

    def begin_life(self) -> None:
        """Lets clients act; from here on faults count for this life of the daemon."""
        self._fired_before = Counter(self.machine.fired)
        self.is_quiet = False

    @property
    def is_unsure(self) -> bool:
        """Whether a failed request of a writer may have taken effect all the same."""
        return self.machine.store._transactions.stopped is not None

    @property
    def has_faults(self) -> bool:
        """Whether a fault has happened in this life."""
        return self.machine.fired != self._fired_before

    def fired_now(self, kind: str) -> bool:
        return self.machine.fired[kind] > self._fired_before[kind]

    def check_error(self, client: str, asked: Asked, error: str, message: str) -> None:
        """Checks that this request may meet that error now."""
        self.errors[error] += 1
        view = asked.view
        if "internal error" in message or not self._may_meet(asked, view, error):
            raise Broken(f"{client}: {asked.kind} must not meet {error}: {message}")
        if asked.kind == "Acquire":
            name = ACQUIRE_MARKERS.get(error)
            if name is not None:
                self.mark(name)
        if asked.kind == "Prefetch" and error == "TicketCancelled":
            self.mark("prefetch cancelled")
        if error == "WriterFenced":
            self.mark("writer fenced")
        if error == "StepDropped" and view is not None and not view.is_writer:
            self.mark("reader dropped from its step")

    def _may_meet(self, asked: Asked, view: ClientView | None, error: str) -> bool:
        if error in asked.allowed:
            return True
        if error in FAULT_ERRORS and self.has_faults:
            return True
        if view is None:
            return False
        model = view.model
        if error == "LeaseError":
            return view.is_lost
        if error == "StepDropped":
            return not view.is_writer and view.step not in model.must_have()
        if error == "WriterFenced":
            return view.is_fenced
        if error == "StepFailed":
            return view.is_writer and (view.is_fenced or model.is_broken or bool(model.targets) or view.is_lost)
        return False
