"""Places experts anew between two steps: all ranks agree on where each expert of each layer lies, or nothing changes.

Experts of one node are all in one namespace: nothing is copied, the next forward takes its leases elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress

import torch
from xxhash import xxh3_64_intdigest

from paramstore.core.balancing import Choice, choose_placement
from paramstore.core.placement import Placement
from paramstore.errors import ConfigError, ParamStoreError, StepMismatch
from paramstore_client.moe.exchange import Exchange
from paramstore_client.moe.header import Header, Phase, check_told, messages, refusal
from paramstore_client.moe.parallel_layer import ParallelLayer

Layers = Mapping[int, ParallelLayer]


def place(exchange: Exchange, layers: Layers, placements: Mapping[int, Placement]) -> None:
    """Lays the experts of some layers as `placements` says. Raises on all ranks alike, and nothing has changed: ConfigError for a
    placement that does not fit, StepMismatch within a step, and where ranks differ."""

    def digest() -> int:
        for layer, placement in placements.items():
            if layer not in layers:
                raise ConfigError(f"placement of layer {layer}: the layers with experts are {', '.join(map(str, layers))}")
            present = layers[layer].placement
            check_fits(placement, layer, experts=present.experts, world_size=present.world_size)
        _check_boundary(layers)
        return _digest([(layer, placement.digest) for layer, placement in sorted(placements.items())])

    _meet(exchange, layers, digest)
    for layer, placement in placements.items():
        layers[layer].placement = placement


def rebalance(exchange: Exchange, layers: Layers) -> dict[int, Choice]:
    """Chooses a placement for each layer by the tokens of its last batches, and places its experts so. Raises StepMismatch, on
    all ranks alike, within a step and where ranks differ."""

    def digest() -> int:
        _check_boundary(layers)
        return _digest([(layer, known.placement.digest, len(known.history)) for layer, known in layers.items()])

    _meet(exchange, layers, digest)
    choices = {
        layer: choose_placement(known.history.of_all(exchange, known.device), known.placement) for layer, known in layers.items()
    }
    place(exchange, layers, {layer: choice.placement for layer, choice in choices.items()})
    return choices


def check_fits(placement: Placement, layer: int, *, experts: int, world_size: int) -> None:
    """Raises ConfigError where a placement is not of a layer's experts, or of other ranks."""
    if (placement.experts, placement.world_size) != (experts, world_size):
        raise ConfigError(
            f"placement of layer {layer}: it is of {placement.experts} experts on {placement.world_size} ranks, the layer has "
            f"{experts}, the job {world_size}"
        )


def _check_boundary(layers: Layers) -> None:
    """Raises StepMismatch where a layer awaits a backward."""
    within = [str(layer) for layer, known in layers.items() if known.awaits_backward]
    if within:
        raise StepMismatch(
            f"experts are not placed within a step: layer {', '.join(within)} awaits the backward of a forward. Do it after that, "
            "or drop what that forward gave"
        )


def _meet(exchange: Exchange, layers: Layers, digest: Callable[[], int]) -> None:
    """Sees to it that all ranks stand here with equal digests; what one raises, all do."""
    device = next((known.device for known in layers.values()), torch.device("cpu"))
    try:
        header = Header(Phase.PLACE, exchange.call_count, 0, 0, 0, 0, 0, 0, 0, digest(), 0, 0, 0, 0)
    except BaseException as error:
        with suppress(ParamStoreError):  # the exchange's own: they learn it from that
            exchange.alike(refusal(error, phase=Phase.PLACE, device=device).repeat(exchange.world_size, 1))
        raise
    check_told(exchange.alike(messages(header, exchange.world_size, device=device)).cpu(), this=exchange.rank)


def _digest(of: object) -> int:
    return xxh3_64_intdigest(repr(of).encode()) >> 1
