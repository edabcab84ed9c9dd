"""Measures decoding and prefill of a Qwen3-MoE-shaped model through `ps.hf` with all, half, a quarter and a tenth of its experts in
host memory, beside the same model with everything in memory and beside what its arithmetic and its lacking bytes cost.

Run it on an idle machine: `python bench/bench_decode.py [--quick] [--llama] [--peers] [--dtype float32] [--dir DIR] [--out FILE]`.
The figures go to bench/results/decode-<date>.json. Each round times ours and memory in alternating order on a prompt of its own,
and reads as many raw records as a layer lacks; the logits of both are compared bit by bit. Prompts are computed with guesses of the
next layer's router, tokens without (`bench_speculation.py` measures those). Where not all experts fit, the same is measured with
`residency="ring"`: tokens, and with half of the experts prompts; there the bench also finds the length of a prompt that a layer
computes 1.5 times as long as its experts load, and asks for memory's speed. With half and a quarter accelerate's `disk_offload`
decodes beside it, and with `--llama` llama.cpp on a mapped file, with the pages of their files dropped before each token.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.utils import logging

import paramstore as ps
from paramstore.bench.context import Bench
from paramstore.bench.limits.pages import param_kind
from paramstore.bench.report.rows import Row
from paramstore.bench.service.daemon import serving
from paramstore_bench.decode.checkpoint import QUICK, SHAPES, Shape, checkpoint_of
from paramstore_bench.decode.llama_peer import mapped, missing_reason, write_gguf
from paramstore_bench.decode.long_prompt import find_long_prompt
from paramstore_bench.decode.offload_peer import TARGETS, drop_pages, offloaded
from paramstore_bench.decode.rows import (
    AUTO,
    RING,
    SHARES,
    Answer,
    Cell,
    Work,
    check_logits,
    check_near,
    count_rows_of,
    peer_row_of,
    row_of,
)
from paramstore_bench.decode.runs import Models, prompt_of, run
from paramstore_bench.frame import Script, wait_policy

WORKS = (Work(16, new=24), Work(16), Work(64), Work(512))
PEER_WORK = Work(16, new=4)
"""What the peer does too: it takes seconds for a token."""
ROUNDS, QUICK_ROUNDS, PEER_ROUNDS = 9, 2, 3
THREADS = (1, 2)
HIDDEN_SHARE = 0.5
"""With as many slots a ring holds a layer and the next one."""
RAW_RECORDS = 32
MeasurePeer = Callable[[Bench, Models, Path, Cell], Row]
"""(bench, models, the model's checkpoint, cell) -> the row of decoding beside a peer."""


SCRIPT = Script("decode", __doc__, quick="a small model: a check, not figures to quote")


def main() -> int:
    """Runs the bench."""
    parser = SCRIPT.parser()
    parser.add_argument("--llama", action="store_true", help="llama.cpp beside it: needs the packages llama_cpp_python and gguf")
    parser.add_argument("--peers", action="store_true", help="decoding beside accelerate (and llama.cpp) alone")
    parser.add_argument("--dtype", choices=SHAPES, default="bfloat16", help="of the model")
    arguments = parser.parse_args()
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]  # transformers left it so
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    left_out = {"llama.cpp": reason} if arguments.llama and (reason := missing_reason()) else {}
    options = {"--llama": arguments.llama, "--peers": arguments.peers, "--dtype float32": arguments.dtype == "float32"}
    words = [word for word, is_given in options.items() if is_given]
    script = replace(SCRIPT, words=" ".join(words))
    peers = (measure_accelerate, measure_llama) if arguments.llama and not left_out else (measure_accelerate,)
    shape = replace(QUICK, dtype=SHAPES[arguments.dtype].dtype) if arguments.quick else SHAPES[arguments.dtype]
    rounds = QUICK_ROUNDS if arguments.quick else ROUNDS
    measure_rows = partial(measure, shape=shape, rounds=rounds, peers=peers, has_peers_alone=arguments.peers)
    return script.run(arguments, measure_rows, facts=wait_policy(), left_out=left_out)


def measure(bench: Bench, *, shape: Shape, rounds: int, peers: Sequence[MeasurePeer], has_peers_alone: bool) -> Iterator[Row]:
    """Measures every share, or those that peers are measured at."""
    for share in TARGETS if has_peers_alone else SHARES:
        yield from measure_share(bench, shape, share, peers, rounds=0 if has_peers_alone else rounds)


