"""Runs the same training twice: an unmodified model of transformers in memory, and one from its checkpoint with stored experts.

`Trial` does what a user does: `ps.hf.from_pretrained` imports a checkpoint, a fused AdamW is attached, a real daemon
holds the states in a budget far below them. The store is in debug mode, so that buffers of freed experts hold NaN and a lease
that is used after its end raises. Weights and states of the two models are compared element by element.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import paramstore as ps
from paramstore.core.key import ExpertKey
from paramstore_client.hf.compat import modeling
from paramstore_client.hf.model.layout import ExpertLayout, find_layout
from paramstore_testkit.training.moe_families import families, modeling_class, tiny_config
from paramstore_testkit.training.saved_models import class_of

EXPERTS = 16
SHORT = (6, 10, 4, 8, 24)
"""Bytes of text in each step, in turn. With three experts a token, most of these steps leave experts without any token."""
LEARNING_RATE, WEIGHT_DECAY = 3e-3, 0.1
ADOPT_EVERY = 4
SENTINEL = "paramstore.sentinel"
STATES = ("exp_avg", "exp_avg_sq")

Records = dict[ExpertKey, dict[str, Tensor]]
"""Fields by key, as `Namespace.read` names them."""

FAMILIES = ("mixtral", "qwen3_moe", "olmoe", "deepseek_v3", "gpt_oss")
_SIZES = {
    **dict.fromkeys(("hidden_size", "intermediate_size", "moe_intermediate_size"), 128), "head_dim": 32, "num_hidden_layers": 3,
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), EXPERTS),
    **dict.fromkeys(("vocab_size", "max_position_embeddings"), 256),
}  # fmt: skip
"""Sizes that make a tiny config so large that its states exceed a daemon's least budget several times."""


@dataclass(slots=True)
class Difference:
    """Distance of our tensors from those of the reference, over everything that was `add`ed.

    unequal: elements with other bits, of `elements`. largest: the greatest absolute difference, in `at_scale` times the greatest
    magnitude of its tensor. roundings: the same in units of the reference dtype's spacing at each element.
    """

    elements: int = 0
    unequal: int = 0
    largest: float = 0.0
    largest_share: float = 0.0
    roundings: float = 0.0
    _far: int = 0

    def add(self, ours: Tensor, reference: Tensor, *, spacing_of: torch.dtype | None = None) -> None:
        """Compares tensors of equal shapes and dtypes. spacing_of: dtype whose spacing `roundings` count; default their own."""
        assert (ours.shape, ours.dtype) == (reference.shape, reference.dtype), (ours.shape, ours.dtype, reference.dtype)
        unit = torch.finfo(spacing_of or reference.dtype).eps
        ours, reference = ours.detach().double(), reference.detach().double()
        away = (ours - reference).abs().nan_to_num(torch.inf)
        self.elements += away.numel()
        self.unequal += int((away > 0).sum())
        scale = torch.maximum(ours.abs(), reference.abs())
        spacing = torch.exp2(torch.floor(torch.log2(scale.clamp_min(torch.finfo(torch.float32).tiny)))) * unit
        in_roundings = away / spacing
        self.largest = max(self.largest, float(away.max()))
        self.largest_share = max(self.largest_share, float(away.max() / scale.max().clamp_min(1e-300)))
        self.roundings = max(self.roundings, float(in_roundings.max()))
        self._far += int((in_roundings > 1.0).sum())

    @property
    def is_zero(self) -> bool:
        return self.unequal == 0

    def figures(self) -> dict[str, float]:
        """Figures for a report."""
        return {
            "elements": self.elements, "unequal": self.unequal, "largest": self.largest, "largest_share": self.largest_share,
            "roundings": self.roundings, "beyond_one_rounding": self._far / max(1, self.elements),
        }  # fmt: skip


class Trained:
    """One model in training: the common part of both sides."""

    def __init__(self, model: Any, optimizers: Sequence[torch.optim.Optimizer], *, steps: int) -> None:
        self.model = model
        self.optimizers = optimizers
        self._rates = [torch.optim.lr_scheduler.LinearLR(one, 1.0, 0.1, total_iters=steps) for one in optimizers]

    def backward(self, ids: Tensor) -> Tensor:
        """Computes the loss on these bytes [B, T], and its gradients."""
        loss = self.model(ids, labels=ids).loss
        loss.backward()
        return loss.detach()  # type: ignore[no-any-return]

    def clip(self, max_norm: float) -> float:
        """Clips the gradients; gives the total norm before."""
        return float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), max_norm))

    def step(self) -> None:
        """Updates everything, and drops the gradients."""
        for optimizer, rate in zip(self.optimizers, self._rates, strict=True):
            optimizer.step()
            rate.step()
            optimizer.zero_grad()

    @torch.no_grad()
    def logits(self, ids: Tensor) -> Tensor:
        return self.model.eval()(ids).logits  # type: ignore[no-any-return]


