"""One training loop for two places of the experts: the store, or this process's memory.

Everything but the experts' place is the same code on the same values in the same order, so that losses and weights can
be compared bit for bit: equal batches, equal dense AdamW, equal learning rates, and `StoredExperts` beside
`ResidentExperts`. An expert that got no token has no gradient and is not touched, in either.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
import xxhash
from torch import Tensor, nn
from torch.nn import functional

import paramstore as ps
from paramstore.core.key import ExpertKey
from paramstore.demo.batches import Batch, BatchSampler
from paramstore.demo.corpus import Corpus
from paramstore.demo.model import ByteTransformer, dense_parameters, expert_fields, initial_expert
from paramstore.demo.settings import DemoSettings, ModelShape
from paramstore.errors import CorruptRecord


class ExpertPlace(Protocol):
    """The place of a trainer's experts, which also updates them."""

    def layer(self, layer: int) -> nn.Module:
        """The module that computes one layer's experts."""
        ...

    def update(self, options: ps.AdamW) -> None:
        """Consumes the gradients of the last backward; the next forward sees the result."""
        ...

    def digests(self) -> dict[ExpertKey, str]:
        """A 128-bit checksum of every expert's weights."""
        ...


class StoredPlace:
    """Experts in the store. Owner of the schedule of prefetches."""

    def __init__(self, namespace: ps.Namespace) -> None:
        self.namespace = namespace
        self._schedule = ps.nn.ExpertSchedule()

    def layer(self, layer: int) -> nn.Module:
        return ps.nn.StoredExperts(self.namespace, layer, group=self._schedule)

    def update(self, options: ps.AdamW) -> None:
        # Waiting costs nothing: the next forward starts with the layer that is updated last.
        self.namespace.apply(options).wait()

    def digests(self) -> dict[ExpertKey, str]:
        keys = list(self.namespace.space)
        room = max(1, self.namespace.lease_slots // 2)
        found: dict[ExpertKey, str] = {}
        for start in range(0, len(keys), room):
            part = keys[start : start + room]
            with self.namespace.acquire(part) as lease:
                found.update((key, _digest(lease[key])) for key in part)
        return found


class ResidentPlace:
    """Experts as ordinary parameters, updated by torch's own fused AdamW: the reference."""

    def __init__(self, shape: ModelShape, *, seed: int) -> None:
        self._layers = [
            ps.nn.ResidentExperts([initial_expert(shape, (layer, expert), seed=seed) for expert in range(shape.experts)])
            for layer in range(shape.layers)
        ]
        parameters = [value for module in self._layers for value in module.parameters()]
        self.optimizer = torch.optim.AdamW(parameters, fused=True)

    def layer(self, layer: int) -> nn.Module:
        return self._layers[layer]

    def update(self, options: ps.AdamW) -> None:
        _step(self.optimizer, options)

    def digests(self) -> dict[ExpertKey, str]:
        return {
            (layer, expert): _digest(dict(fields.items()))  # type: ignore[operator]
            for layer, module in enumerate(self._layers)
            for expert, fields in enumerate(module.weights)
        }


@dataclass(frozen=True, slots=True)
class StepResult:
    """Figures of one step. loss: mean cross-entropy in nats a byte."""

    step: int
    loss: float


class Trainer:
    """A model in training. Owner of the dense weights, their optimizer, the data position and the step count.

    routed_tokens: [layers, experts], number of tokens that went to each expert since this trainer began or was restored.
    """

    def __init__(self, settings: DemoSettings, corpus: Corpus, place: ExpertPlace) -> None:
        self.settings = settings
        self.step = 0
        self.routed_tokens = torch.zeros(settings.shape.layers, settings.shape.experts, dtype=torch.int64)
        self.model = ByteTransformer(settings.shape, place.layer, seed=settings.seed)
        self.model.set_byte_frequencies(corpus.byte_frequencies())
        self._place = place
        self._dense = dense_parameters(self.model)
        self._optimizer = torch.optim.AdamW(self._dense.values(), fused=True)
        self._sampler = BatchSampler(
            corpus, batch=settings.batch, context=settings.shape.context, seed=settings.seed + 1
        )

    def train_step(self) -> StepResult:
        """Trains on one batch: forward, backward, both updates."""
        loss, balance = _losses(self.model, self._sampler.draw())
        (loss + self.settings.balance_weight * balance).backward()  # type: ignore[no-untyped-call]
        self.step += 1
        self.routed_tokens += self.model.routed_tokens()
        _step(self._optimizer, adamw_options(self.settings, self.step, lr=self.settings.learning_rate))
        self._place.update(adamw_options(self.settings, self.step, lr=self.settings.expert_learning_rate))
        return StepResult(self.step, loss.item())

    @torch.no_grad()
    def evaluate(self, batches: list[Batch]) -> float:
        """Mean loss of `batches`, in nats a byte."""
        return sum(_losses(self.model, batch)[0].item() for batch in batches) / len(batches)

    def dense_state(self) -> dict[str, Tensor]:
        """All tensors of this trainer that are not in the store, by names that a checkpoint can hold."""
        tensors: dict[str, Tensor] = {f"model/{name}": value for name, value in self._dense.items()}
        for name, value in self._dense.items():
            tensors |= {f"optimizer/{name}/{field}": state for field, state in self._optimizer.state[value].items()}
        tensors |= {f"data/{name}": value for name, value in self._sampler.state().items()}
        return {**tensors, "random/torch": torch.get_rng_state(), "step": torch.tensor(self.step)}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Goes on from a `dense_state`. Raises CorruptRecord if it is of another model."""
        try:
            with torch.no_grad():
                for name, value in self._dense.items():
                    value.copy_(tensors[f"model/{name}"])
        except (KeyError, RuntimeError) as error:
            raise CorruptRecord(f"the dense checkpoint is of another model: {error}") from error
        state = {index: _fields(tensors, f"optimizer/{name}/") for index, name in enumerate(self._dense)}
        self._optimizer.load_state_dict({**self._optimizer.state_dict(), "state": state})
        self._sampler.restore(_fields(tensors, "data/"))
        torch.set_rng_state(tensors["random/torch"])
        self.step = int(tensors["step"])
        self.routed_tokens.zero_()


def expert_schema(shape: ModelShape) -> ps.Schema:
    """Schema of the experts. Forward computes with the fp32 master weights themselves, so that nothing is rounded on the way."""
    return ps.adamw_schema(expert_fields(shape), param_dtype=torch.float32)


def adamw_options(settings: DemoSettings, step: int, *, lr: float) -> ps.AdamW:
    """Options of one step: a warm-up of the learning rate, then a straight line down to `final_lr_share`."""
    warm = min(1.0, step / settings.warmup_steps)
    fall = 1.0 - (1.0 - settings.final_lr_share) * min(1.0, step / settings.steps)
    return ps.AdamW(lr=lr * warm * fall, betas=settings.betas, weight_decay=settings.weight_decay)


@contextmanager
def repeatable(*, threads: int) -> Iterator[None]:
    """Makes torch's results depend on nothing but the inputs meanwhile. threads: fixed, since sums depend on their number."""
    threads_before, is_strict = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.set_num_threads(threads_before)
        torch.use_deterministic_algorithms(is_strict)


def _losses(model: ByteTransformer, batch: Batch) -> tuple[Tensor, Tensor]:
    logits, balance = model(batch.input_BT)
    return functional.cross_entropy(logits.flatten(0, 1), batch.target_BT.flatten()), balance


def _step(optimizer: torch.optim.AdamW, options: ps.AdamW) -> None:
    """Makes one update with these options; then no parameter has a gradient."""
    for group in optimizer.param_groups:
        group.update(lr=options.lr, betas=options.betas, eps=options.eps, weight_decay=options.weight_decay)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def _fields(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def _digest(fields: Mapping[str, Tensor]) -> str:
    digest = xxhash.xxh3_128()
    for name in sorted(fields):
        digest.update(fields[name].detach().numpy().tobytes())
    return digest.hexdigest()
