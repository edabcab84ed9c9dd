"""Fine-tunes a Qwen3-MoE model whose experts live in the store: FSDP2 for the dense part, clipping, checkpoints, resuming.

    torchrun --standalone --nproc-per-node 2 examples/finetune_qwen3_moe.py --model MODEL [--text TEXT] [--out RUN] [--steps N]
        [--expert-parallel]

MODEL is a checkpoint of transformers; without it a small random one is made, whose tokens are bytes. The same command again goes
on from the last checkpoint, however the run before ended (of Ctrl-C torchrun tells at length), and comes to the same weights.
The daemon stays, for whoever reads what was trained: `paramstore stop finetune-run/store` ends it.
"""

import argparse
import os
import shutil
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3MoeConfig

import paramstore as ps

BATCH, CONTEXT, EVERY = 4, 128, 5


class Dense:
    """Model and optimizer, as torch's distributed checkpoint saves and loads them."""

    def __init__(self, model, optimizer):
        self.model, self.optimizer = model, optimizer

    def state_dict(self):
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state):
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


def main(arguments):
    dist.init_process_group("gloo")
    out, rank = arguments.out, dist.get_rank()
    out.mkdir(parents=True, exist_ok=True)
    path = arguments.model or small_checkpoint(out / "small-model")
    tokens = read_tokens(arguments.text, path)

    daemon = ps.ServeOptions(dir=str(out / "store"), host_budget=arguments.host_budget)
    store = ps.connect(autostart=daemon, timeout_s=120)  # one daemon, whichever rank comes first
    parallel = ps.moe.ExpertParallel() if arguments.expert_parallel else None  # each rank computes its own experts, for all
    model = ps.hf.from_pretrained(
        AutoModelForCausalLM, path, store=store, mode="train", name="experts", expert_parallel=parallel
    )  # fmt: skip
    for block in model.model.layers:
        fully_shard(block)
    fully_shard(model)
    ps.training.plan_prefetch(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.01)
    experts = ps.hf.experts(model)
    experts.attach(optimizer)  # from here on optimizer.step() updates the experts too

    state = {"dense": Dense(model, optimizer), "experts": experts}
    first = resume(state, out)
    for step in range(first, arguments.steps + 1):
        batch = draw(tokens, step=step, rank=rank)
        loss = model(input_ids=batch, labels=batch, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # the norm counts the experts
        optimizer.step()
        optimizer.zero_grad()
        print(f"rank {rank} step {step} loss {loss.item()!r}\n", end="", flush=True)  # in one write: ranks share the terminal
        if step % EVERY == 0 or step == arguments.steps:
            experts.commit(step, dense=out / "dense").wait()  # durable, before the checkpoint is; `ps.hf.follow` serves it
            dcp.save(state, checkpoint_id=out / f"step-{step:06}")
            keep_newest(out, 2)
    dist.destroy_process_group()


def resume(state, out):
    """Loads the newest whole checkpoint; the store rolls the experts back to its step. Returns the first step to make."""
    saved = whole_checkpoints(out)
    if not saved:
        return 1
    dcp.load(state, checkpoint_id=saved[-1])
    return int(saved[-1].name.removeprefix("step-")) + 1


def whole_checkpoints(out):
    return sorted(file.parent for file in out.glob("step-*/.metadata"))  # written last


def keep_newest(out, count):
    if dist.get_rank() == 0:
        for folder in whole_checkpoints(out)[:-count]:
            shutil.rmtree(folder)
    dist.barrier()


def draw(tokens, *, step, rank):
    """The batch of a step: a function of step and rank alone, so that a resumed run sees what the first would have seen."""
    generator = torch.Generator().manual_seed(step * dist.get_world_size() + rank)
    starts = torch.randint(len(tokens) - CONTEXT, (BATCH,), generator=generator)
    return torch.stack([tokens[start : start + CONTEXT] for start in starts.tolist()])


def read_tokens(text, path):
    files = sorted(text.glob("*.md")) if text.is_dir() else [text]
    data = "\n".join(file.read_text() for file in files)
    if len(data) < 8 * CONTEXT:
        raise SystemExit(f"--text {text}: {len(data)} characters are too few for batches of {CONTEXT} tokens")
    if (Path(path) / "small").exists():
        return torch.tensor(list(data.encode()))
    return torch.tensor(AutoTokenizer.from_pretrained(path)(data)["input_ids"])


def small_checkpoint(path):
    if dist.get_rank() == 0 and not (path / "small").exists():
        torch.manual_seed(0)
        config = Qwen3MoeConfig(
            vocab_size=256, hidden_size=64, intermediate_size=128, moe_intermediate_size=96, num_hidden_layers=4,
            num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_experts=16, num_experts_per_tok=4, decoder_sparse_step=1,
        )  # fmt: skip
        AutoModelForCausalLM.from_config(config).save_pretrained(path)
        (path / "small").touch()
    dist.barrier()
    return path


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a checkpoint's folder or name; default: a small random model")
    parser.add_argument("--text", type=Path, default=Path(__file__).parent.parent / "docs", help="a file, or a folder of *.md")
    parser.add_argument("--out", type=Path, default=Path("finetune-run"), help="the store and the checkpoints")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--host-budget", default="64MiB")
    parser.add_argument("--expert-parallel", action="store_true", help="tokens travel to the ranks of their experts")
    arguments = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("start it with torchrun, as the first lines of --help have it")
    if not arguments.text.exists():
        parser.error(f"--text {arguments.text}: no such file or folder")
    if arguments.model and Path(arguments.model).is_absolute() and not Path(arguments.model, "config.json").exists():
        parser.error(f"--model {arguments.model}: no config.json there")
    main(arguments)