def measure_share(bench: Bench, shape: Shape, share: float, peers: Sequence[MeasurePeer], *, rounds: int) -> Iterator[Row]:
    """Measures every work with this share of the experts standing, with each number of threads, by use and as a ring. rounds: of
    each; 0 for peers alone, by use."""
    checkpoint, slots = checkpoint_of(bench, shape), round(share * shape.keys)
    image_bytes, budget_bytes = shape.image_bytes, shape.budget_bytes(slots)
    memory: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=shape.dtype)
    with (
        serving(bench.directory / "store", host_budget_bytes=budget_bytes) as service,
        bench.raw_file(bench.directory, param_kind(), record_bytes=image_bytes, record_count=RAW_RECORDS) as raw,
    ):
        for residency in (AUTO,) if share == max(SHARES) or not rounds else (AUTO, RING):
            bench.tell(f"{share:.0%}, {residency}: loading")
            ours = ps.hf.from_pretrained(
                AutoModelForCausalLM, checkpoint, store=service.store, mode="infer", name="experts", expert_memory=slots,
                residency=residency, dtype=shape.dtype,
            )  # fmt: skip
            with ps.hf.namespace(ours):
                service.wait_until_quiet(bench.clock)
                models = Models(ours, memory, service, raw)
                for threads in THREADS:
                    torch.set_num_threads(threads)
                    cells = [Cell(work, share, threads, residency) for work in works_of(share, residency) if rounds]
                    for cell in cells:
                        yield measure_cell(bench, models, cell, rounds=rounds)
                    if (share, residency) == (HIDDEN_SHARE, RING):
                        yield from measure_hidden(bench, models, threads, rounds=rounds)
                    if share in TARGETS and residency == AUTO:
                        cell = Cell(PEER_WORK, share, threads)
                        bench.tell(f"{cell.case}: the peers")
                        for measure_peer in peers:
                            yield measure_peer(bench, models, checkpoint, cell)


def works_of(share: float, residency: str) -> tuple[Work, ...]:
    """What is measured: of a ring prompts where a layer and the next one have slots, else tokens alone."""
    return WORKS if residency == AUTO or share == HIDDEN_SHARE else WORKS[:1]


def measure_cell(bench: Bench, models: Models, cell: Cell, *, rounds: int) -> Row:
    """Measures pairs of one cell."""
    bench.tell(f"{cell.case}: {cell.work.name}")
    pairs = models.pairs(cell, rounds=rounds)
    return row_of(cell, pairs, record_bytes=models.raw.record_bytes, facts=models.facts())


def measure_hidden(bench: Bench, models: Models, threads: int, *, rounds: int) -> list[Row]:
    """Finds the prompt under which the ring hides its loads, and measures pairs of it."""
    bench.tell(f"{threads} threads: which prompt hides a ring's loads")
    found = find_long_prompt(models)
    cell = Cell(Work(found.tokens, hides_loads=True), HIDDEN_SHARE, threads, RING)
    bench.tell(f"{cell.case}: {cell.work.name}")
    pairs, record_bytes = models.pairs(cell, rounds=rounds), models.raw.record_bytes
    row = row_of(cell, pairs, record_bytes=record_bytes, facts={**models.facts(), **found.facts()})
    return [row, *count_rows_of(cell, pairs, record_bytes=record_bytes)]


def measure_accelerate(bench: Bench, models: Models, checkpoint: Path, cell: Cell) -> Row:
    """Measures decoding beside accelerate's `disk_offload`."""
    with bench.folder("offloaded") as folder:
        peer = offloaded(checkpoint, folder, layers=len(models.slots.layers), share=cell.share)

        def decode(prompt: Tensor) -> Answer:
            return Answer(*run(peer, cell.work, prompt, between=partial(drop_pages, (folder, checkpoint))))

        pairs = [models.beside(decode, cell.work, number) for number in range(PEER_ROUNDS)]
    for ours, theirs in pairs:
        if ours.logits.dtype == torch.bfloat16:
            check_logits(theirs, ours, what="accelerate")
        else:
            check_near("accelerate", theirs.logits, ours.logits)
    against = "accelerate's disk_offload of as many layers, the page cache of its files dropped before each token"
    return peer_row_of(
        cell, pairs, peer="accelerate", against=against, record_bytes=models.raw.record_bytes, bound=TARGETS[cell.share]
    )


def measure_llama(bench: Bench, models: Models, checkpoint: Path, cell: Cell) -> Row:
    """Measures decoding beside llama.cpp's mmap."""
    file = checkpoint.with_suffix(".gguf")
    if not file.exists():
        write_gguf(models.memory, file)
    kept = round(cell.share * len(models.slots.layers))
    with mapped(file, threads=cell.threads, layers_kept=kept) as peer:
        prompt = prompt_of(PEER_WORK, -1)
        check_near("llama.cpp", peer.read(prompt), run(models.memory, Work(prompt.numel()), prompt)[1])
        pairs = [models.beside(partial(peer.decode, cell.work), cell.work, number) for number in range(PEER_ROUNDS)]
    against = "llama.cpp on a mapped GGUF, experts of as many layers kept, pages of the others dropped before each token"
    return peer_row_of(cell, pairs, peer="llama.cpp", against=against, record_bytes=models.raw.record_bytes, bound=None)


if __name__ == "__main__":
    sys.exit(main())
