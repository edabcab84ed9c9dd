"""A process that decodes beside a trainer: from a store, moving to each commit between two tokens, or from plain memory.

    python bench/following_reader.py CHECKPOINT [--directory STORE --name NAME --experts N]

It says `ready`; each line on stdin is a number of tokens, decoded greedily on one thread, and answered by one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache

import paramstore as ps
from paramstore.bench.service.daemon import STARTUP_S
from paramstore_client.hf.compat import caches

PROMPT, CONTEXT = 16, 128
"""Tokens of a prompt, and those of an answer with it: then the next prompt begins."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--directory", type=Path, help="the store; without it everything is in memory")
    parser.add_argument("--name", help="of the namespace")
    parser.add_argument("--experts", type=int, help="how many stand")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.directory is None:
        serve(AutoModelForCausalLM.from_pretrained(given.checkpoint, dtype=torch.bfloat16), nullcontext())
        return
    with ps.connect(given.directory, timeout_s=STARTUP_S) as store:
        model = ps.hf.from_pretrained(
            AutoModelForCausalLM, given.checkpoint, store=store, name=given.name, mode="infer", expert_memory=given.experts,
            dtype=torch.bfloat16,
        )  # fmt: skip
        serve(model, ps.hf.following(model))


@torch.no_grad()
def serve(model: Any, block: Any) -> None:
    """Answers every line on stdin."""
    answer = tokens_of(model)
    with block as progress:
        print("ready", flush=True)
        for line in sys.stdin:
            started_s = time.perf_counter()
            for _ in range(int(line)):
                next(answer)
            seconds = time.perf_counter() - started_s
            place = {} if progress is None else {"step": progress.last.step, "changed_bytes": progress.last.changed_bytes}
            print(json.dumps({"tokens": int(line), "seconds": seconds, **place}), flush=True)


def tokens_of(model: Any) -> Iterator[Tensor]:
    """Decodes without end: prompts of random tokens, the same ones at each start, and their answers."""
    numbers = torch.Generator().manual_seed(0)
    while True:
        given = {caches.name_in(model.forward): DynamicCache(config=model.config), "use_cache": True}
        tokens = torch.randint(model.config.vocab_size, (1, PROMPT), generator=numbers)
        for _ in range(CONTEXT - PROMPT):
            tokens = model(input_ids=tokens, **given).logits[:, -1:].argmax(-1)
            yield tokens


if __name__ == "__main__":
    main()
