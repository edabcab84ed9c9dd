"""Times a served model beside the same one in memory, on prompts of their own each round, and takes what was counted meanwhile.

No clock starts while the daemon moves anything: what one run has loaded ahead for the next is there when that begins, and takes
nothing from the model in memory.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from paramstore.bench.limits.raw import RawFile
from paramstore.bench.service.daemon import Service
from paramstore.errors import WaitTimeout
from paramstore_bench.decode.rows import Answer, Cell, PairedAnswer, Used, Work, check_logits
from paramstore_client.device.host_slots import HostSlots
from paramstore_client.hf.compat import caches
from paramstore_client.hf.model.binding import ATTRIBUTE, layer_of

VOCABULARY = 8192
IDLE_S, POLL_S = 60.0, 0.002
"""Longest wait for the daemon to stand still, and the pause between two looks."""


class Models:
    """A served model, the same in memory, and what both are measured by: the service, and a file that raw reads are made of."""

    def __init__(self, ours: Any, memory: Any, service: Service, raw: RawFile) -> None:
        self.ours = ours
        self.memory = memory
        self.raw = raw
        self.service = service
        layer = next(layer_of(module) for module in ours.modules() if ATTRIBUTE in module.__dict__)
        assert isinstance(layer.source, HostSlots)
        self.slots = layer.source
        self._early = layer.early
        self._routers = self._early.routers
        for layer_index in self.slots.layers:  # no slot is empty from here on, and where all experts stand nothing is read
            for expert in range(self.slots.experts):
                self.slots.acquire([(layer_index, expert)]).release()

    def facts(self) -> dict[str, float]:
        """Sizes that a row names."""
        return {"slots": float(self.slots.lease_slots), "keys": float(len(self.slots.layers) * self.slots.experts)}

    def pairs(self, cell: Cell, *, rounds: int) -> list[PairedAnswer]:
        """`rounds` pairs, after one that is not counted."""
        return [self._pair(cell.work, number) for number in range(-1, rounds)][1:]

    def beside(self, peer: Callable[[Tensor], Answer], work: Work, number: int) -> tuple[Answer, Answer]:
        """Ours and a peer's, of one prompt."""
        prompt = prompt_of(work, 100 + number)
        return self.run_ours(work, prompt), peer(prompt)

    def run_ours(self, work: Work, prompt: Tensor) -> Answer:
        """Times ours. Guesses of the next router are for prompts alone."""
        self._early.routers = {} if work.new else self._routers
        before, read_before = replace(self.slots.counts), 0.0

        def begin() -> None:
            nonlocal before, read_before
            self._wait_until_idle()
            before, read_before = replace(self.slots.counts), self._bytes_read()

        seconds, logits = run(self.ours, work, prompt, begin=begin)
        after = self.slots.counts
        absent = after.misses + after.passed - before.misses - before.passed
        late, hits = after.late - before.late, after.hits - before.hits
        stood = before.ahead - before.useful - before.wasted  # at most: loaded ahead before the clock started
        brought = max(0, after.useful - before.useful - stood)
        self._wait_until_idle()
        lacking_bytes = (absent + brought) * self.raw.record_bytes
        read_bytes = self._bytes_read() - read_before
        used = Used(absent + late + hits, absent, late, min(lacking_bytes, read_bytes), read_bytes)
        return Answer(seconds, logits, used)

    def raw_rate(self, records: int, *, start: int = 0) -> float:
        """Bytes a second of raw reads of so many records at once, as a visit that lacks them reads them; of two such reads."""
        count = self.raw.record_count
        samples = [
            self.raw.read([(start + index) % count for index in range(max(1, min(records, count)))]) for start in (start, start + 1)
        ]
        return sum(sample.work for sample in samples) / sum(sample.seconds for sample in samples)

    def _pair(self, work: Work, number: int) -> PairedAnswer:
        prompt = prompt_of(work, number)
        if number % 2:
            memory, ours = self._run_memory(work, prompt), self.run_ours(work, prompt)
        else:
            ours, memory = self.run_ours(work, prompt), self._run_memory(work, prompt)
        check_logits(ours, memory, what=f"{work.name}, round {number}")
        visits = len(self.slots.layers) * max(1, work.new)
        lacking = round(ours.used.lacking_bytes / self.raw.record_bytes)
        rate = self.raw_rate(round(lacking / visits), start=number)
        both_s = None if work.new or not lacking else self._memory_beside_reads(work, prompt, lacking)
        return PairedAnswer(ours, memory, rate, both_s)

    def _memory_beside_reads(self, work: Work, prompt: Tensor, records: int) -> float:
        """Seconds until the model in memory has answered and as many raw records are read, both begun at once."""
        order = [record % self.raw.record_count for record in range(records)]
        with ThreadPoolExecutor(1) as pool:
            started_s = time.perf_counter()
            reads = pool.submit(self.raw.read, order)
            self._run_memory(work, prompt)
            reads.result()
            return time.perf_counter() - started_s

    def _run_memory(self, work: Work, prompt: Tensor) -> Answer:
        return Answer(*run(self.memory, work, prompt))

    def _bytes_read(self) -> float:
        return sum(int(volume["bytes_read"]) for volume in self.service.stats()["volumes"].values())

    def _wait_until_idle(self) -> None:
        """Returns once nothing is queued or under way in the daemon. Raises WaitTimeout."""
        pause, ends_s = threading.Event(), time.monotonic() + IDLE_S
        while any(lane["queued"] or lane["running"] for lane in self.service.stats()["queues"].values()):
            if time.monotonic() > ends_s:
                raise WaitTimeout(f"the daemon still moves after {IDLE_S:g} s")
            pause.wait(POLL_S)


def prompt_of(work: Work, number: int) -> Tensor:
    """The token ids [1, prompt] of a round: each has its own."""
    return torch.randint(VOCABULARY, (1, work.prompt), generator=torch.Generator().manual_seed(number + 1000 * work.prompt))


@torch.no_grad()
def run(
    model: Any, work: Work, prompt: Tensor, *, begin: Callable[[], None] = lambda: None, between: Callable[[], None] | None = None
) -> tuple[float, Tensor]:
    """Times one work; gives its seconds, and the logits of the last position of each forward. In decoding the prompt goes first,
    untimed, and tokens are chosen greedily. begin: called before the clock starts; between: before each forward, untimed."""
    given = {caches.name_in(model.forward): DynamicCache(config=model.config), "use_cache": True, "logits_to_keep": 1}
    logits: list[Tensor] = []
    tokens = prompt
    if work.new:
        tokens = model(input_ids=prompt, **given).logits.argmax(-1)
    begin()
    seconds, started_s = 0.0, time.perf_counter()
    for _ in range(max(1, work.new)):
        if between is not None:
            seconds += time.perf_counter() - started_s
            between()
            started_s = time.perf_counter()
        out = model(input_ids=tokens, **given)
        logits.append(out.logits[:, -1])
        tokens = logits[-1].argmax(-1, keepdim=True)
    seconds += time.perf_counter() - started_s
    return seconds, torch.cat(logits)
