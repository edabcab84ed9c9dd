"""Options of the optimizers that the daemon runs. The update itself is in `paramstore.optim`."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite

from paramstore.errors import ConfigError


@dataclass(frozen=True, slots=True)
class AdamW:
    """Decoupled weight decay Adam; names, defaults and arithmetic of `torch.optim.AdamW(fused=True)`.

    Raises ConfigError on a value that torch refuses too.
    """

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 1e-2

    def __post_init__(self) -> None:
        beta1, beta2 = self.betas
        for name, value in (("lr", self.lr), ("eps", self.eps), ("weight_decay", self.weight_decay)):
            if not (isfinite(value) and value >= 0):
                raise ConfigError(f"AdamW {name}={value}: must be finite and not negative")
        if not (0.0 <= beta1 < 1.0 and 0.0 <= beta2 < 1.0):
            raise ConfigError(f"AdamW betas={self.betas}: each must be in [0, 1)")
