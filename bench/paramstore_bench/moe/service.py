"""Trains ranks of a job through one daemon, turn by turn with expert parallelism and without, over the same experts.

A turn is a step that is not counted and some that are. A step is a forward and a backward through the layers, `gradient_norm` and
an `apply` that is waited for; its parts begin when all ranks have ended the one before. Bytes and experts are counted where they
pass, on the ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import paramstore as ps
from paramstore.bench.pairs import Sample, sample_pairs
from paramstore.core.key import ExpertKey
from paramstore_bench.moe.found import Compared, check_equal
from paramstore_bench.moe.meeting import greatest, seconds_of, sums
from paramstore_bench.moe.sizes import RANKS, Batch, Sizes, weights_of
from paramstore_client.source import AheadTicket, ArrivingLease, ExpertSource, WeightLease

NORM, LEARNING_RATE = "norm", 1e-4


class CountingSource(ExpertSource):
    """A namespace that counts what passes: experts leased, bytes of gradients pushed."""

    def __init__(self, namespace: ps.Namespace) -> None:
        self.namespace = namespace
        self.leased = 0
        self.pushed_bytes = 0

    @property
    def schema(self) -> ps.Schema:
        return self.namespace.schema

    @property
    def layers(self) -> Sequence[int]:
        return self.namespace.layers

    @property
    def experts(self) -> int:
        return self.namespace.experts

    @property
    def lease_slots(self) -> int:
        return self.namespace.lease_slots

    def acquire(self, keys: Sequence[ExpertKey], part: str = "param", timeout_s: float | None = None) -> WeightLease:
        self.leased += len(keys)
        return self.namespace.acquire(keys, part, timeout_s)

    def acquire_arriving(
        self, keys: Sequence[ExpertKey], timeout_s: float | None = None, *, may_pass: bool = False
    ) -> ArrivingLease:
        self.leased += len(keys)
        return self.namespace.acquire_arriving(keys, timeout_s, may_pass=may_pass)

    def prefetch(self, keys: Sequence[ExpertKey], part: str = "param") -> AheadTicket:
        return self.namespace.prefetch(keys, part)

    def push(self, gradients: Mapping[ExpertKey, Mapping[str, Tensor]]) -> Any:
        self.pushed_bytes += sum(gradient.nbytes for fields in gradients.values() for gradient in fields.values())
        return self.namespace.push(gradients)


class Trainer:
    """The layers of one rank, which train on batches drawn anew for each step."""

    def __init__(self, namespace: ps.Namespace, sizes: Sizes, parallel: ps.moe.ExpertParallel | None) -> None:
        self.source = CountingSource(namespace)
        group = ps.nn.ExpertSchedule()
        self._layers = [
            ps.nn.StoredExperts(self.source, layer, group=group, parallel=parallel) for layer in range(sizes.layers)
        ]
        self._sizes = sizes

    def turn(self, number: int) -> Sample:
        """Makes steps; gives the tokens of all ranks, seconds of the steps and of their parts, and what was counted a step."""
        self._step(number, 0)
        before = self.source.pushed_bytes, self.source.leased
        steps = [self._step(number, 1 + place) for place in range(self._sizes.passes)]
        passes_s, update_s = (sum(parts) for parts in zip(*steps, strict=True))
        pushed_bytes, leased = sums([self.source.pushed_bytes - before[0], self.source.leased - before[1]])
        parts = {
            "forward_backward_s": passes_s, "update_s": update_s, "pushed_bytes": pushed_bytes / len(steps),
            "leased": leased / len(steps),
        }  # fmt: skip
        return Sample(RANKS * self._sizes.tokens * len(steps), passes_s + update_s, parts=parts)

    def passed(self, number: int) -> Tensor:
        """What comes of a forward, after the backward."""
        batch = Batch.draw(self._sizes, rank=dist.get_rank(), number=number)
        y = batch.x.clone().requires_grad_()
        for layer, ids, gates in zip(self._layers, batch.ids, batch.gates, strict=True):
            y = y + layer(y, ids, gates)
        y.backward(batch.grad)  # type: ignore[no-untyped-call]  # torch left it so
        return y.detach()

    def _step(self, number: int, place: int) -> list[float]:
        namespace = self.source.namespace

        def update() -> None:
            namespace.gradient_norm()
            namespace.apply(ps.AdamW(lr=LEARNING_RATE)).wait()

        return seconds_of(partial(self.passed, abs(number) * (1 + self._sizes.passes) + place), update)


def through_a_daemon(sizes: Sizes, *, address: str) -> Compared:
    """Compares training with expert parallelism and without. Raises StepMismatch where outputs or norms differ."""
    schema = schema_of(sizes)
    with ps.connect(address) as store:
        namespace = store.create_namespace("moe", schema, layers=sizes.layers, experts=sizes.experts, **ps.training.launched())
        with namespace:
            namespace.initialize(lambda key: weights_of(sizes, key[1], layer=key[0]))
            namespace.commit(0).wait()
            spread, whole = (Trainer(namespace, sizes, parallel) for parallel in (ps.moe.ExpertParallel(), None))
            differences = differences_of(spread, whole)
            check_equal(differences)
            pairs = sample_pairs(sizes.rounds, spread.turn, whole.turn)
            dist.barrier()
    without = {name: [pair.limit.parts[name] for pair in pairs.pairs] for name in ("pushed_bytes", "leased")}
    return Compared(pairs, differences, {name: torch.tensor(values).median().item() for name, values in without.items()})


def schema_of(sizes: Sizes) -> ps.Schema:
    """The schema of the experts."""
    shapes = {"gate_up": (2 * sizes.inner, sizes.width), "down": (sizes.width, sizes.inner)}
    return ps.adamw_schema(shapes, param_dtype=torch.float32)


def differences_of(spread: Trainer, whole: Trainer) -> dict[str, float]:
    """By how much outputs and gradient norms of one batch differ. Nothing is pending on return."""
    found = []
    for trainer in (spread, whole):
        y, namespace = trainer.passed(0), trainer.source.namespace
        dist.barrier()
        found.append((y, namespace.gradient_norm()))
        namespace.abort()
    (mine, my_norm), (theirs, their_norm) = found
    return {
        "y": greatest(float((mine - theirs).abs().max() / theirs.abs().max())),
        NORM: greatest(abs(my_norm - their_norm) / their_norm),
    }
