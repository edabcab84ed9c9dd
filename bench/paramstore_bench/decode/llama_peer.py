"""A peer of decoding: llama.cpp, which maps a file of the weights (GGUF) and has the kernel page in what a token uses.

What it has read stays in the page cache, beyond any budget. So before each token the pages of experts are dropped, from the mapping
and from the cache, of all layers but as many as the budget has experts for: these stay, as all else does. Its kernels are its own,
so its logits are near those of the model and not equal. Needs the packages llama_cpp_python, which is compiled when it is
installed, and gguf.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor

from paramstore_bench.decode.rows import Answer, Work

ARCHITECTURE = "qwen3moe"
CONTEXT = 128
"""Tokens of its cache."""
EXPERT_TENSORS = ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")


def missing_reason() -> str:
    """Why the peer cannot run here; "" where it can."""
    for package, module in (("llama_cpp_python", "llama_cpp"), ("gguf", "gguf")):
        try:
            import_module(module)
        except (ImportError, OSError, RuntimeError) as error:  # a library of another machine
            return f"{package} cannot be imported: {error}"
    return ""


def write_gguf(model: Any, file: Path) -> None:
    """Writes a Qwen3-MoE model's weights: matrices in their dtype, norms and routers in fp32, as its own conversion does."""
    gguf = import_module("gguf")
    config = model.config
    writer = gguf.GGUFWriter(file, ARCHITECTURE)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_expert_count(config.num_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("no_vocab")
    for name, tensor in _tensors_of(model):
        if tensor.dim() == 1 or tensor.dtype != torch.bfloat16 or name.endswith("ffn_gate_inp.weight"):
            writer.add_tensor(name, tensor.float().numpy())
        else:
            writer.add_tensor(name, tensor.contiguous().view(torch.uint8).numpy(), raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _tensors_of(model: Any) -> Iterator[tuple[str, Tensor]]:
    yield "token_embd.weight", model.model.embed_tokens.weight.detach()
    yield "output_norm.weight", model.model.norm.weight.detach()
    yield "output.weight", model.lm_head.weight.detach()
    for number, layer in enumerate(model.model.layers):
        attention, experts = layer.self_attn, layer.mlp.experts
        inner = experts.gate_up_proj.shape[1] // 2
        named = {
            "attn_norm": layer.input_layernorm.weight, "attn_q": attention.q_proj.weight, "attn_k": attention.k_proj.weight,
            "attn_v": attention.v_proj.weight, "attn_output": attention.o_proj.weight, "attn_q_norm": attention.q_norm.weight,
            "attn_k_norm": attention.k_norm.weight, "ffn_norm": layer.post_attention_layernorm.weight,
            "ffn_gate_inp": layer.mlp.gate.weight, "ffn_gate_exps": experts.gate_up_proj[:, :inner],
            "ffn_up_exps": experts.gate_up_proj[:, inner:], "ffn_down_exps": experts.down_proj,
        }  # fmt: skip
        for name, tensor in named.items():
            yield f"blk.{number}.{name}.weight", tensor.detach()


class LlamaPeer:
    """A model of llama.cpp over a mapped file, with the experts of `layers_kept` layers in memory."""

    def __init__(self, llama: Any, file: Path, *, layers_kept: int) -> None:
        self._llama = llama
        self._file = file
        tensors = import_module("gguf").GGUFReader(file).tensors
        expert_tensors = [tensor for tensor in tensors if tensor.name.split(".")[-2] in EXPERT_TENSORS]
        self._dropped = [
            (int(tensor.data_offset), int(tensor.n_bytes))
            for tensor in expert_tensors if int(tensor.name.split(".")[1]) >= layers_kept
        ]  # fmt: skip

    def read(self, prompt: Tensor) -> Tensor:
        """Reads a prompt [1, T], and forgets what was before it. Gives the logits behind it, [vocabulary]."""
        self._llama.reset()
        return self._add(prompt[0].tolist())

    def decode(self, work: Work, prompt: Tensor) -> Answer:
        """Decodes behind the prompt, greedily; only tokens are timed, and not the drop of pages before each."""
        logits, seconds = [self.read(prompt)], 0.0
        for _ in range(work.new):
            drop_mapped(self._file, self._dropped)
            started_s = time.perf_counter()
            logits.append(self._add([int(logits[-1].argmax())]))
            seconds += time.perf_counter() - started_s
        return Answer(seconds, torch.stack(logits[1:]))

    def _add(self, tokens: list[int]) -> Tensor:
        self._llama.eval(tokens)
        pointer = self._llama._ctx.get_logits()  # those of the last position
        return torch.from_numpy(numpy.ctypeslib.as_array(pointer, shape=(self._llama.n_vocab(),)).copy())


@contextmanager
def mapped(file: Path, *, threads: int, layers_kept: int) -> Iterator[LlamaPeer]:
    """Runs llama.cpp over `file` with so many threads."""
    llama = import_module("llama_cpp").Llama(
        str(file), n_ctx=CONTEXT, n_threads=threads, n_threads_batch=threads, use_mmap=True, verbose=False
    )
    try:
        yield LlamaPeer(llama, file, layers_kept=layers_kept)
    finally:
        llama.close()


def drop_mapped(file: Path, ranges: Iterable[tuple[int, int]]) -> None:
    """Has this process and the system forget the whole pages of these (offset, size) of a file that is mapped and not dirty. A page
    that stands in a process's table is not dropped from the cache, so it goes from the mapping first. Raises OSError."""
    libc, mappings = ctypes.CDLL(None, use_errno=True), mappings_of(file)
    with file.open("rb") as opened:
        for offset, size in ranges:
            first, last = offset + -offset % mmap.PAGESIZE, (offset + size) // mmap.PAGESIZE * mmap.PAGESIZE
            for start, end, mapped_from in mappings:
                low, high = max(first, mapped_from), min(last, mapped_from + end - start)
                address = ctypes.c_void_p(start + low - mapped_from)
                if low < high and libc.madvise(address, ctypes.c_size_t(high - low), mmap.MADV_DONTNEED):
                    raise OSError(ctypes.get_errno(), f"madvise of {file}")
            if first < last:
                os.posix_fadvise(opened.fileno(), first, last - first, os.POSIX_FADV_DONTNEED)


def mappings_of(file: Path) -> list[tuple[int, int, int]]:
    """(start, end, offset in the file) of each mapping of `file` in this process."""
    found, name = [], os.fspath(file.resolve())
    for line in Path("/proc/self/maps").read_text().splitlines():
        words = line.split(maxsplit=5)
        if words[-1] == name:
            start, end = (int(address, 16) for address in words[0].split("-"))
            found.append((start, end, int(words[2], 16)))
    return found
