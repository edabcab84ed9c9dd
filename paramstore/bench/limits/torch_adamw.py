"""The limit of `apply`: torch's own fused AdamW in a process of its own, everything resident.

`python -m paramstore.bench.limits.torch_adamw THREADS RECORDS ELEMENTS...` steps once per line `step` on stdin
and answers with the seconds it took. `TorchAdamW` is the owner of such a process.
"""

from __future__ import annotations

import subprocess
import sys

from paramstore.bench.pairs import Sample
from paramstore.clock import MonotonicClock
from paramstore.errors import StoreUnavailable


class TorchAdamW:
    """Owner of one peer process: `record_count` experts of fp32 parameters and gradients."""

    def __init__(self, *, record_count: int, field_elements: tuple[int, ...], threads: int) -> None:
        self._parameters = record_count * sum(field_elements)
        arguments = [str(value) for value in (threads, record_count, *field_elements)]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "paramstore.bench.limits.torch_adamw", *arguments],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def step(self) -> Sample:
        """Makes one optimizer step over all parameters."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("step\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise StoreUnavailable(f"torch's AdamW ended (exit code {self._process.wait()})")
        return Sample(self._parameters, float(answer))

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


def run(threads: int, record_count: int, field_elements: list[int]) -> None:
    """Runs the peer process: steps once per line of stdin until it closes."""
    import torch

    torch.set_num_threads(threads)
    parameters = [torch.randn(elements) for _ in range(record_count) for elements in field_elements]
    for parameter in parameters:
        parameter.requires_grad_()
        parameter.grad = torch.randn_like(parameter)
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, fused=True)
    clock = MonotonicClock()
    for _ in sys.stdin:
        started_s = clock.now_s()
        optimizer.step()
        sys.stdout.write(f"{clock.now_s() - started_s}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    run(int(sys.argv[1]), int(sys.argv[2]), [int(argument) for argument in sys.argv[3:]])
