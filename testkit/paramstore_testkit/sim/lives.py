"""One seed of the simulation: a machine, its clients, the model of its namespaces, and what joins them.

Lives of the daemon follow each other: clients come and ask; then the power fails, or the daemon is stopped in order; the contents
of the disks are compared with the model, and a new daemon starts. At the end all clients leave, and nothing may be left of them.
"""

from __future__ import annotations

import asyncio
from random import Random
from typing import Any

from paramstore_testkit.sim import openings, requests, steps
from paramstore_testkit.sim.check import check_baseline, check_disks, check_tables
from paramstore_testkit.sim.client import SimClient
from paramstore_testkit.sim.machine import SimVolume
from paramstore_testkit.sim.model import Broken, NamespaceModel, Snapshots
from paramstore_testkit.sim.operations import OPERATIONS, READER, STRANGER, TRAINER, refresh
from paramstore_testkit.sim.plan import Plan
from paramstore_testkit.sim.world import World
from paramstore_testkit.trial import Trial

BACKGROUND = frozenset({"prefill", "patrol"})  # names of the store's own tasks
SOURCES = (openings, steps, requests)  # each adds operations when it is imported
REQUESTS_MAX = 12
"""Most requests of one client under way."""
RIVAL_CHANCE = 0.03
"""Chance, at an act, that a client takes over from the present writer."""
QUIET_S = 4 * 3600.0


