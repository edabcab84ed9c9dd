"""How long a pass of a layer in parts takes, as a model of events over what was measured: MPMoE, section IV-B.

Two things are busy one beside the other, each with one piece of work after the other: the exchange of rows, and computing.
Whichever has more to do bounds the pass: the paper's paradigms, of which it has a closed form each; here they come of the order of
events. Its third one, copies to the host, is computing's here, as these wait for it and it for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from paramstore_client.moe.pipeline_plan import Pipeline


@dataclass(frozen=True, slots=True)
class Curve:
    """Seconds of an exchange by the bytes of the rank that sends most: straight between what was measured, at least one size.
    Below these it takes as long as the smallest, above as many times longer as there are more bytes."""

    points: tuple[tuple[int, float], ...]
    """Ascending."""

    def covers(self, sizes_bytes: Sequence[int]) -> bool:
        """Whether such sizes lie between what was measured, or no more than twice beyond it."""
        return self.points[0][0] <= 2 * min(sizes_bytes) and max(sizes_bytes) <= 2 * self.points[-1][0]

    def with_points(self, other: Curve) -> Curve:
        """With those of another, which are newer."""
        return Curve(tuple(sorted({**dict(self.points), **dict(other.points)}.items())))

    def at(self, sent_bytes: float) -> float:
        least, most = self.points[0], self.points[-1]
        if sent_bytes <= least[0]:
            return least[1]
        for (low, low_s), (high, high_s) in pairwise(self.points):
            if sent_bytes <= high:
                return low_s + (high_s - low_s) * (sent_bytes - low) / (high - low)
        return most[1] * sent_bytes / most[0]


@dataclass(frozen=True, slots=True)
class Timeline:
    """Seconds of a pass, and how many of them the exchange and computing are busy."""

    seconds: float
    exchanging_s: float
    computing_s: float


def passed(parts: int, *, there_s: float, computing_s: float, back_s: float) -> Timeline:
    """The time line of a pass, its events in the order of `PipelinedCall`. All of one part: there_s, of what is sent there before
    it is computed; back_s, of what is sent back."""
    now = wire = 0.0

    def sent(seconds: float) -> float:
        nonlocal wire
        wire = max(wire, now) + seconds
        return wire

    following = sent(there_s)
    for part in range(parts):
        arrived, following = following, sent(there_s) if part + 1 < parts else 0.0
        now = max(now, arrived) + computing_s
        sent(back_s)
    return Timeline(wire, parts * (there_s + back_s), parts * computing_s)


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a call is expected to take with a pipeline; backward: None where nothing is recorded."""

    pipeline: Pipeline
    forward: Timeline
    backward: Timeline | None = None

    @property
    def seconds(self) -> float:
        return sum(each.seconds for each in self._passes)

    @property
    def bound(self) -> str:
        """What is busy longest: "exchanging" or "computing"."""
        exchanging_s, computing_s = (sum(getattr(each, name) for each in self._passes) for name in ("exchanging_s", "computing_s"))
        return "exchanging" if exchanging_s > computing_s else "computing"

    @property
    def _passes(self) -> list[Timeline]:
        return [each for each in (self.forward, self.backward) if each is not None]
