"""Makes a small checkpoint that knows a few answers by heart, in bf16, fp8 or mxfp4: something to try `paramstore run` on.

    python examples/tiny_chat.py DIR [--format FORMAT] [--steps N]
    paramstore run DIR "What is a lease?"

bf16 and fp8 are of a Qwen3-MoE, mxfp4 is of a gpt-oss; both have 64 experts. fp8 quantizes every projection in blocks of 128 x 128,
mxfp4 the experts in groups of 32, as the checkpoints of the hub do. It needs a checkout with `make setup`: the formats are those
that the tests make. Training takes a minute or two on two cores.
"""

import argparse
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GptOssConfig, Qwen3MoeConfig

from paramstore_testkit.training.quantized_checkpoints import (
    MXFP4_NAMES,
    fp8_quantization,
    mxfp4_of,
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
LAYERS, EXPERTS, VOCABULARY = 4, 16, 128
SIZES = {
    "vocab_size": VOCABULARY, "num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": 2,
    "num_experts_per_tok": 2, "max_position_embeddings": 1024, "eos_token_id": VOCABULARY - 1, "bos_token_id": None,
    "pad_token_id": VOCABULARY - 1,
}  # fmt: skip
IGNORED = -100
"""A label that counts in no loss."""


def config_of(format_name):
    if format_name == "mxfp4":
        return GptOssConfig(
            **SIZES, hidden_size=128, intermediate_size=128, head_dim=32, num_local_experts=EXPERTS, sliding_window=128,
            layer_types=["full_attention"] * LAYERS,
        )  # fmt: skip
    return Qwen3MoeConfig(
        **SIZES, hidden_size=128, intermediate_size=128, moe_intermediate_size=128, head_dim=32, num_experts=EXPERTS,
        norm_topk_prob=True,
    )  # fmt: skip


def lessons(tokenizer):
    """All conversations as tokens [N, T], and as labels, which are the answers alone."""
    rows = []
    for question, answer in ANSWERS.items():
        asked = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=True
        )["input_ids"]  # fmt: skip
        rows.append((asked, [*tokenizer(answer)["input_ids"], tokenizer.eos_token_id]))
    longest = max(len(asked) + len(answer) for asked, answer in rows)
    tokens = torch.full((len(rows), longest), tokenizer.eos_token_id)
    labels = torch.full((len(rows), longest), IGNORED)
    for row, (asked, answer) in enumerate(rows):
        tokens[row, : len(asked) + len(answer)] = torch.tensor(asked + answer)
        labels[row, len(asked) : len(asked) + len(answer)] = torch.tensor(answer)
    return tokens, labels


def train(model, tokens, labels, steps, lr):
    """Trains what has gradients. Returns the last loss."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=lr, weight_decay=0.0)
    for step in range(steps):
        loss = model(input_ids=tokens, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        if step % 50 == 0:
            print(f"step {step}: loss {loss.item():.3f}", flush=True)
    return loss.item()


def main(arguments):
    torch.manual_seed(0)
    arguments.directory.mkdir(parents=True)
    save_tokenizer(arguments.directory, vocabulary=VOCABULARY)
    tokens, labels = lessons(AutoTokenizer.from_pretrained(arguments.directory))
    model = AutoModelForCausalLM.from_config(config_of(arguments.format), dtype=torch.float32)
    loss = train(model, tokens, labels, arguments.steps, lr=1e-3)
    if arguments.format == "mxfp4":  # four bits forget a little: what is not quantized learns to make up for it
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith(MXFP4_NAMES):
                    parameter.copy_(mxfp4_of(parameter)[2]).requires_grad_(False)
        loss = train(model, tokens, labels, arguments.steps // 2, lr=1e-3)
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
    parser.add_argument("--steps", type=int, default=250, help="how many to train")
    sys.exit(main(parser.parse_args()))
