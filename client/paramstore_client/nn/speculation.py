"""Decides how many guessed experts are loaded ahead, by what became of those before. Pure.

The next layer's own router, run early on the current layer's input, names the experts that it will likely choose (MoESys, SE-MoE,
arXiv 2205.10034, section 3.2.2: gate results trigger loads at once). How many of them come in time depends on the disk, on what
demand loads beside them, and on how long the layer computes: so it is measured, for each size of a batch by itself.

- The window of a size is the number of keys that came in time, and one more; it doubles while all that it allows come in time.
- Guesses that are visited are useful, in time or not; the others are wasted. Below `LEAST_USEFUL` of them being useful nothing is
  loaded ahead, but for one try in `RETRY_EVERY`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

FIRST_WINDOW = 4
LEAST_USEFUL = 0.5
"""Share of useful loads below which guesses cost more than they bring: each wasted one takes the disk from demand."""
RETRY_EVERY = 64
MEMORY = 0.9
"""The part of what was known of the useful share that one more visit leaves."""


@dataclass(slots=True)
class SpeculationCounts:
    """Keys since the model was loaded. asked: that got a slot to be loaded to; in_time, late: of those visited then; wasted: the
    others: asked = in_time + late + wasted."""

    asked: int = 0
    in_time: int = 0
    late: int = 0
    wasted: int = 0


@dataclass(slots=True)
class Speculation:
    """Owner of the windows and of the counts of one model."""

    counts: SpeculationCounts = field(default_factory=SpeculationCounts)
    _windows: dict[int, int] = field(default_factory=dict)
    _noted: tuple[int, int, int] | None = None
    """(layer guessed for, size, loads placed before) of the newest guesses."""
    _useful: float = 1.0
    _skipped: int = 0

    def judge(self, layer: int, in_time: int, late: int, *, placed: int) -> None:
        """Takes in what became of the guesses for `layer`, whose visit has begun: so many had come by then, so many were on their
        way, those among them of a forward that ended before this layer. placed: loads ahead that got a slot, so far."""
        noted, self._noted = self._noted, None
        if noted is None or noted[0] != layer or placed <= noted[2]:  # less where the count began anew, after an interrupt
            return
        size, asked = noted[1], placed - noted[2]
        in_time = min(in_time, asked)
        late = min(late, asked - in_time)
        useful = in_time + late
        self.counts.asked += asked
        self.counts.in_time += in_time
        self.counts.late += late
        self.counts.wasted += asked - useful
        self._useful = MEMORY * self._useful + (1 - MEMORY) * useful / asked
        window = self._windows.get(size, FIRST_WINDOW)
        if late:
            self._windows[size] = in_time + 1
        elif in_time and asked >= window:
            self._windows[size] = 2 * window

    def admit(self, tokens: int) -> int:
        """How many guesses may be loaded ahead of the next visit, beside `tokens` that are computed now."""
        if self._useful < LEAST_USEFUL:
            self._skipped += 1
            if self._skipped % RETRY_EVERY:
                return 0
        return self._windows.get(tokens.bit_length(), FIRST_WINDOW)

    def note(self, layer: int, *, tokens: int, placed: int) -> None:
        """Notes that guesses for `layer` are about to be loaded ahead. placed: as for `judge`."""
        self._noted = layer, tokens.bit_length(), placed
