"""Trains a small model, kills the trainer, its daemon or both at random moments, and looks whether every acknowledged step is
there, whole, to the last bit. Uses nothing but the public API, and torch's own AdamW to know what must be there.

    python examples/torture.py --kills 100

Prints what it did. Exit code 0: every promise was kept; 1: one was broken, and which.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import random
import select
import signal
import sys
import tempfile
import time
from collections import Counter
from multiprocessing.connection import Connection
from pathlib import Path

import torch

import paramstore as ps

NAME = "moe"
SHAPE = (64, 64)
LAYERS, EXPERTS = 2, 4
KEYS = [(layer, expert) for layer in range(LAYERS) for expert in range(EXPERTS)]
OPTIONS = ps.AdamW(lr=0.01)
FIRST_STEP, FIRST_LIFE = 0, 0
VICTIMS = (("trainer",), ("daemon",), ("trainer", "daemon"))
LIFE_S = 0.3
END_S = 60.0

State = dict[tuple[int, int], dict[str, torch.Tensor]]


class Broken(Exception):
    """A promise was broken."""


# --- what every step must hold: a life and a step decide which experts get which gradients ---


def initial_value(key: tuple[int, int]) -> torch.Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(17 + EXPERTS * key[0] + key[1]))


def gradients(life: int, step: int) -> State:
    generator = torch.Generator().manual_seed(life * 1_000_003 + step)
    chosen = [key for key in KEYS if torch.rand((), generator=generator) < 0.6] or KEYS[:1]
    return {key: {"w": torch.randn(SHAPE, generator=generator).bfloat16()} for key in chosen}


def first_state() -> State:
    zeros = torch.zeros(SHAPE)
    return {
        key: {"master/w": initial_value(key), "exp_avg/w": zeros, "exp_avg_sq/w": zeros, "step": torch.tensor(0.0)} for key in KEYS
    }


def next_state(state: State, life: int, step: int) -> State:
    """`state` after the update of that life and step, as torch's own optimizer makes it."""
    after = dict(state)
    for key, gradient in gradients(life, step).items():
        before = {name: value.clone() for name, value in state[key].items()}
        parameter = before["master/w"].requires_grad_()
        parameter.grad = gradient["w"].float()
        optimizer = torch.optim.AdamW([parameter], lr=OPTIONS.lr, fused=True)
        optimizer.state[parameter] = {
            "step": before["step"], "exp_avg": before["exp_avg/w"], "exp_avg_sq": before["exp_avg_sq/w"],
        }  # fmt: skip
        optimizer.step()
        after[key] = {**before, "master/w": parameter.detach()}
    return after


# --- the trainer, in a process of its own ---


def train(address: str, life: int, tell: Connection) -> None:
    """Trains until it is killed, or its daemon is. Tells each step before it asks for it, and when it was acknowledged."""
    try:
        with ps.connect(address) as store, store.open_namespace(NAME, mode="write") as namespace:
            step = namespace.committed_step
            tell.send(("opened", step))
            while True:
                step += 1
                namespace.push(gradients(life, step))
                namespace.apply(OPTIONS)
                tell.send(("started", step))
                namespace.commit(step, b"%d" % life).wait()
                tell.send(("acknowledged", step))
    except ps.StoreUnavailable:
        pass  # the daemon was the victim


# --- the one who kills, and looks afterwards ---


