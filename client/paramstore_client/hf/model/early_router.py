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

FIRST_CHOICE = 840
"""Votes of a token for its first choice; its second has a half of it, its third a third. Of a small trained model, whose router was
run a layer early, the first of four choices was right in 91 % of the guesses that were not in memory, the last in 38 %: the chance
of being wrong falls about so with the rank, and votes add up where chances of being wrong multiply."""

_log = logging.getLogger(__name__)


class EarlyRouter:
    """The router of one layer, for guesses."""

    def __init__(self, gate: nn.Module, experts: int) -> None:
        self._gate = copy.copy(gate)  # another module with the same parameters, whatever they are by then
        self._gate.training = False
        self._experts = experts
        self._is_usable = True

    def votes(self, hidden_TH: Tensor) -> Tensor | None:
        """How likely each expert is to be chosen by one of these tokens at least, [E + 1] on their device, by `FIRST_CHOICE`; the
        last stands for choices that name no expert. None for no guess. Waits for nothing."""
        weight = getattr(self._gate, "weight", None)
        # A weight of another class is a shard, whose use would be a collective call.
        if not self._is_usable or type(weight) not in (nn.Parameter, type(hidden_TH)) or weight.device != hidden_TH.device:  # type: ignore[union-attr]
            return None
        try:
            with torch.no_grad(), _casts_not_kept():
                # The class's own function: hooks of the module record what the model's routers say, and this is not said by it.
                answer = type(self._gate).forward(self._gate, hidden_TH)
            ids_TK = next(part for part in answer if isinstance(part, Tensor) and not part.is_floating_point())
            rank_K = torch.arange(1, ids_TK.shape[-1] + 1, device=ids_TK.device)
            vote_N = (FIRST_CHOICE // rank_K).expand(ids_TK.shape).reshape(-1)
            ids_N = ids_TK.reshape(-1).long()
            ids_N = torch.where((ids_N < 0) | (ids_N >= self._experts), self._experts, ids_N)
            votes_E = torch.zeros(self._experts + 1, dtype=torch.int64, device=ids_N.device)
            return votes_E.scatter_add_(0, ids_N, vote_N)
        except Exception as error:  # noqa: BLE001 - foreign code, called for a guess alone: it must fail no forward
            self._give_up(f"{type(error).__name__}: {error}")
            return None

    def ranked(self, votes_E: Sequence[int]) -> list[int]:
        """The experts that got votes, the likeliest first; [] where others than experts did."""
        if self._is_usable and votes_E[-1]:
            self._give_up("its answer names no experts")
        if not self._is_usable:
            return []
        return sorted((expert for expert, votes in enumerate(votes_E) if votes), key=lambda expert: -votes_E[expert])

    def guess(self, hidden_TH: Tensor) -> list[int]:
        """The experts that the layer will likely choose for these hidden states, the likeliest first; [] for no guess."""
        votes_E = self.votes(hidden_TH)
        return [] if votes_E is None else self.ranked(votes_E.tolist())

    def _give_up(self, reason: str) -> None:
        self._is_usable = False
        _log.info("%s makes no guesses: %s", type(self._gate).__name__, reason)


@contextmanager
def _casts_not_kept() -> Iterator[None]:
    """Autocast keeps casts of weights for later. In torch before 2.11 one made here has no graph, and leaves the router without a
    gradient."""
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
