"""Runs DeepSpeed ZeRO-Infinity in a process of its own: optimizer states on NVMe, blocks the size of an expert, a step at a time.

    PYTHON bench/deepspeed_step.py DIRECTORY BLOCKS ELEMENTS BUFFERS BUFFER_ELEMENTS {plain,pipelined}

Runs under the interpreter of an environment that has DeepSpeed (see bench/README.md). Answers `ready` once the states lie in
DIRECTORY, then, for every line on stdin, the seconds of one `engine.step()`; forward and backward of a few rows are not timed.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

WIDTH = 2048
ROWS = 4
AIO = {"block_size": 8 << 20, "queue_depth": 32, "intra_op_parallelism": 2, "single_submit": False, "overlap_events": True}
"""Settings of DeepSpeed's own I/O: the best of those tried on large files."""
ENVIRONMENT = {
    "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "DS_ACCELERATOR": "cpu",
}  # fmt: skip


def settings(directory: str, buffers: int, buffer_elements: int, *, is_pipelined: bool) -> dict[str, Any]:
    """DeepSpeed's settings: ZeRO-3 in bf16, AdamW, optimizer states on NVMe. One subgroup of parameters fills one buffer."""
    return {
        "train_micro_batch_size_per_gpu": ROWS,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {
            "stage": 3,
            "sub_group_size": buffer_elements,
            "offload_optimizer": {
                "device": "nvme", "nvme_path": directory, "buffer_count": buffers, "pin_memory": False,
                "pipeline_read": is_pipelined, "pipeline_write": is_pipelined,
            },
        },
        "aio": AIO,
        "wall_clock_breakdown": False,
    }  # fmt: skip


def main() -> None:
    directory, blocks, elements, buffers, buffer_elements, kind = sys.argv[1:]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what DeepSpeed prints must not be read as an answer
    os.environ.update(ENVIRONMENT)
    os.environ.setdefault("MASTER_PORT", str(20_000 + os.getpid() % 20_000))
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # for ninja, which builds its operators

    import deepspeed
    import torch

    torch.manual_seed(1)
    model = torch.nn.Sequential(
        *(torch.nn.Linear(WIDTH, int(elements) // WIDTH, bias=False) for _ in range(int(blocks)))
    )  # each gets the same input: they are experts, not layers
    config = settings(directory, int(buffers), int(buffer_elements), is_pipelined=kind == "pipelined")
    engine, *_ = deepspeed.initialize(model=Experts(model), model_parameters=model.parameters(), config=config)
    print("ready", file=answers, flush=True)
    rows = torch.randn(ROWS, WIDTH, dtype=torch.bfloat16)
    for _ in sys.stdin:
        engine.backward(engine(rows))
        started_s = time.perf_counter()
        engine.step()
        print(time.perf_counter() - started_s, file=answers, flush=True)
    os._exit(0)  # its threads do not end


if __name__ == "__main__":
    import torch

    class Experts(torch.nn.Module):
        """Feeds the same rows to every expert; the loss is the sum of the mean squares of their outputs."""

        def __init__(self, experts: torch.nn.Sequential) -> None:
            super().__init__()
            self.experts = experts

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            losses = [expert(rows).float().square().mean() for expert in self.experts]
            return torch.stack(losses).sum()

    main()