class Reference(Trained):
    """The unmodified model, all in memory, with dense AdamW over everything.

    has_masters: the optimizer has fp32 masters of experts, as a store does, and the model their values in its own dtype.
    """

    def __init__(self, path: Path, *, kernel: str, dtype: torch.dtype, steps: int, has_masters: bool) -> None:
        model: Any = class_of(path).from_pretrained(path, experts_implementation=kernel, dtype=dtype)
        align(model.train())
        self.layout = find_layout(model)
        self.parameters = _expert_parameters(model, self.layout)
        self.masters = dict(self.parameters)
        if has_masters:
            self.masters = {name: nn.Parameter(parameter.detach().float()) for name, parameter in self.parameters.items()}
        mine = {id(parameter) for parameter in self.parameters.values()}
        dense = [parameter for parameter in model.parameters() if id(parameter) not in mine]
        sparse = list(self.masters.values())
        optimizers = [_adamw(dense), _adamw(sparse)] if has_masters else [_adamw([*dense, *sparse])]
        super().__init__(model, optimizers, steps=steps)

    def step(self) -> None:
        for name, master in self.masters.items():
            parameter = self.parameters[name]
            if master is not parameter:
                assert parameter.grad is not None, "a layer without tokens"
                master.grad, parameter.grad = parameter.grad.float(), None
        super().step()
        with torch.no_grad():
            for name, master in self.masters.items():
                if master is not self.parameters[name]:
                    self.parameters[name].copy_(master)

    def idle(self) -> int:
        """Counts the experts whose present gradients are all zero or missing."""
        count = 0
        for path in self.layout.modules.values():
            gradients = [self.parameters[f"{path}.{tensor.name}"].grad for tensor in self.layout.tensors]
            experts = range(self.layout.experts)
            count += sum(not any(gradient is not None and gradient[e].any() for gradient in gradients) for e in experts)
        return count

    def record(self, key: ExpertKey) -> dict[str, Tensor]:
        """Gives the expert's state by the names of a record's fields."""
        found = {}
        for tensor in self.layout.tensors:
            name = f"{self.layout.modules[key[0]]}.{tensor.name}"
            master = self.masters[name]
            state = self.optimizers[-1].state[master]
            found[f"master/{tensor.name}"] = master.detach()[key[1]]
            found.update({f"{kind}/{tensor.name}": state[kind][key[1]] for kind in STATES})
            found[tensor.name] = self.parameters[name].detach()[key[1]]
        return found

    @torch.no_grad()
    def adopt(self, ours: Stored, records: Records, *, steps: int) -> None:
        """Continues from our weights and states, which have had `steps` steps."""
        theirs, mine = ours.optimizers[0], dict(self.model.named_parameters())
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = theirs.param_groups[0]["lr"]
                for parameter in group["params"]:
                    zeros = {kind: torch.zeros_like(parameter) for kind in STATES}
                    optimizer.state[parameter] = {"step": torch.tensor(float(steps)), **zeros}
        for name, parameter in ours.model.named_parameters():
            if name != SENTINEL and parameter.requires_grad:
                mine[name].copy_(parameter)
                for kind in STATES if parameter in theirs.state else ():
                    self.optimizers[0].state[mine[name]][kind].copy_(theirs.state[parameter][kind])
        for key, record in records.items():
            for name, value in self.record(key).items():
                value.copy_(record[name])


class Stored(Trained):
    """The model of the checkpoint with its experts in a store, through `ps.hf`."""

    def __init__(self, path: Path, *, store: ps.Store, name: str, kernel: str, dtype: torch.dtype, steps: int) -> None:
        model = ps.hf.from_pretrained(
            class_of(path), path, store=store, mode="train", name=name, experts_implementation=kernel, dtype=dtype
        )
        align(model.train())
        optimizer = _adamw(parameter for parameter in model.parameters() if parameter.requires_grad)
        self.experts = ps.hf.experts(model)
        self.experts.attach(optimizer)
        self.namespace = self.experts.namespace
        super().__init__(model, [optimizer], steps=steps)

    def records(self) -> Records:
        """Reads every expert's whole state, with missed steps made."""
        self.experts.settle()
        keys = self.namespace.keys()
        return {key: dict(self.namespace.read(key)) for key in keys}


