"""Loads ahead what the next layer's router guesses, and counts what became of it: of all layers of one model.

- On the CPU a router is run once this layer's experts were asked for. On a device its answer comes with this layer's own ids, in
  the one wait that a layer has.
- Where leases stand, and in a device's slots, as many guesses are loaded as came in time before (`Speculation`). In training all of
  them are asked for, before what was used so far: the daemon takes what fits, and reads it behind what anybody waits for.
"""

# T tokens, H hidden, E experts
# ruff: noqa: N803 - shape suffixes, as the legend says

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import ceil

from torch import Tensor, nn

from paramstore.clock import Clock, MonotonicClock
from paramstore.core.key import ExpertKey
from paramstore.errors import ParamStoreError
from paramstore_client.device.tier import DeviceTier
from paramstore_client.hf.model.early_router import EarlyRouter, early_routers
from paramstore_client.hf.model.layout import ExpertLayout
from paramstore_client.nn.speculation import Speculation
from paramstore_client.nn.speculation_gain import SpeculationGain
from paramstore_client.source import AheadTicket, ExpertSource, HostTicket, SlotSource, load_ahead

LIKELY = 0.5
"""The part of a router's guesses, the likeliest, that is loaded into slots on the host. What is guessed first mostly stands there
already, so that what is lacking is of the rear: of a small trained model the third of four was used 48 % of the time."""
TICKETS_MAX = 64
"""Most loads ahead whose bytes are awaited; those of older ones are not counted."""


@dataclass(frozen=True, slots=True)
class SpeculationFigures:
    """What guesses of the next layer's router have brought since a model was loaded. Counts are of experts.

    asked: loaded ahead, or asked for. Of these, in_time: that were there when their layer was computed; late: that were still on
    their way; wasted: that their layer did not use. The newest are not judged yet. In training a client does not know what the
    host holds already: that counts as in time, and all of a layer's guesses as late while one of them is on its way.
    expert_bytes: size of one expert's part `param`. loaded_bytes: what loads ahead have brought into host memory, as the daemon
    says; in mode "infer" those among them that were guessed by use so far.
    """

    asked: int
    in_time: int
    late: int
    wasted: int
    expert_bytes: int
    loaded_bytes: int

    @property
    def useful_bytes(self) -> int:
        """Bytes of experts that were there in time."""
        return self.in_time * self.expert_bytes

    @property
    def late_bytes(self) -> int:
        """Bytes of experts that were still on their way, and awaited."""
        return self.late * self.expert_bytes

    @property
    def wasted_bytes(self) -> int:
        """Bytes of experts that were not used."""
        return self.wasted * self.expert_bytes


