"""Shuts file systems down under a daemon while a trainer lives beside it: all I/O fails from one moment on.

Whatever the journal did not have is lost, as in a power cut, but the processes live: the daemon must refuse requests with an error
of its own, must not die, and acknowledge nothing more. Then the file systems are mounted anew, and the next daemon must find every
acknowledged step whole. Everything that is drawn comes from one seed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import paramstore_client as ps
from paramstore_testkit.blocks.mounts import DISK_BYTES, LoopDevice, disk_at, make_image, mount, mounted_loops, shut_down, unmount
from paramstore_testkit.oracles.step_chain import StepChain
from paramstore_testkit.processes.killable_serve import KillableDaemons
from paramstore_testkit.processes.life_plan import Operation, plan_life
from paramstore_testkit.processes.trainer import Trainer, check_reopened, plain_rule
from paramstore_testkit.trial import Trial, telling

DISKS = 3
"""Number of disks: the catalog's and two volumes'."""
OPERATIONS = 24
LIFE_S = 0.2
"""Assumed length of a life until one was seen: shutdowns come before its end."""
CONNECT_S = 10.0
KIND = "ext4"
LATER_STEPS = 10
"""Distance between the steps of a plan and those of the commits that must fail."""


class ShutdownCycles(Trial):
    """Owner of the file systems and the model. figures: counts of what happened."""

    def __init__(self, root: Path, *, seed: int, owner: int, bugs: Sequence[str] = ()) -> None:
        """bugs: names of `daemon_bugs`, planted in every daemon."""
        super().__init__(seed)
        self._root = root
        self._owner = owner
        self._bugs = bugs
        self._chain = StepChain(plain_rule)
        self._life_s = LIFE_S

    def repeat(self, cycles: int) -> None:
        """Runs the cycles. Raises AssertionError with the seed and the cycles in its notes."""
        images = [make_image(DISK_BYTES[KIND], owner=self._owner) for _ in range(DISKS)]
        files = [Path(f"/proc/self/fd/{image}") for image in images]
        with (
            KillableDaemons(self._root / "log", is_plain=True) as daemons,
            mounted_loops(self._root, files, kind=KIND) as loops,
            telling(self.story),
        ):
            for number in range(cycles + 1):
                self.acts.append(f"cycle {number}")
                self.figures["cycles"] += 1
                self._cycle(daemons, is_shut_down=number > 0)
                self._mount_anew(loops)
            self._check(daemons)

    def _flags(self) -> Mapping[str, Any]:
        volumes = [str(disk_at(self._root, index) / "volume") for index in range(1, DISKS)]
        return {"dir": str(disk_at(self._root, 0) / "store"), "volumes": volumes}

    def _cycle(self, daemons: KillableDaemons, *, is_shut_down: bool) -> None:
        address = daemons.start(self._root, flags=self._flags(), bugs=self._bugs)
        assert address is not None, "the daemon was killed by nobody, and is dead"
        started_s = time.monotonic()
        with ps.connect(address, timeout_s=CONNECT_S) as store:
            check_reopened(store, self._chain, self.figures)
            shutter = threading.Timer(self.random.uniform(0.0, self._life_s), self._shut_down)
            trainer = Trainer(store, self._chain, self.figures)
            if is_shut_down:
                shutter.start()
            try:
                self._train(trainer, shutter, is_shut_down=is_shut_down)
            finally:
                shutter.cancel()
                trainer.close()
        if not is_shut_down:
            self._life_s = time.monotonic() - started_s
        daemons.kill()  # raises if it had died by itself, for example of a bus error

    def _train(self, trainer: Trainer, shutter: threading.Timer, *, is_shut_down: bool) -> None:
        """Trains until an error says that the file systems are gone; a plan that ends before that asks for one commit more."""
        keys = trainer.namespace.keys()
        plan = plan_life(self.random.getrandbits(40), keys, openable=self._chain.openable, count=OPERATIONS)
        try:
            for operation in plan:
                trainer.run(operation)
            if not is_shut_down:
                return
            shutter.join(CONNECT_S)
            self._commit_too_late(trainer)
        except ps.StoreUnavailable as error:
            raise AssertionError("the daemon is gone") from error
        except ps.ParamStoreError as error:
            assert is_shut_down, "an error without a reason"
            shutter.join(CONNECT_S)
            self.figures[f"ended by {type(error).__name__}"] += 1
            self._commit_again(trainer)

    def _commit_too_late(self, trainer: Trainer) -> None:
        """Commits, and raises what the store says to a commit that cannot be durable."""
        keys = tuple(trainer.namespace.keys())
        step = (self._chain.acknowledged or 0) + LATER_STEPS
        trainer.run(Operation("train", keys, self.seed))
        trainer.run(Operation("commit", keys, self.seed, step))
        raise AssertionError("a commit was acknowledged although no file system takes any more")

    def _commit_again(self, trainer: Trainer) -> None:
        """Checks that nothing is acknowledged after the error either."""
        with suppress(ps.ParamStoreError):
            self._commit_too_late(trainer)

    def _shut_down(self) -> None:
        disks = list(range(DISKS))
        self.random.shuffle(disks)
        for index in disks:
            shut_down(disk_at(self._root, index))

    def _mount_anew(self, loops: list[LoopDevice]) -> None:
        for index in range(DISKS):
            unmount(disk_at(self._root, index))
        for index, loop in enumerate(loops):
            mount(loop.path, disk_at(self._root, index), KIND)

    def _check(self, daemons: KillableDaemons) -> None:
        """Starts one daemon more, which checks the last cycle."""
        address = daemons.start(self._root, flags=self._flags(), bugs=self._bugs)
        assert address is not None
        with ps.connect(address, timeout_s=CONNECT_S) as store:
            check_reopened(store, self._chain, self.figures)
        daemons.kill()
