"""Runs the update alone in a process of its own, so that the native kernel and torch stand side by side on the same machine.

`python -m paramstore_bench.update_process DTYPE RECORD_BYTES RECORDS THREADS RANKS GRAD_SCALE MISSED` updates every record
once per line `step` on stdin and answers with the seconds it took. `UpdateProcess` is the owner of such a process.
"""

from __future__ import annotations

import os
import subprocess
import sys

from paramstore.bench.pairs import Sample
from paramstore.bench.plan import RecordSize
from paramstore.bench.update_alone import UpdateAlone, Work
from paramstore.clock import MonotonicClock
from paramstore.errors import StoreUnavailable
from paramstore_native.adamw import ADAMW
from paramstore_native.finder import SWITCH_VARIABLE


class UpdateProcess:
    """Owner of one such process. is_native: it may use the kernel; `uses` says whether it does."""

    def __init__(
        self, dtype: str, size: RecordSize, record_count: int, *, threads: int, work: Work, is_native: bool
    ) -> None:
        arguments = (dtype, size.nominal_bytes, record_count, threads, work.ranks, work.grad_scale, work.missed)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "paramstore_bench.update_process", *map(str, arguments)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, SWITCH_VARIABLE: "1" if is_native else "0"},
        )  # fmt: skip
        self.uses, self._parameters = self._answer().split()[0], 0
        self._parameters = int(self._ask("parameters"))

    def step(self) -> Sample:
        """Updates every record once."""
        return Sample(self._parameters, float(self._ask("step")))

    def _ask(self, question: str) -> str:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{question}\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        answer = self._process.stdout.readline()
        if not answer:
            raise StoreUnavailable(f"the process of the update ended (exit code {self._process.wait()})")
        return answer

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


def run(dtype: str, record_bytes: int, record_count: int, threads: int, work: Work) -> None:
    """Runs the process: answers each line of stdin until it closes."""
    import torch

    from paramstore.bench.service.experts import adamw_schema

    schema = adamw_schema(RecordSize(record_bytes), getattr(torch, dtype))
    alone = UpdateAlone(schema, record_count, threads=threads, clock=MonotonicClock(), work=work)
    _tell("torch" if ADAMW.kernel() is None else "native")
    for line in sys.stdin:
        if line.strip() == "parameters":
            _tell(str(record_count * schema.parameter_elements))
        else:
            _tell(str(alone.step().seconds))
    alone.close()


def _tell(answer: str) -> None:
    sys.stdout.write(f"{answer}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    dtype, record_bytes, record_count, threads, ranks, grad_scale, missed = sys.argv[1:]
    run(
        dtype, int(record_bytes), int(record_count), int(threads),
        Work(ranks=int(ranks), grad_scale=float(grad_scale), missed=int(missed)),
    )  # fmt: skip