class EarlyLoads:
    """Owner of the routers that guess, of the newest guesses of windows and devices, and of the counts."""

    def __init__(self, source: ExpertSource) -> None:
        self.speculation = Speculation()
        self.clock: Clock = MonotonicClock()
        self.routers: Mapping[int, EarlyRouter] = {}
        """By layer; empty where nothing is guessed."""
        self._source = source
        self.gains: defaultdict[int, SpeculationGain] = defaultdict(SpeculationGain)
        """By the size of a batch."""
        self._gain = SpeculationGain()
        """Of the layer that began last."""
        self._slots = source if isinstance(source, SlotSource) else None
        self._standing = self._slots if self._slots is not None and self._slots.is_on_host else None
        self._newest: tuple[int, frozenset[ExpertKey], AheadTicket] | None = None
        """(layer, guesses that were asked for, their load), where no lease stands."""
        self._asked = 0
        self._under_way: deque[HostTicket] = deque()
        self._loaded_bytes = 0

    def find_routers(self, model: nn.Module, layout: ExpertLayout) -> None:
        """Takes the model's routers for guesses, unless all experts can stand or be leased at once: nothing is to gain then."""
        source = self._source
        if source.lease_slots < len(source.layers) * source.experts:
            self.routers = early_routers(model, layout)

    @property
    def figures(self) -> SpeculationFigures:
        """The counts so far."""
        self._note_bytes()
        counts, source = self.speculation.counts, self._source
        record = (source.namespace if isinstance(source, DeviceTier) else source).schema.part("param")
        return SpeculationFigures(
            asked=counts.asked, in_time=counts.in_time, late=counts.late, wasted=counts.wasted,
            expert_bytes=record.image_bytes,
            loaded_bytes=self._loaded_bytes if self._slots is None else self._slots.counts.ahead_bytes,
        )  # fmt: skip

    def begin_layer(self, layer: int, tokens: int) -> None:
        """Notes that `layer` begins to compute so many tokens. Whether forwards of so many are faster with guesses is tried."""
        if self.routers:
            self._gain = self.gains[tokens.bit_length()]
            self._gain.begin_layer(layer, self.clock.now_s())

    def end_layer(self) -> None:
        """Notes that the layer that began last has computed."""
        self._gain.end_layer(self.clock.now_s())

    def _admit(self, tokens: int) -> int:
        """How many guesses may be loaded ahead of the next layer's visit, beside `tokens` that are computed now."""
        return self.speculation.admit(tokens) if self._gain.is_on else 0

    # --- guesses where leases stand ---

    def standing(
        self, layer: int, following: int | None, hidden_TH: Tensor, found: tuple[int, int]
    ) -> list[ExpertKey] | None:  # fmt: skip
        """The guesses of layer `following` that are to be loaded ahead now, into slots on the host; None where those are not, or
        nothing guesses. found: what became of the loads ahead of `layer`, which computes now."""
        source = self._standing
        if source is None:
            return None
        self.speculation.judge(layer, *found, placed=source.counts.ahead)
        if following is None or following not in self.routers:
            return None
        tokens = len(hidden_TH)
        admitted = self._admit(tokens)
        experts = self.routers[following].guess(hidden_TH) if admitted else []
        likely = experts[: ceil(LIKELY * len(experts))]
        lacking = source.lacking([(following, expert) for expert in likely])[:admitted]
        self.speculation.note(following, tokens=tokens, placed=source.counts.ahead)
        return lacking

    # --- guesses elsewhere ---

    def votes_on_device(self, following: int | None, hidden_TH: Tensor) -> Tensor | None:
        """A guess that is fetched from the device with the layer's own ids, [E + 1]; None where there is none, or the tokens are in
        host memory, where it is made later."""
        router = None if following is None else self.routers.get(following)
        is_there = isinstance(self._source, DeviceTier) or hidden_TH.device.type != "cpu"
        return router.votes(hidden_TH) if router is not None and is_there and self._gain.is_on else None

    def judge(self, layer: int, experts: Sequence[int]) -> None:
        """Takes in what became of the guesses for `layer`, which chose `experts` and has asked for none of them yet."""
        newest, self._newest = self._newest, None
        if newest is None or newest[0] != layer:
            return
        _, guessed, ticket = newest
        useful = [key for expert in experts if (key := (layer, expert)) in guessed]
        if isinstance(self._source, DeviceTier):
            self._source.settle()
            in_time = sum(self._source.plan.find(key) is not None for key in useful)
        else:
            in_time = len(useful) if ticket.done() else 0
        self.speculation.judge(layer, in_time, len(useful) - in_time, placed=self._asked)

    def load(self, following: int, votes_E: Sequence[int], hidden_TH: Tensor, *, room: int) -> list[ExpertKey]:
        """Loads ahead what the router of layer `following` guesses, at most `room` experts; gives those that it asked for, none
        where that failed, or leases stand. votes_E: what `votes_on_device` told; [] to guess now."""
        if self._standing is not None:
            return []
        tokens = len(hidden_TH)
        router = self.routers.get(following)
        if router is None or not (admitted := self._admit(tokens)):
            return []
        source, experts = self._source, router.ranked(votes_E) if votes_E else router.guess(hidden_TH)
        guesses = [(following, expert) for expert in experts]
        if isinstance(source, DeviceTier):
            guesses = [key for key in guesses if source.plan.find(key) is None][:admitted]
        guesses = guesses[: max(room, 0)]
        if not guesses:
            return []
        if (ticket := load_ahead(source, guesses)) is None:
            return []
        self.speculation.note(following, tokens=tokens, placed=self._asked)
        self._newest = following, frozenset(guesses), ticket
        self._asked += len(guesses)
        if self._slots is None:
            self._under_way.append(ticket)  # type: ignore[arg-type]  # a namespace's, which says what it brought
            self._note_bytes()
        return guesses

    def _note_bytes(self) -> None:
        while True:
            try:
                ticket = self._under_way.popleft()
            except IndexError:  # another thread's forward may have taken the last one
                return
            if ticket.done():
                with suppress(ParamStoreError):  # demand will ask again, and raise the error where it matters
                    self._loaded_bytes += ticket.wait()["bytes"]
            elif len(self._under_way) < TICKETS_MAX:
                self._under_way.appendleft(ticket)
                return
