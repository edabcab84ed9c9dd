"""Runs the next layer's router early, on the input of this layer's experts: a guess of which experts it will choose.

Attention and this layer's experts change the hidden states less than routers tell apart: of a small trained model 84 % of the true
experts were guessed so. A guess is never a result, and changes none: a router that cannot be found or called alone makes none, and
one that adds noise in training adds none to a guess, which would take random numbers from the model.
"""

# T tokens, H hidden, K experts per token, E experts
# ruff: noqa: N803, N806 - shape suffixes, as the legend says

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from paramstore_client.hf.model.layout import ExpertLayout

_log = logging.getLogger(__name__)


class EarlyRouter:
    """The router of one layer, for guesses."""

    def __init__(self, gate: nn.Module, experts: int) -> None:
        self._gate = copy.copy(gate)  # another module with the same parameters, whatever they are by then
        self._gate.training = False
        self._experts = experts
        self._is_usable = True

    def counts(self, hidden_TH: Tensor) -> Tensor | None:
        """How many of these tokens each expert would get, [E + 1] on their device, and last how many choices name no expert. None
        for no guess. Waits for nothing."""
        weight = getattr(self._gate, "weight", None)
        # A weight of another class is a shard, whose use would be a collective call.
        if not self._is_usable or type(weight) not in (nn.Parameter, type(hidden_TH)) or weight.device != hidden_TH.device:  # type: ignore[union-attr]
            return None
        try:
            with torch.no_grad(), _casts_not_kept():
                # The class's own function: hooks of the module record what the model's routers say, and this is not said by it.
                answer = type(self._gate).forward(self._gate, hidden_TH)
            ids_TK = next(part for part in answer if isinstance(part, Tensor) and not part.is_floating_point())
            ids_N = ids_TK.reshape(-1).long()
            ids_N = torch.where((ids_N < 0) | (ids_N >= self._experts), self._experts, ids_N)
            counts_E = torch.zeros(self._experts + 1, dtype=torch.int64, device=ids_N.device)
            return counts_E.scatter_add_(0, ids_N, torch.ones_like(ids_N))
        except Exception as error:  # noqa: BLE001 - foreign code, called for a guess alone: it must fail no forward
            self._give_up(f"{type(error).__name__}: {error}")
            return None

    def ranked(self, counts_E: Sequence[int]) -> list[int]:
        """The experts of `counts`, those of most tokens first; [] where it names others than experts."""
        if self._is_usable and counts_E[-1]:
            self._give_up("its answer names no experts")
        if not self._is_usable:
            return []
        return sorted((expert for expert, count in enumerate(counts_E) if count), key=lambda expert: -counts_E[expert])

    def guess(self, hidden_TH: Tensor) -> list[int]:
        """The experts that the layer will likely choose for these hidden states, those of most tokens first; [] for no guess."""
        counts_E = self.counts(hidden_TH)
        return [] if counts_E is None else self.ranked(counts_E.tolist())

    def _give_up(self, reason: str) -> None:
        self._is_usable = False
        _log.info("%s makes no guesses: %s", type(self._gate).__name__, reason)


@contextmanager
def _casts_not_kept() -> Iterator[None]:
    """Autocast keeps casts of weights for later: one made here has no graph, and would leave the router without a gradient."""
    was_enabled = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(was_enabled)


def early_routers(model: nn.Module, layout: ExpertLayout) -> Mapping[int, EarlyRouter]:
    """The routers by layer, where one was found: the one module beside the experts whose weight has a row for each expert, and that
    takes hidden states alone."""
    found = {}
    for layer, path in layout.modules.items():
        block = model.get_submodule(path.rpartition(".")[0])
        gates = [child for child in block.children() if _is_router(child, layout.experts)]
        if len(gates) == 1:
            found[layer] = EarlyRouter(gates[0], layout.experts)
    return found


def _is_router(module: nn.Module, experts: int) -> bool:
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor) or weight.dim() != 2 or len(weight) != experts:
        return False
    needed = [one for one in inspect.signature(type(module).forward).parameters.values() if one.default is one.empty]
    return len(needed) == 2  # self, hidden states
