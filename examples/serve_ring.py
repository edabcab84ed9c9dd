"""Serves prompts with a quarter of a model's experts standing in memory: ring memory, layer after layer, again and again.

    python examples/serve_ring.py [--model MODEL] [--out RUN] [PROMPT]...

MODEL is a checkpoint of transformers; without it a small random one is made, whose tokens are bytes. Its experts are imported into
a store once. `residency="ring"` gives the slots of the layer just left to the one that comes around (SE-MoE, arXiv 2205.10034,
section 3.3.2). The answers are compared with those of the model in memory. The daemon stays: `paramstore stop serve-run/store`.
"""

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3MoeConfig

import paramstore as ps

PROMPTS = ["A storage-tier parameter service keeps", "One expert's whole state is", "A commit is"]
NEW_TOKENS = 24


def main(arguments):
    path = arguments.model or small_checkpoint(arguments.out / "small-model")
    encode, decode = text_codec(path)
    memory = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    count = memory.config.num_hidden_layers * memory.config.num_experts
    quarter = count // 4

    daemon = ps.ServeOptions(dir=str(arguments.out / "store"), host_budget=arguments.host_budget)
    with ps.connect(autostart=daemon, timeout_s=120) as store:
        model = ps.hf.from_pretrained(
            AutoModelForCausalLM, path, store=store, mode="infer", name="experts", expert_memory=quarter, residency="ring",
            dtype=torch.bfloat16,
        )  # fmt: skip
        expert_bytes = ps.hf.namespace(model).schema.part("param").image_bytes
        print(f"{quarter} of {count} experts stand: {quarter * expert_bytes >> 20} of {count * expert_bytes >> 20} MiB", end=", ")
        print(f"in a daemon of {arguments.host_budget}")
        for prompt in arguments.prompt or PROMPTS:
            before = bytes_read(store)
            tokens = generate(model, encode(prompt))
            print(f"{decode(tokens)!r}\n  {NEW_TOKENS} tokens, {(bytes_read(store) - before) >> 20} MiB read")
            if not torch.equal(tokens, generate(memory, encode(prompt))):
                raise SystemExit("these are not the tokens of the model in memory")
    print("every token is that of the model in memory")


def generate(model, prompt, count=NEW_TOKENS):
    mask = torch.ones_like(prompt)
    return model.generate(prompt, attention_mask=mask, max_new_tokens=count, do_sample=False, pad_token_id=0)


def bytes_read(store):
    return sum(volume["bytes_read"] for volume in store.stats()["volumes"].values())


def text_codec(path):
    """(text -> tokens [1, T], tokens -> text) of a checkpoint."""
    if (Path(path) / "small").exists():
        return lambda text: torch.tensor([list(text.encode())]), lambda tokens: bytes(tokens[0].tolist()).decode(errors="replace")
    tokenizer = AutoTokenizer.from_pretrained(path)
    return lambda text: tokenizer(text, return_tensors="pt")["input_ids"], lambda tokens: tokenizer.decode(tokens[0])


def small_checkpoint(path, **sizes):
    if not (path / "small").exists():
        torch.manual_seed(0)
        sizes = {"hidden_size": 256, "intermediate_size": 512, "moe_intermediate_size": 512, "head_dim": 64, **sizes}
        config = Qwen3MoeConfig(
            vocab_size=256, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, num_experts=16,
            num_experts_per_tok=2, decoder_sparse_step=1, **sizes,
        )  # fmt: skip
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(path)
        (path / "small").touch()
    return path


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompt", nargs="*", help="texts to go on with")
    parser.add_argument("--model", help="a checkpoint's folder or name; default: a small random model")
    parser.add_argument("--out", type=Path, default=Path("serve-run"), help="the store")
    parser.add_argument("--host-budget", default="14MiB", help="of the daemon: what stands, one more, and up to a segment's end")
    main(parser.parse_args())
