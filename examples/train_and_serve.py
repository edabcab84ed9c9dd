"""Serves a model that another process trains: it follows each commit between two tokens, with a quarter of the experts standing.

    python examples/train_and_serve.py [--model MODEL] [--text TEXT] [--out RUN] [--steps N] [PROMPT]...

MODEL is a checkpoint of transformers; without it a small random one is made, whose tokens are bytes. A second process trains it on
TEXT, and commits each step with its dense weights: experts and dense part are of one step. This one streams answers meanwhile, and
asks before each token whether there is a newer step. Where it has moved it reads the text so far anew, so that a token is of one
step alone. In the end every token is made once more by a model in memory, with the weights of the token's step, which a snapshot
has kept, and compared. The same command again trains on. Ctrl-C or SIGTERM ends both. The daemon stays: `paramstore stop
RUN/store`.
"""

import argparse
import signal
import subprocess
import sys
from inspect import signature
from itertools import cycle
from pathlib import Path

import torch
from safetensors.torch import load_file
from serve_ring import PROMPTS, small_checkpoint, text_codec
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

import paramstore as ps
from paramstore_client.handle.dense_part import DensePart

BATCH, CONTEXT, TOKENS = 4, 128, 24
SMALL = {"hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 96, "head_dim": 16}


def main(arguments):
    path = arguments.model or small_checkpoint(arguments.out / "small-model", **SMALL)
    room = {"held_steps": 2}  # for a reader that computes with a step while the trainer goes on
    daemon = ps.ServeOptions(dir=str(arguments.out / "store"), host_budget=arguments.host_budget, settings=room)
    with ps.connect(autostart=daemon, timeout_s=120) as store:
        command = [sys.executable, *sys.argv, "--train", "--model", str(path)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        with subprocess.Popen(command, process_group=0, **pipes) as trainer:
            try:
                if trainer.stdout.readline() != "ready\n":
                    raise SystemExit("the trainer has ended before it began")
                serve(store, path, arguments, trainer)
            finally:
                trainer.terminate()  # whatever it was at: the store is at a committed step


def serve(store, path, arguments, trainer):
    """Streams answers until the trainer has ended, and one more at its last step; then checks them."""
    config = AutoConfig.from_pretrained(path)
    count = config.num_hidden_layers * config.num_experts
    model = ps.hf.from_pretrained(
        AutoModelForCausalLM, path, store=store, mode="infer", name="experts", dtype=torch.bfloat16, expert_memory=count // 4
    )
    namespace = ps.hf.namespace(model)
    image_bytes, record_bytes = namespace.schema.part("param").image_bytes, namespace.schema.record_bytes
    print(f"{count // 4} of {count} experts stand: {count // 4 * image_bytes >> 10} of {count * image_bytes >> 10} KiB", end=", ")
    print(f"in a daemon of {arguments.host_budget} that trains {count * record_bytes >> 20} MiB")
    encode, decode = text_codec(path)
    trainer.stdin.write("go\n")
    trainer.stdin.flush()
    parts, snapshots = [], set()
    for text in cycle(arguments.prompt or PROMPTS):
        is_last = trainer.poll() is not None
        for start, token in stream(model, encode(text)):
            step = namespace.view_step
            if step not in snapshots:
                namespace.snapshot(step).close()
                snapshots.add(step)
            if not parts or parts[-1][1] is not start:
                parts.append((step, start, []))
                print(f"\n[step {step}] {decode(start)}", end="")
            parts[-1][2].append(token)
            print(decode(token), end="", flush=True)
        if is_last:
            break
    if trainer.returncode:
        raise SystemExit(f"the trainer ended with {trainer.returncode}")
    check(store, path, parts)
    for step in snapshots:
        namespace.drop_snapshot(step)
    print(f"\nevery token is that of its step in memory: {sum(len(made) for *_, made in parts)} tokens of {len(snapshots)} steps")


def stream(model, tokens):
    """Yields (what the model has read at its step [1, T], the next token [1, 1]) of an answer; moves before each token."""
    following = None
    for _ in range(TOKENS):
        if ps.hf.follow(model).has_moved or following is None:
            start, following = tokens, greedy(model, tokens)  # what was cached is of an older step
        token = next(following)
        yield start, token
        tokens = torch.cat([tokens, token], dim=1)


@torch.no_grad()
def greedy(model, tokens):
    """Yields the likeliest next token [1, 1], again and again."""
    name = "cache" if "cache" in signature(model.forward).parameters else "past_key_values"  # before transformers 5.24
    given = {name: DynamicCache(config=model.config), "use_cache": True}
    while True:
        tokens = model(input_ids=tokens, **given).logits[:, -1:].argmax(-1)
        yield tokens


def check(store, path, parts):
    """Makes every token anew, with the unmodified model in memory at its step."""
    memory, loaded = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16), None
    for step, start, made in parts:
        if step != loaded:
            load_step(memory, store, step)
            loaded = step
        if not all(torch.equal(token, again) for token, again in zip(made, greedy(memory, start), strict=False)):
            raise SystemExit(f"a token of step {step} is not that of the model in memory at this step")


@torch.no_grad()
def load_step(model, store, step):
    """Gives an unmodified model the experts and the dense weights of `step`."""
    layout = ps.hf.find_layout(model)
    with store.open_namespace("experts", at=step) as namespace:
        dense = DensePart.from_extra(namespace.extra(step))
        if dense is not None:  # the first step is the checkpoint itself
            model.load_state_dict(load_file(dense.path), strict=False)
        for layer, expert in namespace.space:
            record = namespace.read((layer, expert))
            for tensor in layout.tensors:
                model.get_parameter(f"{layout.modules[layer]}.{tensor.name}")[expert].copy_(record[tensor.name])


def train(arguments):
    """Makes `--steps` steps in the other process, and commits each of them."""
    with ps.connect(str(arguments.out / "store")) as store:
        model = ps.hf.from_pretrained(
            AutoModelForCausalLM, arguments.model, store=store, mode="train", name="experts", updates="touched",
            dtype=torch.bfloat16,
        )  # fmt: skip
        experts = ps.hf.experts(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        experts.attach(optimizer)
        first = (experts.load_dense() or 0) + 1
        tokens = read_tokens(arguments)
        print("ready", flush=True)
        sys.stdin.readline()
        for step in range(first, first + arguments.steps):
            starts = torch.randint(len(tokens) - CONTEXT, (BATCH,), generator=torch.Generator().manual_seed(step))
            batch = torch.stack([tokens[start : start + CONTEXT] for start in starts.tolist()])
            model(input_ids=batch, labels=batch, use_cache=False).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            experts.commit(step, dense=arguments.out / "dense")
        experts.settle()


def read_tokens(arguments):
    encode, _ = text_codec(arguments.model)
    files = sorted(arguments.text.glob("*.md")) if arguments.text.is_dir() else [arguments.text]
    return encode("\n".join(file.read_text() for file in files))[0]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompt", nargs="*", help="texts to go on with")
    parser.add_argument("--model", help="a checkpoint's folder or name; default: a small random model")
    parser.add_argument("--text", type=Path, default=Path(__file__).parent.parent / "docs", help="a file, or a folder of *.md")
    parser.add_argument("--out", type=Path, default=Path("train-and-serve-run"), help="the store and the dense weights")
    parser.add_argument("--steps", type=int, default=8, help="how many to train")
    parser.add_argument("--host-budget", default="8MiB", help="of the daemon, for both processes")
    parser.add_argument("--train", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if not arguments.train:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the trainer too
    try:
        (train if arguments.train else main)(arguments)
    except KeyboardInterrupt:
        sys.exit(130)