class Lives(Trial):
    """Owner of the clients of one world. lives: number of daemons so far; records_checked: number compared on disks."""

    def __init__(self, world: World) -> None:
        super().__init__(world.plan.seed)
        self.world = world
        self.plan, self.loop, self.random, self.machine = world.plan, world.loop, world.random, world.machine
        plan = world.plan
        roles = [TRAINER] * max(plan.trainers, plan.namespaces) + [READER] * plan.readers + [STRANGER] * plan.strangers
        self.clients = [SimClient(world, number, role) for number, role in enumerate(roles)]
        self.menus = {role: _menu(plan, role) for role in (TRAINER, READER, STRANGER)}
        self.lives = 0
        self.records_checked = 0

    def _act(self, client: SimClient) -> None:
        if self.world.is_quiet or not self.machine.is_up:
            return
        try:
            for _ in range(1 if self.random.random() >= self.plan.burst else self.random.randint(2, 5)):
                if not self._act_once(client):
                    break
        except BaseException as error:  # noqa: BLE001 - a callback's error would only be logged
            self.loop.fail(error)
        pace = 0.25 if client.role == TRAINER else 1.0
        self.loop.call_later(self.random.expovariate(1.0) * self.plan.think_s * pace, self._act, client)

    def _act_once(self, client: SimClient) -> bool:
        """Does one act. Gives whether the client may go on at once."""
        if client.sock is None:
            client.connect()
            return False
        if not client.is_welcome or client.is_exclusive or not client.sock.is_reading or len(client.asked) >= REQUESTS_MAX:
            return False
        client.give_back_segments()
        if not client.views:
            self._open(client)
            return False
        if client.upload is None:
            openings.open_upload(client)
            return False
        view = self.random.choice(list(client.views.values()))
        if client.wants_commit:
            client.wants_commit = False
            steps.commit(client, view)
        elif client.wants_refresh and not view.is_writer:
            client.wants_refresh = False
            refresh(client, view)
        elif client.wants_rollback and view.is_writer and view.model.committed is not None and self.random.random() < 0.7:
            is_lost = view.model.writer is not view
            (openings.close if is_lost else steps.rollback)(client, view)
        else:
            OPERATIONS[self.draw(self.menus[client.role])].act(client, view)
        return client.sock is not None and not client.is_exclusive

    def _open(self, client: SimClient) -> None:
        model = list(self.world.models.values())[client.number % len(self.world.models)]
        known = self.machine.store.namespaces.get(model.name)
        if known is None or known.steps.committed_step is None:
            if client.role == TRAINER and self.world.creators.setdefault(model.name, client) is client:
                openings.create(client, model)
        elif client.role == TRAINER or (client.role == STRANGER and self.random.random() < 0.1):
            if model.writer is None or self.random.random() < RIVAL_CHANCE:
                openings.open_writer(client, model)
        else:
            openings.open_reader(client, model)

    # --- lives

    def story(self) -> str:
        world = self.world
        where = f"seed {self.seed}, request {world.done_requests}, {self.loop.time():.6f} s"
        return "\n".join([*world.trace_lines(), f"{where}: repeat it with run_seed({self.seed})"])

    async def live(self, requests: int) -> None:
        """Runs lives until so many requests have reached the core, and all clients have left."""
        self.machine.start()
        self._begin()
        while True:
            due = self.world.done_requests + 20 + self.random.expovariate(1.0) * self.plan.life_requests
            await self._until(min(due, requests))
            if self.world.done_requests >= requests:
                break
            if self.random.random() < 0.2:
                await self._all_leave()
            if self.random.random() < 0.25:
                await self._stop()
            else:
                await self._crash()
            self._recover()
            self._begin()
        await self._all_leave()

    def _begin(self) -> None:
        self.lives += 1
        self.world.begin_life()
        for client in self.clients:
            self.loop.call_later(self.random.random() * self.plan.think_s, self._act, client)

    async def _until(self, requests: float) -> None:
        """Lets clients act until so many requests are done, or the store takes no more writes; looks at the tables now and then."""
        pause_s = 30 * self.plan.think_s / len(self.clients)
        stopped_at: int | None = None
        is_armed = False
        while self.world.done_requests < requests:
            await asyncio.sleep(pause_s)
            check_tables(self.machine.store)
            self._check_due()
            if not is_armed and all(model.committed is not None for model in self.world.models.values()):
                self.machine.arm(self.plan.faults)
                is_armed = True
            if self.world.is_unsure:
                stopped_at = stopped_at if stopped_at is not None else self.world.done_requests
                if self.world.done_requests > stopped_at + 40:
                    return

    def _check_due(self) -> None:
        now_s = self.loop.time()
        for client in self.clients:
            for number, asked in client.asked.items():
                if asked.due_s < now_s:
                    raise Broken(f"{client}: {asked.kind} {number} has no answer; it was due {now_s - asked.due_s:.3f} s ago")

    async def _all_leave(self) -> None:
        """Waits until all requests are answered, lets all clients go, and checks that nothing is left of them."""
        self.machine.arm(None)
        self.world.is_quiet = True
        deadline_s = self.loop.time() + QUIET_S
        while any(client.asked and client.sock is not None for client in self.clients):
            await asyncio.sleep(1.0)
            self._check_due()
            if self.loop.time() > deadline_s:
                raise Broken("requests are not answered although nothing fails any more")
        for client in self.clients:
            client.end_lingering()
            client.disconnect(is_dead=True)
            if client.process is not None:
                client.process.kill()  # it had hung up, and may have been granted what it never heard of
        store = self.machine.store
        while not store.transfers.runner.is_idle or any(namespace.writing.turn.locked() for namespace in store.namespaces.values()):
            await asyncio.sleep(1.0)
            if self.loop.time() > deadline_s:
                raise Broken("something moves although all clients have gone")
        await asyncio.sleep(1.0)
        check_tables(store)
        if self.world.is_unsure:
            return  # what a commit of unknown outcome may need stays until the daemon is started anew
        check_baseline(self.machine)
        me = asyncio.current_task()
        if left := [task for task in self.loop.alive.values() if task.get_name() not in BACKGROUND and task is not me]:
            raise Broken(f"tasks are left when all clients have gone: {left}")
        self.world.mark("all clients left")

    async def _stop(self) -> None:
        self.world.is_quiet = True
        await self.machine.stop()
        self.world.mark("daemon stopped in order")

    async def _crash(self) -> None:
        await asyncio.sleep(self.random.random() * self.plan.think_s * self.random.choice((0.1, 1.0)))
        namespaces = self.machine.store.namespaces.values()
        if self.random.random() < 0.5:
            await self._until_commit()
        self.world.is_quiet = True
        if any(working.uncommitted is not None for namespace in namespaces for working in namespace.residency.working.values()):
            self.world.mark("crash with an unpublished record")
        if any(namespace.steps.cut is not None for namespace in namespaces):
            self.world.mark("crash during a commit")
        if any(disk.unflushed for disk in self.machine.disks.values()):
            self.world.mark("crash with unflushed writes")
        await self.machine.crash(_keeps(self.random))

    async def _until_commit(self) -> None:
        """Waits until a commit is under way, if there is one soon, so that the power fails during it."""
        store, is_late = self.machine.store, self.random.random() < 0.5
        for _ in range(600):
            if any(namespace.steps.cut is not None for namespace in store.namespaces.values()):
                if not is_late:
                    await asyncio.sleep(self.random.random() * self.random.choice((1e-4, 4 * self.plan.io_s)))
                    return
                if any(self._is_published(model) for model in self.world.models.values()):
                    return
                await asyncio.sleep(5e-6)
            else:
                await asyncio.sleep(self.plan.io_s / 2)

    def _is_published(self, model: NamespaceModel) -> bool:
        """Whether the catalog has a step that the daemon does not know of yet."""
        found = self.machine.durable._durable.namespaces.get(model.name)
        known = self.machine.store.namespaces.get(model.name)
        return (
            found is not None and known is not None and max(found.steps, default=-1) > max(known.steps.ledger.steps(), default=-1)
        )

    def _recover(self) -> None:
        """Starts a new daemon, and checks that what it found is what the model allows."""
        for client in self.clients:
            client.daemon_gone()
        self.world.creators.clear()
        self.machine.start()
        self.world.trace("machine", "start", self.lives)
        for name, model in self.world.models.items():
            model.daemon_gone()
            namespace = self.machine.store.namespaces.get(name)
            if namespace is None:
                if model.epoch:
                    raise Broken(f"{name} is gone")
                continue
            before = model.committed
            model.observe_committed(namespace.steps.committed_step, is_resolved=True)
            if before is not None and model.committed is not None and model.committed > before:
                self.world.mark("commit survived without its answer")
            ledger = namespace.steps.ledger
            model.check_steps(ledger.steps())
            model.check_prepared(ledger.prepared_step)
            model.check_snapshots(ledger.snapshots())
            model.snapshots = Snapshots(dict.fromkeys(ledger.snapshots()))
            if model.snapshots.kept:
                self.world.mark("snapshot outlived a crash")
            self.records_checked += check_disks(self.machine, namespace, model)


def _menu(plan: Plan, role: str) -> dict[str, float]:
    """Lists the operations of a role, with their shares."""
    chosen = [operation for operation in OPERATIONS.values() if role in operation.roles]
    return {operation.name: operation.share * plan.weights.get(operation.name, 1.0) for operation in chosen}


def _keeps(random: Random) -> Any:
    """Draws what each disk keeps: nothing, everything or any sectors of what was not flushed."""

    def keep(disk: SimVolume) -> Any:
        how = random.randrange(4)
        if how == 0:
            return lambda write, sectors: ()
        return (lambda write, sectors: range(sectors)) if how == 1 else disk.keep_some

    return keep
