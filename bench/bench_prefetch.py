"""Measures both dimensions of the 2D prefetch: two ranks with FSDP2 fine-tune a Qwen3-MoE-shaped model on real text, and a timeline
says how much of the gathering and of the loading went on beside computing, with the plan and without it.

`python bench/bench_prefetch.py [--quick] [--dir DIR] [--out FILE]`; it starts its ranks by itself. Writes
bench/results/prefetch-<date>.json; `--trace FILE` keeps the first rank's Chrome trace of the steps with the plan.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

import paramstore as ps
from paramstore_bench.frame import Script
from paramstore_testkit.processes.daemon_process import DaemonProcess

HERE = Path(__file__).parent
RANKS, BATCH, CONTEXT = 2, 4, 256
WARM_STEPS, STEPS = 3, 4
SHARE = 0.25
"""Host budget as a share of the states."""


SCRIPT = Script("prefetch", __doc__, quick="a small model: a check, not figures to quote")


def main() -> int:
    parser = SCRIPT.parser()
    parser.add_argument("--trace", type=Path, help="where the Chrome trace goes")
    parser.add_argument("--rank-of", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank_of is not None:
        return run_rank(arguments.rank_of)
    about, out = SCRIPT.heading(arguments), SCRIPT.file(arguments)
    rows = [measure(arguments, is_planned=is_planned) for is_planned in (True, False)]
    out.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")
    for row in rows:
        print(summary(row))
    print(f"written: {out}", file=sys.stderr)
    return 0


def summary(row: dict[str, Any]) -> str:
    """Describes one case in a line."""
    overlap = row["overlap"]
    parts = [
        f"{name} {overlap[name]['seconds']:.2f} s, {share(overlap[name]):.0%} beside computing"
        for name in ("dense", "prefetches", "demands", "updates", "write_backs")
    ]
    plan = "with the plan" if row["is_planned"] else "without it"
    return f"{plan}: {row['seconds_a_step']:.2f} s a step, {overlap['compute_s']:.2f} s computing; " + "; ".join(parts)


def share(beside: dict[str, float]) -> float:
    return beside["beside_compute_s"] / beside["seconds"] if beside["seconds"] else 0.0


def measure(arguments: argparse.Namespace, *, is_planned: bool) -> dict[str, Any]:
    """Runs both ranks once over a new store; gives the findings of rank 0's timeline."""
    config = model_config(is_quick=arguments.quick)
    with tempfile.TemporaryDirectory(dir=arguments.dir, prefix="bench-") as name:
        folder = Path(name).absolute()
        budget_bytes = int(SHARE * state_bytes(config)) + (32 << 20)
        (folder / "task.json").write_text(json.dumps({"is_quick": arguments.quick, "is_planned": is_planned}))
        with DaemonProcess(folder / "store", "--host-budget", str(budget_bytes)) as daemon:
            (folder / "address").write_text(daemon.address)
            command = [
                sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS), __file__,
                "--rank-of", str(folder),
            ]  # fmt: skip
            subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        if arguments.trace is not None and is_planned:
            shutil.copy(folder / "trace.json", arguments.trace)
        return {
            "is_planned": is_planned, "host_budget_bytes": budget_bytes, "state_bytes": state_bytes(config),
            "ranks": RANKS, "batch": BATCH, "context": CONTEXT, "steps": STEPS, **json.loads((folder / "result.json").read_text()),
        }  # fmt: skip


def model_config(*, is_quick: bool) -> Qwen3MoeConfig:
    width, layers, experts = (128, 3, 8) if is_quick else (512, 6, 16)
    return Qwen3MoeConfig(  # type: ignore[call-arg]  # its stub lacks one
        vocab_size=256, hidden_size=width, intermediate_size=width, moe_intermediate_size=width, num_hidden_layers=layers,
        num_attention_heads=8, num_key_value_heads=4, head_dim=width // 8, num_experts=experts, num_experts_per_tok=4,
        decoder_sparse_step=1,
    )  # fmt: skip


def state_bytes(config: Qwen3MoeConfig) -> int:
    """Bytes of masters and moments of all experts."""
    return 12 * 3 * config.hidden_size * config.moe_intermediate_size * config.num_hidden_layers * config.num_experts


def run_rank(folder: Path) -> int:
    """Runs one of the ranks; rank 0 records its timeline."""
    task = json.loads((folder / "task.json").read_text())
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    tokens = torch.tensor(list("\n".join(file.read_text() for file in sorted((HERE.parent / "docs").glob("*.md"))).encode()))
    with ps.connect((folder / "address").read_text()) as store:
        model = ps.hf.from_config(AutoModelForCausalLM, model_config(is_quick=task["is_quick"]), store=store, name="experts")
        for block in model.model.layers:
            fully_shard(block)
        fully_shard(model)
        if task["is_planned"]:
            ps.training.plan_prefetch(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        ps.hf.experts(model).attach(optimizer)
        train(model, optimizer, tokens, range(WARM_STEPS))
        if dist.get_rank() == 0:
            with ps.training.Timeline(store, folder / "trace.json") as timeline:
                started_s = time.monotonic()
                train(model, optimizer, tokens, range(WARM_STEPS, WARM_STEPS + STEPS))
                seconds = time.monotonic() - started_s
            result = {"seconds_a_step": seconds / STEPS, "overlap": asdict(timeline.overlap)}
            (folder / "result.json").write_text(json.dumps(result))
        else:
            train(model, optimizer, tokens, range(WARM_STEPS, WARM_STEPS + STEPS))
        dist.barrier()
    dist.destroy_process_group()
    return 0


def train(model: nn.Module, optimizer: torch.optim.Optimizer, tokens: Tensor, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step * RANKS + dist.get_rank())
        starts = torch.randint(len(tokens) - CONTEXT, (BATCH,), generator=generator).tolist()
        batch = torch.stack([tokens[start : start + CONTEXT] for start in starts])
        model(input_ids=batch, labels=batch, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    sys.exit(main())
