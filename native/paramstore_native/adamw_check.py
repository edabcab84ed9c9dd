"""Checks whether the native kernel gives torch's bits on this machine, once per process, before it is used.

torch's arithmetic depends on the instructions that its build uses on this CPU (`ATEN_CPU_CAPABILITY=default` fuses no
multiply-add), so only a trial can tell. Values are random bits: denormals, infinities, both zeros and NaN are among them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from paramstore_native.adamw_kernel import Kernel, Span

ELEMENTS = 2048 + 32
"""Elements of one trial: more than one block of the kernel, and a short one."""
Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True, slots=True)
class Trial:
    """One call of the kernel. The options are those of `paramstore.core.optimizers.AdamW`."""

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    last_step: int
    ranks: int
    missed: int
    grad_scale: float
    dtype: str

    @property
    def step_count(self) -> int:
        """Number of steps: the missed ones, and one with the gradient where any rank has one."""
        return self.missed + min(1, self.ranks)


TRIALS = tuple(
    Trial(*options, last_step=last_step, ranks=ranks, missed=missed, grad_scale=grad_scale, dtype=dtype)
    for dtype in ("float32", "bfloat16", "float16")
    for options, last_step, ranks, missed, grad_scale in (
        ((1e-3, (0.9, 0.999), 1e-8, 1e-2), 1, 1, 0, 1.0),
        ((3e-2, (0.9, 0.95), 1e-6, 0.3), 7, 2, 3, 0.37),
        ((1e-4, (0.3, 0.99), 1e-8, 0.0), 5000, 3, 0, 1.7),
        ((1e-2, (0.0, 0.0), 0.0, 0.1), 2, 0, 2, 1.0),
    )
)


def difference(kernel: Kernel) -> str:
    """The first difference between the kernel's results and torch's, in words; empty if there is none."""
    generator = torch.Generator().manual_seed(20)
    for trial in TRIALS:
        if not kernel.serves(trial.dtype):
            continue
        for is_plain in (True, False):
            states, gradients = _values(trial, generator, is_plain=is_plain)
            expected = by_torch(trial, states, gradients)
            found = by_kernel(kernel, trial, states, gradients)
            for name, ours, theirs in zip(("master", "exp_avg", "exp_avg_sq", "param"), found, expected, strict=True):
                if count := count_different(ours, theirs):
                    capability = torch.backends.cpu.get_cpu_capability()
                    return f"{count} of {ELEMENTS} {name} differ from those of torch {torch.__version__} ({capability}) for {trial}"
    return ""


def by_kernel(kernel: Kernel, trial: Trial, states: Tensors, gradients: Tensors) -> Tensors:
    """(master, exp_avg, exp_avg_sq, param) after the trial in the kernel; the inputs stay as they are."""
    made = tuple(state.clone() for state in states)
    param = torch.empty(states[0].numel(), dtype=getattr(torch, trial.dtype))
    span = Span(
        states=tuple(state.data_ptr() for state in made), gradients=tuple(gradient.data_ptr() for gradient in gradients),
        gradient_dtype=trial.dtype, param=param.data_ptr(), param_dtype=trial.dtype, elements=param.numel(),
    )  # fmt: skip
    kernel([span], [trial] * trial.step_count, last_step=trial.last_step, grad_scale=trial.grad_scale)
    return (*made, param)


def by_torch(trial: Trial, states: Tensors, gradients: Tensors) -> Tensors:
    """(master, exp_avg, exp_avg_sq, param) after the trial in torch; the inputs stay as they are."""
    master, exp_avg, exp_avg_sq = (state.clone() for state in states)
    for step, gradient in _gradients_of_steps(trial, gradients):
        torch._fused_adamw_(
            [master], [gradient], [exp_avg], [exp_avg_sq], [], [torch.tensor(float(step))], lr=trial.lr, beta1=trial.betas[0],
            beta2=trial.betas[1], eps=trial.eps, weight_decay=trial.weight_decay, amsgrad=False, maximize=False,
        )  # fmt: skip
    return master, exp_avg, exp_avg_sq, master.to(getattr(torch, trial.dtype))


def count_different(ours: torch.Tensor, theirs: torch.Tensor) -> int:
    """Number of elements with different bits, where not both are NaN."""
    kind = torch.int32 if ours.dtype is torch.float32 else torch.int16
    differ = (ours.view(kind) != theirs.view(kind)) & ~(ours.isnan() & theirs.isnan())
    return int(differ.sum())


def _gradients_of_steps(trial: Trial, gradients: Tensors) -> Iterator[tuple[int, torch.Tensor]]:
    first_step = trial.last_step - trial.step_count + 1
    for step in range(first_step, first_step + trial.missed):
        yield step, torch.zeros(ELEMENTS)
    if gradients:
        total = gradients[0]
        for other in gradients[1:]:
            total = total + other
        if trial.grad_scale != 1.0:
            total = total * trial.grad_scale
        yield trial.last_step, total.float()


def _values(trial: Trial, generator: torch.Generator, *, is_plain: bool) -> tuple[Tensors, Tensors]:
    """States and gradients: plausible ones, or random bits."""
    dtype = getattr(torch, trial.dtype)
    if is_plain:
        states = tuple(torch.randn(ELEMENTS, generator=generator) for _ in range(3))
        gradients = tuple(torch.randn(ELEMENTS, generator=generator).to(dtype) for _ in range(trial.ranks))
        return (states[0], states[1], states[2].square()), gradients
    return (
        tuple(_random_bits(torch.float32, generator) for _ in range(3)),
        tuple(_random_bits(dtype, generator) for _ in range(trial.ranks)),
    )


def _random_bits(dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    data = torch.randint(256, (ELEMENTS * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    return data.view(dtype)
