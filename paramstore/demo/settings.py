"""Sizes of the demo: one frozen value for the full run and one for `--quick`; every other module reads it."""

from __future__ import annotations

from dataclasses import dataclass

from paramstore.errors import ConfigError

STATE_BYTES_PER_PARAMETER = 12
"""Bytes of training state per parameter: fp32 master and two Adam moments, the 12·S of SE-MoE (arXiv 2205.10034, section 3.1)."""

FULL_STEPS, QUICK_STEPS = 60, 30
"""Training steps unless told otherwise, and the fewest: the kill comes shortly before them."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of the byte-level MoE transformer. inner: the experts' inner width (SwiGLU)."""

    layers: int
    experts: int
    hidden: int
    inner: int
    heads: int
    context: int
    top_k: int = 2
    vocabulary: int = 256

    @property
    def parameters_per_expert(self) -> int:
        return 3 * self.hidden * self.inner

    @property
    def expert_count(self) -> int:
        return self.layers * self.experts

    @property
    def expert_parameters(self) -> int:
        return self.expert_count * self.parameters_per_expert

    @property
    def expert_state_bytes(self) -> int:
        return self.expert_parameters * STATE_BYTES_PER_PARAMETER


@dataclass(frozen=True, slots=True)
class DemoSettings:
    """One run of the demo.

    reference_steps: how many of the first steps are repeated with everything in memory.
    kill_step: the daemon is killed after it; training resumes at the last commit before it.
    threads: for computing; the daemon has its own besides.
    budget_share: the host budget as a share of the experts' training state.
    """

    shape: ModelShape
    batch: int
    steps: int
    commit_every: int
    kill_step: int
    reference_steps: int
    corpus_bytes: int
    generated_bytes: int
    ring_slots: int
    threads: int
    seed: int = 0
    learning_rate: float = 4e-3
    expert_learning_rate: float = 1e-3
    warmup_steps: int = 6
    final_lr_share: float = 0.3
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.01
    balance_weight: float = 0.001
    budget_share: float = 1 / 8
    reader_slots: int | None = None

    @property
    def tokens_per_step(self) -> int:
        return self.batch * self.shape.context

    @property
    def host_budget_bytes(self) -> int:
        return int(self.shape.expert_state_bytes * self.budget_share)

    @property
    def resume_step(self) -> int:
        """Number of the last committed step before the kill."""
        return self.kill_step // self.commit_every * self.commit_every


def full(*, steps: int = FULL_STEPS, seed: int = 0) -> DemoSettings:
    """The full demo: 6 layers x 32 experts, 56.6 M expert parameters, 2,048 tokens a step. Raises ConfigError for too few steps."""
    return DemoSettings(
        shape=ModelShape(layers=6, experts=32, hidden=256, inner=384, heads=4, context=256),
        batch=8,
        steps=_at_least(steps, FULL_STEPS),
        commit_every=10,
        kill_step=57,
        reference_steps=10,
        corpus_bytes=22_000_000,
        generated_bytes=160,
        ring_slots=3,
        threads=2,
        seed=seed,
    )


def quick(*, steps: int = QUICK_STEPS, seed: int = 0) -> DemoSettings:
    """The quick demo: 4 layers x 16 experts of a tenth of the size, under a minute. Raises ConfigError if `steps` is too few."""
    return DemoSettings(
        shape=ModelShape(layers=4, experts=16, hidden=128, inner=192, heads=4, context=128),
        batch=8,
        steps=_at_least(steps, QUICK_STEPS),
        commit_every=10,
        kill_step=27,
        reference_steps=10,
        corpus_bytes=4_000_000,
        generated_bytes=80,
        ring_slots=2,
        reader_slots=2,  # of 7 slots: by default readers are promised none of so few
        threads=1,
        seed=seed,
    )


def _at_least(steps: int, least: int) -> int:
    if steps < least:
        raise ConfigError(f"--steps {steps}: the demo needs at least {FULL_STEPS} to tell its story, or {QUICK_STEPS} with --quick")
    return steps
