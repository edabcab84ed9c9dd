"""Measures decoding and prefill of a Qwen3-MoE-shaped model through `ps.hf` with all, half, a quarter and a tenth of its experts in
host memory, beside the same model with everything in memory and beside what its arithmetic and its lacking bytes cost.

Run it on an idle machine: `python bench/bench_decode.py [--quick] [--dir DIR] [--out FILE]`. The figures go to
bench/results/decode-<date>.json. Each round times ours and memory in alternating order on a prompt of its own, and reads as many
raw records as a layer lacks; the logits of both are compared bit for bit. Prompts are computed with guesses of the next layer's
router, tokens without (`bench_speculation.py` measures those). With half and a quarter accelerate's `disk_offload`
decodes beside it, with the pages of its files dropped before each token.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, Qwen3MoeConfig
from transformers.utils import logging

import paramstore as ps
from bench_tiers import check_out
from paramstore.bench.context import Bench
from paramstore.bench.limits.pages import param_kind
from paramstore.bench.limits.raw import RawFile
from paramstore.bench.plan import Plan
from paramstore.bench.report import machine, table
from paramstore.bench.report.rows import Report, Row, encode
from paramstore.bench.service.daemon import Service, serving
from paramstore.cli.exits import exit_code
from paramstore.cli.signals import end_as_interrupt
from paramstore.config import SEGMENT_ALIGNMENT_BYTES
from paramstore.engine.planner.promises import slots_promising
from paramstore.engine.tables.arena import segment_lengths
from paramstore.errors import ParamStoreError
from paramstore_bench.decoding import SHARES, Answer, PairedAnswer, Work, check_logits, peer_row_of, row_of
from paramstore_bench.offload_peer import TARGETS, drop_pages, offloaded
from paramstore_client.device.host_slots import HostSlots
from paramstore_client.hf.model.binding import ATTRIBUTE, layer_of

RESULTS = Path(__file__).parent / "results"
WORKS = (Work(16, new=24), Work(16), Work(64), Work(512))
PEER_WORK = Work(16, new=4)
"""What the peer does too: it takes seconds for a token."""
ROUNDS, QUICK_ROUNDS, PEER_ROUNDS = 9, 2, 3
THREADS = (1, 2)
VOCABULARY = 8192
RAW_RECORDS = 32
SLACK_BYTES = 64 << 20
"""Beside the slots: what the daemon keeps for who else might come."""
WAIT_S = 600.0


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of the model. Weights are random: routing spreads over all experts, which is the hardest case for a cache."""

    layers: int = 4
    experts: int = 64
    hidden: int = 1024
    inner: int = 1408
    top_k: int = 4

    @property
    def keys(self) -> int:
        return self.layers * self.experts

    def config(self) -> Qwen3MoeConfig:
        return Qwen3MoeConfig(  # type: ignore[call-arg]  # its stub lacks one
            vocab_size=VOCABULARY, hidden_size=self.hidden, num_hidden_layers=self.layers, num_attention_heads=16,
            num_key_value_heads=4, head_dim=self.hidden // 16, intermediate_size=self.inner, moe_intermediate_size=self.inner,
            num_experts=self.experts, num_experts_per_tok=self.top_k, max_position_embeddings=2048, norm_topk_prob=True,
        )  # fmt: skip


QUICK = Shape(layers=2, experts=8, hidden=256, inner=256, top_k=2)


