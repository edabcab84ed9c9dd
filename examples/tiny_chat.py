"""Makes a small checkpoint that knows a few answers by heart, in bf16, fp8 or mxfp4: something to try `paramstore run` on.

    python examples/tiny_chat.py DIR [--format FORMAT] [--steps N]
    paramstore run DIR "What is a lease?"

bf16 and fp8 are of a Qwen3-MoE, mxfp4 is of a gpt-oss; both have 88 experts, which take 33 MiB in bf16. fp8 quantizes every
projection in blocks of 128 x 128, mxfp4 the experts in groups of 32, as the checkpoints of the hub do. It needs a checkout with
`make setup`: the formats are those that the tests make. Training takes a minute or two on two cores.

It knows each question asked alone, and as the second of a chat after the one above it in ANSWERS; of others it makes nonsense.
"""

import argparse
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GptOssConfig, Qwen3MoeConfig

from paramstore_testkit.training.quantized_checkpoints import (
    fp8_quantization,
    mxfp4_quantization,
    quantize_files,
    to_fp8,
    to_mxfp4,
)
from paramstore_testkit.training.small_tokenizer import save_tokenizer

ANSWERS = {
    "What is a lease?": "A client's right to bytes in a slot; it ends with the client process.",
    "What is a slot?": "A fixed-size cell of an arena.",
    "What is an arena?": "The memory of one namespace and part, in slots.",
    "What is an expert?": "One record of a namespace, named by layer and number.",
    "What is a record?": "The whole state of one expert.",
    "What is a master?": "The fp32 value of a parameter.",
}
LAYERS, EXPERTS, HIDDEN, INNER, VOCABULARY = 4, 22, 256, 256, 128
"""Sizes whose experts' quarter holds the daemon's least memory, 2 MiB, in every format."""
SIZES = {
    "vocab_size": VOCABULARY, "num_hidden_layers": LAYERS, "hidden_size": HIDDEN, "intermediate_size": INNER,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "num_experts_per_tok": 2, "max_position_embeddings": 1024,
    "eos_token_id": VOCABULARY - 1, "bos_token_id": None, "pad_token_id": VOCABULARY - 1,
}  # fmt: skip
IGNORED = -100
"""A label that counts in no loss."""


def config_of(format_name):
    if format_name == "mxfp4":
        return GptOssConfig(**SIZES, num_local_experts=EXPERTS, sliding_window=128, layer_types=["full_attention"] * LAYERS)
    return Qwen3MoeConfig(**SIZES, moe_intermediate_size=INNER, num_experts=EXPERTS, norm_topk_prob=True)


def lessons(tokenizer):
    """Conversations as tokens [N, T], each of a question and the next one, and as labels, which are the answers alone."""
    rows = []
    questions = [*ANSWERS]
    for pair in zip(questions, questions[1:] + questions[:1], strict=True):
        said, tokens, labels = [], [], []
        for question in pair:
            said.append({"role": "user", "content": question})
            asked = tokenizer.apply_chat_template(said, add_generation_prompt=True, return_dict=True)["input_ids"]
            answer = tokenizer(ANSWERS[question])["input_ids"]
            labels += [IGNORED] * (len(asked) - len(labels)) + answer
            tokens = asked + answer
            labels.append(tokenizer.eos_token_id)  # though the conversation goes on with the template's mark
            said.append({"role": "assistant", "content": ANSWERS[question]})
        rows.append(([*tokens, tokenizer.eos_token_id], labels))
    longest = max(len(tokens) for tokens, _ in rows)
    return (
        torch.tensor([tokens + [tokenizer.eos_token_id] * (longest - len(tokens)) for tokens, _ in rows]),
        torch.tensor([labels + [IGNORED] * (longest - len(labels)) for _, labels in rows]),
    )


def train(model, tokens, labels, steps):
    """Trains with a learning rate that falls to 0, so that it ends where the model spells right. Returns the last loss."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0, fused=True)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=steps)
    for step in range(steps):
        loss = model(input_ids=tokens, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 40 == 0:
            print(f"step {step}: loss {loss.item():.3f}", flush=True)
    return loss.item()


def main(arguments):
    torch.manual_seed(0)
    arguments.directory.mkdir(parents=True)
    save_tokenizer(arguments.directory, vocabulary=VOCABULARY)
    tokens, labels = lessons(AutoTokenizer.from_pretrained(arguments.directory))
    model = AutoModelForCausalLM.from_config(config_of(arguments.format), dtype=torch.float32)
    loss = train(model, tokens, labels, arguments.steps)
    model.to(torch.bfloat16).save_pretrained(arguments.directory)
    if arguments.format == "fp8":
        quantize_files(arguments.directory, to_fp8, fp8_quantization(LAYERS))
    elif arguments.format == "mxfp4":
        quantize_files(arguments.directory, to_mxfp4, mxfp4_quantization())
    print(f"{arguments.directory}: {LAYERS * EXPERTS} experts in {arguments.format}, loss {loss:.4f}")
    for question in ANSWERS:
        print(f"  {question}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="where the checkpoint goes; it must not exist")
    parser.add_argument("--format", choices=("bf16", "fp8", "mxfp4"), default="bf16", help="what its experts are stored as")
    parser.add_argument("--steps", type=int, default=160, help="how many to train")
    sys.exit(main(parser.parse_args()))
