"""Measures a trainer of a Qwen3-MoE-shaped model that commits every step, dense weights with it, beside a reader that follows every
commit with a quarter of the experts standing, against the same trainer beside the same decoding from plain memory.

Run it on an idle machine: `python bench/bench_following.py [--quick] [--dir DIR] [--out FILE]`. The figures go to
bench/results/following-<date>.json. The reader's work behind a commit is chosen so that it takes half of a step from memory; the
trainer's time is that of its steps and commits, and each step begins when the reader has ended.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from transformers.utils import logging

from paramstore.bench.context import Bench
from paramstore.bench.plan import MIB
from paramstore.bench.report.rows import Row
from paramstore.bench.service.daemon import serving
from paramstore.errors import StoreUnavailable
from paramstore_bench.following import Decoded, Turn, check_turns, row_of
from paramstore_bench.frame import Script
from training_models import Shape, Stored, save_model

READER = Path(__file__).with_name("following_reader.py")
NAME = "followed"
SHAPE = Shape(layers=4, experts=16, hidden=512, inner=256, top_k=4, rows=2, context=256)
QUICK = Shape(layers=2, experts=8, hidden=64, inner=64, top_k=2, rows=1, context=32)
ROUNDS, QUICK_ROUNDS = 9, 1
LEAD_STEPS, STEPS = 1, 5
"""Steps of a turn that are not counted, as the reader has others' steps to catch up with, and that are."""
THREADS = (1, 2)
SHARE = 4
"""One of so many experts stands in the reader's memory."""
SLACK_BYTES = 256 * MIB
TOKENS_MIN = 2
SEED = 3
END_S = 60.0


SCRIPT = Script("following", __doc__, quick="a small model, one pair: a check, not figures to quote")


def main() -> int:
    """Runs the bench."""
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]  # transformers left it so
    arguments = SCRIPT.parser().parse_args()
    shape, rounds = (QUICK, QUICK_ROUNDS) if arguments.quick else (SHAPE, ROUNDS)
    return SCRIPT.run(arguments, partial(measure_all, shape=shape, rounds=rounds))


def measure_all(bench: Bench, *, shape: Shape, rounds: int) -> list[Row]:
    """Makes a row for each number of the trainer's threads, over one store."""
    checkpoint, store = bench.directory / "checkpoint", bench.directory / "store"
    bench.tell("making the model")
    save_model(shape, checkpoint, seed=SEED)
    with serving(store, host_budget_bytes=2 * shape.states_bytes + SLACK_BYTES) as service:
        trainer = Trainer(Stored(checkpoint, service.store, name=NAME, updates="touched"), shape, bench.directory / "dense")
        trainer.step()
        standing = shape.layers * shape.experts // SHARE
        place = ("--directory", str(store), "--name", NAME, "--experts", str(standing))
        with reading(checkpoint, *place) as following, reading(checkpoint) as memory:
            service.wait_until_quiet(bench.clock)
            facts = {"standing": float(standing), "experts": float(shape.layers * shape.experts)}
            schema = trainer.stored.experts.namespace.schema
            return [
                row_of(
                    threads, list(take_pairs(bench, trainer, following, memory, threads=threads, rounds=rounds)),
                    tokens=shape.tokens, record_bytes=schema.record_bytes, facts=facts,
                ) for threads in THREADS
            ]  # fmt: skip


class Trainer:
    """Makes steps of random tokens and commits each, with the dense weights in `dense`."""

    def __init__(self, stored: Stored, shape: Shape, dense: Path) -> None:
        self.stored = stored
        self._shape = shape
        self._dense = dense
        self.committed = 0
        """The newest step."""

    def step(self) -> float:
        """Makes a step that is durable on return. Gives its seconds."""
        step, size = self.committed + 1, (self._shape.rows, self._shape.context)
        batch = torch.randint(256, size, generator=torch.Generator().manual_seed(step))
        started_s = time.perf_counter()
        self.stored.step(batch)
        self.stored.experts.commit(step, dense=self._dense)
        self.stored.settle()
        self.committed = step
        return time.perf_counter() - started_s


class Reader:
    """Owner of a process that decodes; see `following_reader.py`."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.answer()

    def tell(self, tokens: int) -> None:
        """Has it decode so many tokens."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{tokens}\n")
        self._process.stdin.flush()

    def answer(self) -> str:
        """The next line that it says. Raises StoreUnavailable if it has ended."""
        assert self._process.stdout is not None
        if not (line := self._process.stdout.readline()):
            raise StoreUnavailable("the reader's process has ended; what it said is above")
        return line

    def decoded(self) -> Decoded:
        """What it has done; waits for it."""
        return Decoded(**json.loads(self.answer()))

    def decode(self, tokens: int) -> Decoded:
        self.tell(tokens)
        return self.decoded()


@contextmanager
def reading(*arguments: object) -> Iterator[Reader]:
    """Runs a reader for as long as the block runs."""
    command = [sys.executable, str(READER), *map(str, arguments)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield Reader(process)
        finally:
            assert process.stdin is not None
            process.stdin.close()
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                process.kill()


def take_pairs(
    bench: Bench, trainer: Trainer, following: Reader, memory: Reader, *, threads: int, rounds: int
) -> Iterator[tuple[Turn, Turn]]:
    """Takes turns beside one reader and the other, in alternating order, after one pair that is not counted."""
    torch.set_num_threads(threads)
    bench.tell(f"{threads} threads: how much is decoded")
    memory.decode(2)
    seconds = min(memory.decode(4).seconds for _ in range(2)) / 4
    tokens = max(TOKENS_MIN, round(min(trainer.step() for _ in range(2)) / 2 / seconds))
    for number in range(-1, rounds):
        bench.tell(f"{threads} threads: round {number + 1} of {rounds}")
        turns: dict[Reader, Turn] = {}
        for reader in (following, memory) if number % 2 else (memory, following):
            turns[reader] = take_turn(trainer, reader, tokens)
        check_turns(turns[following], turns[memory])
        if number >= 0:
            yield turns[following], turns[memory]


def take_turn(trainer: Trainer, reader: Reader, tokens: int) -> Turn:
    """Makes steps with a reader beside each: it is told to decode once the step before is committed."""
    step_s, committed, decoded = [], [], []
    for _ in range(LEAD_STEPS + STEPS):
        committed.append(trainer.committed)
        reader.tell(tokens)
        step_s.append(trainer.step())
        decoded.append(reader.decoded())
    return Turn(step_s[LEAD_STEPS:], committed[LEAD_STEPS:], decoded[LEAD_STEPS:])


if __name__ == "__main__":
    sys.exit(main())