def main() -> int:
    """Runs the bench. Gives 0 when every target holds, 1 otherwise: the figures are written either way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a small model: a check, not figures to quote")
    parser.add_argument("--dir", type=Path, default=Path(), help="a directory on the disk in question")
    parser.add_argument("--out", type=Path, help="the JSON file; default: bench/results/decode-<date>.json")
    arguments = parser.parse_args()
    file = arguments.out or RESULTS / f"decode-{machine.now()[:10]}.json"
    try:
        check_out(file)
        return measure(file, arguments.dir, is_quick=arguments.quick)
    except ParamStoreError as error:
        sys.stderr.write(f"bench_decode: {type(error).__name__}: {error}\n")
        return exit_code(error)
    except KeyboardInterrupt:
        return 130


def measure(file: Path, directory: Path, *, is_quick: bool) -> int:
    """Runs the bench, writes `file`, and prints the table."""
    command = "python bench/bench_decode.py" + (" --quick" if is_quick else "")
    end_as_interrupt()
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]  # transformers left it so
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    progress, date = Console(stderr=True), machine.now()
    shape = QUICK if is_quick else Shape()
    rows: list[Row] = []
    with progress.status("bench decode") as status, tempfile.TemporaryDirectory(prefix="bench-", dir=directory) as folder:
        bench = Bench(Plan(), Path(folder), tell=status.update)
        started_s = bench.clock.now_s()
        for share in SHARES:
            rows += measure_share(bench, shape, share, rounds=QUICK_ROUNDS if is_quick else ROUNDS)
        seconds = bench.clock.now_s() - started_s
    report = Report(
        machine=machine.describe(directory), commit=machine.commit(), command=command, date=date, seconds=seconds, rows=rows
    )
    file.write_bytes(encode(report))
    table.render(report, Console())
    progress.print(f"written: {file}")
    return 1 if report.short_rows else 0


def checkpoint_of(bench: Bench, shape: Shape) -> Path:
    """The model's checkpoint, made at the first call."""
    path = bench.directory / "checkpoint"
    if not path.exists():
        bench.tell("making the model")
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(shape.config(), dtype=torch.bfloat16)  # type: ignore[no-untyped-call]
        model.save_pretrained(path)
    return path


def measure_share(bench: Bench, shape: Shape, share: float, *, rounds: int) -> list[Row]:
    """Measures every work with this share of the experts standing, with each number of threads."""
    checkpoint, slots = checkpoint_of(bench, shape), round(share * shape.keys)
    image_bytes = ps.param_schema(
        {"gate_up": ((2 * shape.inner, shape.hidden), "bfloat16"), "down": ((shape.hidden, shape.inner), "bfloat16")}
    ).part("param").image_bytes
    budget_bytes = sum(segment_lengths(slots_promising(slots), image_bytes)) + SLACK_BYTES
    budget_bytes -= budget_bytes % -SEGMENT_ALIGNMENT_BYTES
    memory: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16)
    with (
        serving(bench.directory / "store", host_budget_bytes=budget_bytes) as service,
        bench.raw_file(bench.directory, param_kind(), record_bytes=image_bytes, record_count=RAW_RECORDS) as raw,
    ):
        bench.tell(f"{share:.0%}: loading")
        ours = ps.hf.from_pretrained(
            AutoModelForCausalLM, checkpoint, store=service.store, mode="infer", name="experts", expert_memory=slots,
            dtype=torch.bfloat16,
        )  # fmt: skip
        service.wait_until_quiet(bench.clock)
        models = Models(ours, memory, service, raw)
        rows = [models.row(bench, work, share, threads, rounds=rounds) for threads in THREADS for work in WORKS]
        if share in TARGETS:
            bench.tell(f"{share:.0%}: the peer")
            with bench.folder("offloaded") as folder:
                peer = offloaded(checkpoint, folder, layers=shape.layers, share=share)
                rows += [models.peer_row(peer, (folder, checkpoint), share, threads) for threads in THREADS]
        return rows


