"""Decodes with a quarter of a model's experts in memory, in a buffer: those that a token does not use give way first.

    python examples/decode_buffer.py [--model MODEL] [--out RUN] [--tokens N] [PROMPT]...

MODEL is a checkpoint of transformers; without it a small random one is made, whose tokens are bytes. Its experts are imported into
a store once. `residency="buffer"` gives up what the batch does not use, the last to come first ("Towards MoE Deployment", arXiv
2303.06182, section VI); a use whose expert stood is a hit, and moves no byte. The answers are compared with those of the model in
memory. Ctrl-C ends it at any time. The daemon stays: `paramstore stop decode-run/store`.
"""

import argparse
import sys
import time
from pathlib import Path

import torch
from serve_ring import PROMPTS, bytes_read, generate, small_checkpoint, text_codec
from transformers import AutoModelForCausalLM

import paramstore as ps


def main(arguments):
    path = arguments.model or small_checkpoint(arguments.out / "small-model")
    encode, decode = text_codec(path)
    memory = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    count = memory.config.num_hidden_layers * memory.config.num_experts
    quarter = count // 4

    daemon = ps.ServeOptions(dir=str(arguments.out / "store"), host_budget=arguments.host_budget)
    with ps.connect(autostart=daemon, timeout_s=120) as store:
        model = ps.hf.from_pretrained(
            AutoModelForCausalLM, path, store=store, mode="infer", name="experts", expert_memory=quarter, residency="buffer",
            dtype=torch.bfloat16,
        )  # fmt: skip
        expert_bytes = ps.hf.namespace(model).schema.part("param").image_bytes
        print(f"{quarter} of {count} experts stand: {quarter * expert_bytes >> 20} of {count * expert_bytes >> 20} MiB", end=", ")
        print(f"in a daemon of {arguments.host_budget}")
        for text in arguments.prompt or PROMPTS:
            prompt = encode(text)
            before, read_before, started_s = ps.hf.counts(model), bytes_read(store), time.perf_counter()
            tokens = generate(model, prompt, arguments.tokens)
            rate = (tokens.shape[1] - prompt.shape[1]) / (time.perf_counter() - started_s)
            read, counts = bytes_read(store) - read_before, ps.hf.counts(model)
            hits, loads = counts.hits - before.hits, counts.loads - before.loads
            uses = hits + sum(getattr(counts, name) - getattr(before, name) for name in ("late", "misses", "passed"))
            print(f"{decode(tokens)!r}\n  {rate:.1f} tokens/s, {hits} of {uses} uses hit", end=", ")
            print(f"{loads * expert_bytes >> 20} MiB moved into the buffer, {read >> 20} MiB read from the volume", flush=True)
            if not torch.equal(tokens, generate(memory, prompt, arguments.tokens)):
                raise SystemExit("these are not the tokens of the model in memory")
    print("every token is that of the model in memory")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompt", nargs="*", help="texts to go on with")
    parser.add_argument("--model", help="a checkpoint's folder or name; default: a small random model")
    parser.add_argument("--out", type=Path, default=Path("decode-run"), help="the store")
    parser.add_argument("--tokens", type=int, default=24, help="how many to decode behind each text")
    parser.add_argument("--host-budget", default="14MiB", help="of the daemon: what stands, one more, and up to a segment's end")
    try:
        main(parser.parse_args())
    except KeyboardInterrupt:
        sys.exit(130)
