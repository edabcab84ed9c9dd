"""Decides whether guesses are made at all: whether forwards are faster with them. Pure.

What a right guess saves and what a wrong one costs depend on the disk, the cores, the cache and the text, and on each other. So it
is tried: forwards of one size go one way for a while, then a few go the other way, and the faster way stays. Each time the same way
wins it stays twice as long, so that trials cost little.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median

TRIAL = 16
"""Forwards of each way that are compared, by their medians."""
FIRST_STAY, LONGEST_STAY = 64, 1024
"""Forwards that go the way that won, until the other way is tried again."""
LEAST_GAIN = 0.02
"""The part of a forward's time that guesses must save."""


@dataclass(slots=True)
class SpeculationGain:
    """Owner of what forwards of one size took with guesses and without. The time of a forward is from its first layer's begin to
    its last layer's end, so that what lies between two forwards counts for neither. Layers come in ascending order; what begins
    below another layer and has fewer, as a checkpoint's recomputation, is no forward."""

    is_on: bool = True
    """Whether this forward guesses."""
    _chosen: bool = True
    _left: int = TRIAL
    _stay: int = FIRST_STAY // 2
    _seconds: list[float] = field(default_factory=list)
    _of_chosen_s: float = 0.0
    _layers: list[int] = field(default_factory=list)
    """Those that this forward has begun."""
    _most_layers: int = 1
    _began_s: float = 0.0
    _ended_s: float = 0.0

    def begin_layer(self, layer: int, now_s: float) -> bool:
        """Notes that `layer` begins. Whether to guess."""
        if self._layers and layer <= self._layers[-1]:
            if len(self._layers) >= self._most_layers:
                self._most_layers = len(self._layers)
                self._end_forward(self._ended_s - self._began_s)
            self._layers = []
        if not self._layers:
            self._began_s = now_s
        self._layers.append(layer)
        return self.is_on

    def end_layer(self, now_s: float) -> None:
        """Notes that the layer that began last ends."""
        self._ended_s = now_s

    def _end_forward(self, seconds: float) -> None:
        self._seconds = [*self._seconds, seconds][-TRIAL:]
        self._left -= 1
        if self._left:
            return
        took_s, self._seconds = median(self._seconds), []
        if self.is_on is self._chosen:
            self._of_chosen_s, self.is_on, self._left = took_s, not self._chosen, TRIAL
            return
        with_s, without_s = (took_s, self._of_chosen_s) if self.is_on else (self._of_chosen_s, took_s)
        chosen = with_s < (1 - LEAST_GAIN) * without_s
        self._stay = min(2 * self._stay, LONGEST_STAY) if chosen is self._chosen else FIRST_STAY
        self.is_on, self._chosen, self._left = chosen, chosen, self._stay