class Models:
    """Both models, and what they are measured by."""

    def __init__(self, ours: Any, memory: Any, service: Service, raw: RawFile) -> None:
        self.ours = ours
        self.memory = memory
        self.service = service
        self.raw = raw
        experts = next(layer_of(module) for module in ours.modules() if ATTRIBUTE in module.__dict__)
        source, self._early = experts.source, experts.early
        assert isinstance(source, HostSlots)
        self._routers = self._early.routers
        self.slots = source
        for layer in source.layers:  # no slot is empty from here on, and where all experts stand nothing is read
            for expert in range(source.experts):
                source.acquire([(layer, expert)]).release()

    def row(self, bench: Bench, work: Work, share: float, threads: int, *, rounds: int) -> Row:
        """Measures one cell: `rounds` pairs, after one that is not counted."""
        torch.set_num_threads(threads)
        bench.tell(f"{share:.0%}, {threads} threads: {work.name}")
        pairs = [self._pair(work, number) for number in range(-1, rounds)][1:]
        facts = {"slots": float(self.slots.lease_slots), "keys": float(len(self.slots.layers) * self.slots.experts)}
        return row_of(work, share, threads, pairs, record_bytes=self.raw.record_bytes, facts=facts)

    def peer_row(self, peer: Any, folders: Sequence[Path], share: float, threads: int) -> Row:
        """Measures decoding beside the peer, whose files lie in `folders`."""
        torch.set_num_threads(threads)
        pairs = []
        for number in range(PEER_ROUNDS):
            prompt = prompt_of(PEER_WORK, 100 + number)
            ours = self._ours(PEER_WORK, prompt)
            theirs = run(peer, PEER_WORK, prompt, between=partial(drop_pages, folders))
            check_logits(ours, theirs, what=f"the peer, round {number}")
            pairs.append((ours, theirs))
        return peer_row_of(
            share, threads, pairs, tokens=PEER_WORK.tokens, record_bytes=self.raw.record_bytes, bound=TARGETS[share]
        )

    def _pair(self, work: Work, number: int) -> PairedAnswer:
        prompt = prompt_of(work, number)
        if number % 2:
            memory, ours = run(self.memory, work, prompt), self._ours(work, prompt)
        else:
            ours, memory = self._ours(work, prompt), run(self.memory, work, prompt)
        check_logits(ours, memory, what=f"{work.name}, round {number}")
        per_visit = max(1, round(ours.lacking_bytes / self.raw.record_bytes / (len(self.slots.layers) * max(1, work.new))))
        rate = self.raw.read([(number + index) % RAW_RECORDS for index in range(min(per_visit, RAW_RECORDS))] * 2).rate
        return PairedAnswer(ours, memory, rate)

    def _ours(self, work: Work, prompt: Tensor) -> Answer:
        self._early.routers = {} if work.new else self._routers  # decoding: nothing is guessed
        return run(self.ours, work, prompt, counted=self._counts)

    def _counts(self) -> tuple[float, float]:
        """Bytes that demand lacked, and bytes that were read, so far."""
        counts = self.slots.counts
        read = sum(int(volume["bytes_read"]) for volume in self.service.stats()["volumes"].values())
        return (counts.misses + counts.useful + counts.passed) * self.raw.record_bytes, read


def prompt_of(work: Work, number: int) -> Tensor:
    """The token ids [1, prompt] of a round: each has its own."""
    return torch.randint(VOCABULARY, (1, work.prompt), generator=torch.Generator().manual_seed(number + 1000 * work.prompt))


@torch.no_grad()
def run(
    model: Any, work: Work, prompt: Tensor, *, counted: Any = lambda: (0.0, 0.0), between: Callable[[], None] | None = None
) -> Answer:
    """Times one work. In decoding the prompt goes first, untimed, and tokens are chosen greedily. between: called before each
    forward, untimed."""
    cache = DynamicCache(config=model.config)
    logits: list[Tensor] = []
    tokens = prompt
    if work.new:
        tokens = model(input_ids=prompt, past_key_values=cache, use_cache=True).logits[:, -1:].argmax(-1)
    before = counted()
    seconds, started_s = 0.0, time.perf_counter()
    for _ in range(max(1, work.new)):
        if between is not None:
            seconds += time.perf_counter() - started_s
            between()
            started_s = time.perf_counter()
        out = model(input_ids=tokens, past_key_values=cache, use_cache=True)
        logits.append(out.logits[:, -1])
        tokens = logits[-1].argmax(-1, keepdim=True)
    seconds += time.perf_counter() - started_s
    lacking, read = (after - earlier for after, earlier in zip(counted(), before, strict=True))
    return Answer(seconds, torch.cat(logits), lacking_bytes=min(lacking, read), read_bytes=read)


if __name__ == "__main__":
    sys.exit(main())