class Torture:
    def __init__(self, directory: Path, *, seed: int) -> None:
        self.counts: Counter[str] = Counter()
        self.dice = random.Random(seed)
        self.processes = multiprocessing.get_context("forkserver")  # one import of torch for all trainers
        self.processes.set_forkserver_preload(["torch", "paramstore_client"])
        options = ps.ServeOptions(dir=directory, host_budget="64MiB", settings={"prefill": "0"})
        self.store = ps.connect(autostart=options, timeout_s=END_S)
        self.states = {FIRST_STEP: first_state()}
        self.lives = {FIRST_STEP: FIRST_LIFE}
        self.acknowledged = self.started = FIRST_STEP
        schema = ps.adamw_schema({"w": SHAPE}, param_dtype=torch.bfloat16)
        with self.store.create_namespace(NAME, schema, layers=LAYERS, experts=EXPERTS) as namespace:
            namespace.initialize(lambda key: {"w": initial_value(key)})
            namespace.commit(FIRST_STEP, b"%d" % FIRST_LIFE).wait()

    def kill_one(self, life: int) -> None:
        """One life of a trainer, one kill, and the check of all that is left."""
        victims = self.dice.choice(VICTIMS)
        heard, tell = self.processes.Pipe(duplex=False)
        trainer = self.processes.Process(target=train, args=(self.store.address, life, tell))
        trainer.start()
        tell.close()  # so that the pipe ends with the trainer
        self.listen(heard, life, until_s=time.monotonic() + END_S, words=1)
        self.listen(heard, life, until_s=time.monotonic() + self.dice.uniform(0.0, LIFE_S))
        for victim in victims:
            if victim == "trainer":
                trainer.kill()
            else:
                self.kill_daemon()
        self.listen(heard, life, until_s=time.monotonic() + END_S)
        trainer.join(END_S)
        if trainer.exitcode not in (0, -signal.SIGKILL):
            raise Broken(f"the trainer ended with exit code {trainer.exitcode}")
        heard.close()
        self.counts["killed: " + " and ".join(victims)] += 1
        if "daemon" in victims:
            self.store.reconnect(timeout_s=END_S)  # starts the next daemon
        self.check()

    def listen(self, heard: Connection, life: int, *, until_s: float, words: int = 1 << 30) -> None:
        """Takes what the trainer tells, until then, until its end, or so many of its words."""
        while words and (left_s := until_s - time.monotonic()) > 0 and heard.poll(left_s):
            try:
                word, step = heard.recv()
            except (EOFError, OSError):  # its end, perhaps amid a word
                return
            words -= 1
            if word == "started":
                self.started = step
                self.states[step] = next_state(self.states[step - 1], life, step)
                self.lives[step] = life
            elif word == "acknowledged":
                self.acknowledged = step
                self.counts["steps acknowledged"] += 1
            elif step != self.acknowledged:
                raise Broken(f"the trainer began at step {step}, {self.acknowledged} is committed")

    def kill_daemon(self) -> None:
        """SIGKILL; returns when it is gone."""
        process = os.pidfd_open(self.store.stats()["daemon"]["pid"])
        signal.pidfd_send_signal(process, signal.SIGKILL)
        if not select.select([process], [], [], END_S)[0]:
            raise Broken("the daemon did not end")
        os.close(process)

    def check(self) -> None:
        """Every promise about what came back. Raises Broken."""
        with self.store.open_namespace(NAME, mode="write") as writer:  # waits for a commit that a dead trainer left under way
            found = writer.committed_step
            if found is None or not self.acknowledged <= found <= self.started:
                raise Broken(f"came back at step {found}; {self.acknowledged} was acknowledged, {self.started} started")
            self.counts["came back beyond the last acknowledged step"] += found > self.acknowledged
            self.acknowledged = self.started = found
            if writer.gradient_norm() != 0.0:
                raise Broken("a gradient outlived its trainer")
            with writer.acquire(KEYS) as lease:
                for key in KEYS:
                    if not torch.equal(lease[key]["w"], self.states[found][key]["master/w"].bfloat16()):
                        raise Broken(f"step {found}, key {key}: the weights differ")
            steps = writer.steps()
        if found not in steps or (found > FIRST_STEP and found - 1 not in steps):
            raise Broken(f"steps {steps} are there; {found} and the one before must be")
        for step in steps:
            self.check_step(step)

    def check_step(self, step: int) -> None:
        with self.store.open_namespace(NAME, at=step) as reader:
            if int(reader.extra(step)) != self.lives[step]:
                raise Broken(f"step {step}: life {reader.extra(step)!r} wrote it, not {self.lives[step]}")
            for key in KEYS:
                record = reader.read(key)
                for name in ("master/w", "exp_avg/w", "exp_avg_sq/w"):
                    if not torch.equal(record[name], self.states[step][key][name]):
                        raise Broken(f"step {step}, key {key}: {name} differs")
                self.counts["records checked"] += 1
        self.counts["steps checked"] += 1

    def close(self) -> None:
        """Ends the daemon, if one lives."""
        with contextlib.suppress(ps.StoreUnavailable):
            self.kill_daemon()
        self.store.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=None, help="of what is drawn; default: another each time")
    parser.add_argument("--dir", type=Path, default=None, help="an empty directory for the store; default: a temporary one")
    options = parser.parse_args()
    seed = random.SystemRandom().getrandbits(32) if options.seed is None else options.seed
    print(f"seed {seed}", flush=True)
    started_s = time.monotonic()
    broken = None
    with tempfile.TemporaryDirectory(prefix="torture-") as temporary:
        torture = Torture(options.dir or Path(temporary), seed=seed)
        try:
            for life in range(1, options.kills + 1):
                torture.kill_one(life)
        except (Broken, ps.ParamStoreError) as error:  # nothing here asks for an error: a daemon that stays away is one too
            broken = f"seed {seed}, kill {life}: {type(error).__name__}: {error}"
        finally:
            torture.close()
    for what, count in sorted(torture.counts.items()):
        print(f"{count:8} {what}")
    print(f"{time.monotonic() - started_s:8.1f} s")
    print(f"BROKEN: {broken}" if broken else "every acknowledged step came back, whole")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
