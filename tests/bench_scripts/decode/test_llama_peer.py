"""llama.cpp computes what the model does, from a file that was made of it, and what it should not have in memory is not there."""

from __future__ import annotations

import ctypes
import mmap
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from paramstore.bench.report import machine
from paramstore_bench.decode.llama_peer import drop_mapped, mapped, mappings_of, missing_reason, write_gguf
from paramstore_bench.decode.rows import Work, check_near
from paramstore_bench.decode.runs import run

PAGE, MIB = mmap.PAGESIZE, 1 << 20
CONFIG = Qwen3MoeConfig(
    vocab_size=512, hidden_size=256, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=64,
    intermediate_size=256, moe_intermediate_size=256, num_experts=8, num_experts_per_tok=2, max_position_embeddings=512,
    norm_topk_prob=True,
)  # fmt: skip


def resident(mapping: mmap.mmap) -> list[bool]:
    """Which pages of a mapped file the page cache has."""
    count = len(mapping) // PAGE
    address = ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(mapping)))
    found = (ctypes.c_ubyte * count)()
    assert ctypes.CDLL(None, use_errno=True).mincore(address, ctypes.c_size_t(len(mapping)), found) == 0
    return [bool(page & 1) for page in found]


def test_dropped_pages_leave_mapping_and_cache_and_come_again_with_their_bytes(tmp_path: Path) -> None:
    if machine.describe(tmp_path)["file_system"] == "tmpfs":
        pytest.skip("files of tmpfs have no other place than the page cache")
    (file := tmp_path / "file").write_bytes(content := bytes(range(256)) * (32 * MIB // 256))
    with file.open("r+b") as opened, mmap.mmap(opened.fileno(), 0) as mapping:
        mapping.flush()
        assert mapping[:] == content
        assert all(resident(mapping))
        drop_mapped(file, [(8 * MIB + 5, 16 * MIB), (PAGE + 1, PAGE - 1)])
        there, per_mib = resident(mapping), MIB // PAGE
        assert not any(there[12 * per_mib : 20 * per_mib])
        assert all(there[: 8 * per_mib] + there[25 * per_mib :])
        assert mapping[:] == content
        (start, end, offset), *others = mappings_of(file)
        assert (end - start, offset, others) == (32 * MIB, 0, [])


def test_a_package_that_is_not_there_is_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    assert missing_reason().startswith("llama_cpp_python cannot be imported: ")


@pytest.mark.slow
def test_it_computes_the_logits_of_the_model_but_for_rounding(tmp_path: Path) -> None:
    if reason := missing_reason():
        pytest.skip(reason)
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(CONFIG, dtype=torch.bfloat16)  # type: ignore[no-untyped-call]
    work, prompt = Work(16, new=4), torch.randint(512, (1, 16))
    write_gguf(model, file := tmp_path / "model.gguf")
    with mapped(file, threads=1, layers_kept=2) as peer:
        for _ in range(2):
            found = peer.decode(work, prompt)
            check_near("llama.cpp", peer.read(prompt), run(model, Work(16), prompt)[1])
    assert (found.seconds > 0, found.logits.shape) == (True, (4, 512))
