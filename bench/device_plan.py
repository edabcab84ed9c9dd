"""Decides how much `bench_device.py` measures; makes the row of what it could not measure."""

from __future__ import annotations

from dataclasses import dataclass

import torch

import paramstore as ps
from paramstore.bench.report.rows import SUBJECT, Row

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Plan:
    """Amounts of one run. copy_bytes: of one timed copy. The model has `layers` x `experts` in bf16 and computes `tokens` `steps`
    times in one sample; the ring has room for `ring_layers` of its layers."""

    copy_bytes: int = 256 * MIB
    rounds: int = 7
    sync_layers: int = 48
    layers: int = 8
    experts: int = 16
    hidden: int = 1024
    inner: int = 2048
    tokens: int = 16
    steps: int = 16
    ring_layers: int = 3

    @classmethod
    def quick(cls) -> Plan:
        """A plan of about a minute: figures to see that all is well, not to quote."""
        return cls(copy_bytes=64 * MIB, rounds=3, layers=4, experts=8, hidden=512, inner=1024, steps=4, ring_layers=2)

    @property
    def schema(self) -> ps.Schema:
        shapes = {"gate_up": (2 * self.inner, self.hidden), "down": (self.hidden, self.inner)}
        return ps.param_schema({name: (shape, torch.bfloat16) for name, shape in shapes.items()})

    @property
    def model_bytes(self) -> int:
        return self.layers * self.experts * self.schema.record_bytes


def absent(name: str, note: str) -> Row:
    """Makes the row of what could not be measured."""
    return Row(name=name, subject=SUBJECT, value=0.0, unit="", note=f"not measured: {note}")
