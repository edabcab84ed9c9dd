"""A daemon that trains, commits, is killed, recovers and is sent broken frames runs no code that came as data.

`test_banned_names.py` reads the source for it; here the interpreter itself tells what is done, whoever does it: torch, msgspec
and lmdb included.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest
import torch

import paramstore_client as ps
from paramstore.errors import ProtocolError
from paramstore.wire import messages as m
from paramstore_native.adamw import ADAMW
from paramstore_testkit.processes.audited_serve import MARK, MODULE
from paramstore_testkit.processes.daemon_process import QUIET, DaemonProcess
from paramstore_testkit.wire.frame_mutator import FrameMaker, Mutator
from paramstore_testkit.wire.raw_client import RawClient

pytestmark = pytest.mark.slow

NAME, SHAPE = "moe", (64, 64)
SEED = 11
FRAMES, FRAMES_PER_CONNECTION = 2000, 4
LIMIT_S = 60.0
COMMAND = (sys.executable, "-m", MODULE)

DEEDS = {
    "pickle.find_class": "import pickle, fractions; pickle.loads(pickle.dumps(fractions.Fraction(1)))",
    "os.system": "import os; os.system('true')",
    "subprocess.Popen": "import subprocess; subprocess.run(['true'])",
    "os.exec": "import os; os.execv('/bin/true', ['true'])",
    "os.fork": "import os; os.fork() or os._exit(0)",
    "marshal.loads": "import marshal; marshal.loads(marshal.dumps(1))",
    "compile": "import socket; socket.socket(socket.AF_UNIX).bind('s'); compile('1', 'x', 'eval')",
    "exec": "import socket; socket.socket(socket.AF_UNIX).bind('s'); code = (lambda: 0).__code__; exec(code)",
}


def audited_lines(daemon: DaemonProcess) -> list[str]:
    return [line for line in daemon.stderr.splitlines() if line.startswith(MARK)]


def train(address: str, step: int) -> None:
    with ps.connect(address) as store, store.open_namespace(NAME, mode="write") as writer:
        writer.push({key: {"w": torch.ones(SHAPE)} for key in writer.space})
        assert writer.gradient_norm() > 0.0
        writer.apply(ps.AdamW(lr=0.5), grad_scale=0.5).wait()
        writer.commit(step).wait()
        with writer.acquire([(0, 0)]) as lease:
            assert lease[0, 0]["w"].isfinite().all()
        assert store.verify(NAME).wait()


async def break_frames(path: Path) -> None:
    random = Random(SEED)
    maker = FrameMaker(random, m.Request)
    frames: list[bytes] = []
    while len(frames) < 100:
        try:
            frames.append(maker.frame())
        except ProtocolError:
            continue  # a number that msgpack does not have
    mutator = Mutator(random, frames)
    for _ in range(FRAMES // FRAMES_PER_CONNECTION):
        client = RawClient.connect(path)
        await client.hello()
        try:
            for _ in range(FRAMES_PER_CONNECTION):
                await client.send_bytes(random.choice(frames) if random.random() < 0.5 else mutator.mutated())
        except OSError:
            pass  # it had enough
        client.close()


def test_a_daemon_runs_no_code_that_comes_as_data(directory: Path) -> None:
    ADAMW.load()  # the one program that a daemon starts, once per machine, is the C compiler
    with DaemonProcess(directory, environment=QUIET, command=COMMAND) as daemon:
        train(daemon.address, 2)
        daemon.kill()
        daemon.start()
        train(daemon.address, 3)
        asyncio.run(asyncio.wait_for(break_frames(daemon.socket), LIMIT_S))
        train(daemon.address, 4)
        daemon.stop()
        assert daemon.wait() == 0
        assert audited_lines(daemon) == [], f"seed {SEED}"


@pytest.mark.parametrize("event", DEEDS)
def test_the_hook_tells_of(event: str, tmp_path: Path) -> None:
    hooked = "import sys; from paramstore_testkit.processes.audited_serve import Auditor; sys.addaudithook(Auditor())"
    script = f"{hooked}\n{DEEDS[event]}"
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", script], cwd=tmp_path, capture_output=True, check=False, text=True)
    assert f"{MARK}{event} " in done.stderr, done.stderr