@dataclass(slots=True)
class Comparison:
    """Ours beside one reference. losses, norms: (ours, the reference's) per step, norms before clipping."""

    reference: Reference
    losses: list[tuple[float, float]] = field(default_factory=list)
    norms: list[tuple[float, float]] = field(default_factory=list)
    differences: dict[str, Difference] = field(default_factory=dict)

    def compare(self, ours: Stored, records: Records) -> None:
        """Adds to `differences`: dense weights, and every expert's state and weights where both keep them in one dtype."""
        expected = dict(self.reference.model.named_parameters())
        for name, parameter in ours.model.named_parameters():
            if name != SENTINEL:
                self.difference("dense weights").add(parameter, expected[name])
        for key, record in records.items():
            for name, value in self.reference.record(key).items():
                if record[name].dtype == value.dtype:
                    kind = name.partition("/")[0] if "/" in name else "param"
                    self.difference(f"experts' {kind}").add(record[name], value)

    def difference(self, name: str) -> Difference:
        return self.differences.setdefault(name, Difference())

    @property
    def is_equal(self) -> bool:
        """Whether every loss, logit, weight and state has the reference's bits."""
        return self.loss_difference == 0.0 and all(found.is_zero for found in self.differences.values())

    @property
    def loss_difference(self) -> float:
        return max(abs(ours - theirs) for ours, theirs in self.losses)

    def coefficient_difference(self, max_norm: float) -> float:
        """The greatest relative difference of the factors on the gradients (torch.nn.utils.clip_grads_with_norm_)."""
        pairs = [(min(1.0, max_norm / (ours + 1e-6)), min(1.0, max_norm / (theirs + 1e-6))) for ours, theirs in self.norms]
        return max(abs(ours - theirs) / theirs for ours, theirs in pairs)


@dataclass(slots=True)
class Trial:
    """One run of ours beside any number of references. idle: experts without a token, per step.

    The reference named `adopting` makes only every ADOPT_EVERY-th step, from our weights and states before it: so a difference
    comes from that step alone.
    """

    ours: Stored
    comparisons: dict[str, Comparison]
    max_norm: float | None = None
    adopting: str = ""
    idle: list[int] = field(default_factory=list)

    def run(self, batches: Sequence[Tensor], *, commit_every: int = 5) -> None:
        """Trains all on `batches`, [B, T] each."""
        for number, ids in enumerate(batches, start=1):
            beside = {name: found for name, found in self.comparisons.items() if name != self.adopting or number % ADOPT_EVERY == 0}
            if self.adopting in beside:
                beside[self.adopting].reference.adopt(self.ours, self.ours.records(), steps=number - 1)
            state = torch.get_rng_state()  # some gates draw random numbers
            loss = float(self.ours.backward(ids))
            norm = self.ours.clip(self.max_norm) if self.max_norm is not None else 0.0
            self.ours.step()
            idle = 0
            for comparison in beside.values():
                reference = comparison.reference
                torch.set_rng_state(state)
                comparison.losses.append((loss, float(reference.backward(ids))))
                idle = reference.idle()
                if self.max_norm is not None:
                    comparison.norms.append((norm, reference.clip(self.max_norm)))
                reference.step()
            self.idle.append(idle)
            if number % commit_every == 0:
                self.ours.experts.commit(number)
        self.ours.experts.settle()

    def compare(self, ids: Tensor) -> None:
        """Compares logits on `ids`, [B, T], and all weights and states, at the end."""
        logits, records = self.ours.logits(ids), self.ours.records()
        for comparison in self.comparisons.values():
            comparison.difference("logits").add(logits, comparison.reference.logits(ids))
            comparison.compare(self.ours, records)


def config_of(family: str) -> Any:
    """Makes a config of `family`: 48 experts with 49,152 parameters each, and bytes as its vocabulary."""
    changes = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]} if family == "gpt_oss" else {}
    return tiny_config(family, sizes=_SIZES, intermediate_size=128, **changes)


def save_checkpoint(family: str, directory: Path, *, dtype: torch.dtype, seed: int) -> Path:
    """Saves the unmodified model with the weights that it begins with, as its own `save_pretrained` writes it."""
    torch.manual_seed(seed)
    modeling.build(modeling_class(families()[family]), config_of(family), dtype=dtype).save_pretrained(directory)
    return directory


def batches_of(text: Tensor, *, steps: int, seed: int) -> list[Tensor]:
    """Draws windows of `text`, uint8, as [1, T] int64 with the lengths of SHORT."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for number in range(steps):
        length = SHORT[number % len(SHORT)]
        start = int(torch.randint(text.numel() - length, (1,), generator=generator))
        found.append(text[start : start + length].long()[None])
    return found


def align(model: nn.Module) -> None:
    """Gives the weights memory of torch's own: mapped from a file they begin at any address, which changes MKL's roundings."""
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()


def _adamw(parameters: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(list(parameters), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, fused=True)


def _expert_parameters(model: nn.Module, layout: ExpertLayout) -> Mapping[str, nn.Parameter]:
    """Finds parameters of experts by name, [EXPERTS, ...] each."""
    names = [f"{path}.{tensor.name}" for path in layout.modules.values() for tensor in layout.tensors]
    return {name: model.get_parameter(name) for name in names}
