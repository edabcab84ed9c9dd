"""Decides how much the battery of `bench_device.py` measures; makes the row of what it could not measure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from transformers import Qwen3MoeConfig

from paramstore.bench.report.rows import SUBJECT, Row

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Plan:
    """Amounts of one run.

    copy_bytes: of one timed copy, in pieces of piece_bytes. matmul_size, matmuls: a computation that takes longer than a copy;
    copies: so many take longer than it. The served model has `layers` x `experts` experts; prompts: tokens of those timed; new:
    tokens decoded in one sample. own_groups, group_tokens, group_slots: of grouped_mm. sizes: of the models whose logits are
    compared.
    """

    rounds: int = 5
    copy_bytes: int = 256 * MIB
    piece_bytes: int = 8 * MIB
    matmul_size: int = 4096
    matmuls: int = 150
    copies: int = 24
    layers: int = 4
    experts: int = 64
    hidden: int = 1024
    inner: int = 1408
    top_k: int = 4
    prompts: tuple[int, ...] = (16, 64, 512)
    new: int = 24
    own_groups: int = 64
    group_tokens: tuple[int, ...] = (1, 64, 4096)
    group_slots: tuple[int, ...] = (64, 128, 256, 1023)
    ring_visits: int = 200
    seeds: int = 10
    sizes: dict[str, Any] = field(
        default_factory=lambda: {"hidden_size": 256, "intermediate_size": 512, "moe_intermediate_size": 256}
    )

    @classmethod
    def quick(cls) -> Plan:
        """A plan of about a minute, without what it takes to start: to see that all is well, not to quote."""
        return cls(rounds=2, copy_bytes=64 * MIB, layers=2, experts=16, prompts=(16, 512), new=8, seeds=3, ring_visits=40)

    @classmethod
    def twin(cls) -> Plan:
        """A plan for the CPU: it runs every line, and its times say nothing."""
        return cls(
            rounds=1, copy_bytes=2 * MIB, piece_bytes=MIB, matmul_size=64, matmuls=2, copies=2, layers=2, experts=8, hidden=64,
            inner=32, top_k=2, prompts=(16,), new=3, own_groups=8, group_tokens=(1, 64), group_slots=(8, 16, 31), ring_visits=20,
            seeds=2, sizes={},
        )  # fmt: skip

    def config(self) -> Qwen3MoeConfig:
        """The configuration of the served model. Its weights are random: routing spreads over all experts."""
        return Qwen3MoeConfig(  # type: ignore[call-arg]  # its stub lacks one
            vocab_size=1024, hidden_size=self.hidden, num_hidden_layers=self.layers, num_attention_heads=16, num_key_value_heads=4,
            head_dim=self.hidden // 16, intermediate_size=self.inner, moe_intermediate_size=self.inner, num_experts=self.experts,
            num_experts_per_tok=self.top_k, max_position_embeddings=2048, norm_topk_prob=True,
        )  # fmt: skip


def absent(name: str, note: str) -> Row:
    """Makes the row of what could not be measured."""
    return Row(name=name, subject=SUBJECT, value=0.0, unit="", note=f"not measured: {note}")


def yes_or_no(name: str, case: str, *, is_so: bool, note: str = "", **parts: float) -> Row:
    """Makes the row of a question."""
    figures = {name: float(value) for name, value in parts.items()}  # a JSON of true and false is none of figures
    return Row(name=name, case=case, subject=SUBJECT, value=float(is_so), unit="(1 is yes)", note=note, parts=figures)
