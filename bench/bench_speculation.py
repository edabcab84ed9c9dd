"""Measures decoding through `ps.hf` with guesses of the next layer's router and without, in turns: with half, a quarter and a tenth
of the experts in host memory, and on volumes so slow that loads take 0.5 and 1.5 times as long as arithmetic.

Run it on an idle machine: `python bench/bench_speculation.py CACHE [--quick] [--dtype float32] [--dir DIR] [--out FILE]`. The
figures go to bench/results/speculation-<date>.json. The model is a Qwen3-MoE byte model that was trained on the demo's text
(`paramstore_bench/guesses/byte_model.py`; ten minutes on one core, kept in CACHE) and widened with zeros to experts of real size:
its routers and the way of its hidden states are those of a trained model, as far as one so small goes. It reads held-out text byte
by byte. Logits of both ways are compared with those of the model in memory, bit for bit.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.utils import logging

import paramstore as ps
from paramstore.bench.context import Bench
from paramstore.bench.report.rows import Row
from paramstore.bench.service.daemon import Service, serving
from paramstore.config import SEGMENT_ALIGNMENT_BYTES
from paramstore.core.key import ExpertKey
from paramstore.demo.batches import held_out_batches
from paramstore.demo.corpus import Corpus, open_corpus
from paramstore.engine.planner.promises import slots_promising
from paramstore.engine.tables.arena import segment_lengths
from paramstore.errors import StepMismatch
from paramstore_bench.decode_model import SETTINGS
from paramstore_bench.frame import Script, wait_policy
from paramstore_bench.guesses.byte_model import Recipe, Shape, open_byte_model, widened
from paramstore_bench.guesses.slow_volume import reading_at
from paramstore_bench.guesses.speculating import Cell, Decoded, limited, rows_of, waits_of
from paramstore_client.device.host_slots import HostSlots
from paramstore_client.hf.compat import caches
from paramstore_client.hf.model.binding import ATTRIBUTE, layer_of

SHARES, BATCHES, THREADS = (0.5, 0.25, 0.1), (1, 4), (1, 2)
LOADS_OF_COMPUTE, SLOW_SHARE = (0.5, 1.5), 0.5
PROMPT = 32
"""Bytes of a text that are read at once, untimed."""
DOMAINS = 4
"""Kinds of text, which follow each other in the rows that are drawn. A round reads two texts of one kind, each both ways, in the
order A with, B without, A without, B with, or with the ways exchanged: both ways read the same, and each of them once first."""
SLACK_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Size:
    """Amounts of a run. new: bytes that are decoded and timed."""

    recipe: Recipe
    wide: Shape
    corpus_bytes: int
    new: int
    rounds: int
    dtype: torch.dtype = torch.bfloat16


FULL = Size(Recipe(), Shape(hidden=1024, inner=704, heads=32), SETTINGS.corpus_bytes, new=30, rounds=3)
FULL_SIZES = {"bfloat16": FULL, "float32": replace(FULL, wide=replace(FULL.wide, inner=352), dtype=torch.float32)}
"""By dtype, with experts of equal bytes. A processor without instructions for bf16 computes many times as fast in fp32."""
SMALL = Shape(layers=2, experts=8, hidden=32, inner=16, heads=2, top_k=2)
QUICK = Size(
    Recipe(shape=SMALL, batch=4, context=64, steps=20, warmup_steps=2, bits_max=99.0),
    replace(SMALL, hidden=128, inner=256, heads=4), corpus_bytes=2_000_000, new=6, rounds=2,
)  # fmt: skip


SCRIPT = Script("speculation", __doc__, quick="a small model: a check, not figures to quote", words="CACHE")


def main() -> int:
    """Runs the bench."""
    parser = SCRIPT.parser()
    parser.add_argument("cache", type=Path, help="a directory for the corpus and the trained model")
    parser.add_argument("--dtype", choices=FULL_SIZES, default="bfloat16", help="of the wide model")
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]  # transformers left it so
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    arguments = parser.parse_args()
    full = FULL_SIZES[arguments.dtype]
    size = replace(QUICK, dtype=full.dtype) if arguments.quick else full
    script = replace(SCRIPT, words="CACHE --dtype float32") if arguments.dtype == "float32" else SCRIPT
    return script.run(arguments, lambda bench: Run(bench, size, arguments.cache).rows(), facts=wait_policy())


class Run:
    """The checkpoint, the texts, and what was measured of the model in memory."""

    def __init__(self, bench: Bench, size: Size, cache: Path) -> None:
        self.bench = bench
        self.size = size
        bench.tell("training, or loading, the byte model")
        corpus = open_corpus(cache / f"corpus-{size.corpus_bytes}", size_bytes=size.corpus_bytes)
        trained = open_byte_model(cache / f"byte-model-{size.recipe.steps}.pt", corpus, size.recipe)
        small, wide = size.recipe.shape, size.wide
        self.note = (
            f"a byte model of {small.layers} layers x {small.experts} experts, top-{small.top_k}, hidden {small.hidden}, trained "
            f"{size.recipe.steps} steps to {trained.held_out_bits:.2f} bits a byte, widened with zeros to hidden {wide.hidden}"
        )
        self.checkpoint = bench.directory / "checkpoint"
        widened(trained.model, wide, dtype=size.dtype).save_pretrained(self.checkpoint)
        self.memory: Any = AutoModelForCausalLM.from_pretrained(self.checkpoint, dtype=size.dtype)
        self.texts = texts_of(corpus, length=PROMPT + size.new, count=2 * (size.rounds + 1) * DOMAINS)
        self.image_bytes = ps.param_schema(
            {"gate_up": ((2 * wide.inner, wide.hidden), size.dtype), "down": ((wide.hidden, wide.inner), size.dtype)}
        ).part("param").image_bytes

    def rows(self) -> Iterator[Row]:
        """Measures every cell; then those of slow volumes, by what the cells of `SLOW_SHARE` lacked."""
        slow: list[tuple[Cell, float]] = []
        for share in SHARES:
            cells = [Cell(share, batch, threads, note=self.note) for threads in THREADS for batch in BATCHES]
            for cell, made in zip(cells, self.measured(cells), strict=True):
                yield from made
                if share == SLOW_SHARE:
                    parts = made[0].parts
                    lacking_bytes = max(parts["off_read_bytes"], self.image_bytes)
                    slow += [(cell, lacking_bytes / (ratio * parts["memory_s"])) for ratio in LOADS_OF_COMPUTE]
        for cell, bytes_per_s in slow:
            (made,) = self.measured([limited(cell, bytes_per_s)])
            yield from made

    def measured(self, cells: Sequence[Cell]) -> Iterator[list[Row]]:
        """Measures cells of one share on one daemon: the rows of each."""
        shape = self.size.wide
        slots = max(shape.top_k, round(cells[0].share * shape.layers * shape.experts))
        budget_bytes = sum(segment_lengths(slots_promising(slots), self.image_bytes)) + SLACK_BYTES
        budget_bytes -= budget_bytes % -SEGMENT_ALIGNMENT_BYTES
        with (
            reading_at(cells[0].bytes_per_s),
            serving(self.bench.directory / "store", host_budget_bytes=budget_bytes) as service,
        ):
            ours = ps.hf.from_pretrained(
                AutoModelForCausalLM, self.checkpoint, store=service.store, mode="infer", name="experts", expert_memory=slots,
                dtype=self.size.dtype,
            )  # fmt: skip
            service.wait_until_quiet(self.bench.clock)
            for cell in cells:
                yield self._cell(Beside(ours, service), cell)

    def _cell(self, beside: Beside, cell: Cell) -> list[Row]:
        torch.set_num_threads(cell.threads)
        self.bench.tell(cell.case)
        beside.forget()
        rounds = [self._round(beside, cell, number) for number in range(self.size.rounds + 1)][1:]  # the first is not counted
        pairs, compute_s = [pair for pair, _ in rounds], median(seconds for _, seconds in rounds)
        return rows_of(cell, pairs, tokens=2 * cell.batch * self.size.new, compute_s=compute_s, record_bytes=self.image_bytes)

    def _round(self, beside: Beside, cell: Cell, number: int) -> tuple[tuple[Decoded, Decoded], float]:
        """Decodes two texts both ways, (with guesses, without), and from memory: (decoded, seconds from memory)."""
        texts = [text_of(self.texts, 2 * number + place, cell.batch, kind=number % DOMAINS) for place in range(2)]
        expected = [decode(self.memory, text, self.size.new) for text in texts]
        made: dict[bool, Decoded] = {}
        first = number % 2 == 0
        for place, speculates in ((0, first), (1, not first), (0, not first), (1, first)):
            with beside.speculating(is_on=speculates):
                decoded, logits = beside.decoded(texts[place], self.size.new)
            if not torch.equal(logits, expected[place][1]):
                raise StepMismatch(f"{cell.case}, round {number}: the logits are not those of the model in memory")
            made[speculates] = made[speculates].with_more(decoded) if speculates in made else decoded
        return (made[True], made[False]), sum(seconds for seconds, _ in expected)


def text_of(texts: Tensor, number: int, batch: int, *, kind: int) -> Tensor:
    """The text of one run: of all kinds, or of one where a batch has one row."""
    block = texts[number * DOMAINS : (number + 1) * DOMAINS]
    return block[kind : kind + 1] if batch == 1 else block[:batch]


class Beside:
    """A model with stored experts, which guesses or does not, and the daemon that it is served by."""

    def __init__(self, ours: Any, service: Service) -> None:
        self.ours = ours
        self._service = service
        layer = next(layer_of(module) for module in ours.modules() if ATTRIBUTE in module.__dict__)
        assert isinstance(layer.source, HostSlots)
        self._slots, self._early = layer.source, layer.early
        self._routers = layer.early.routers
        self._asked: dict[ExpertKey, list[float]] = {}
        namespace = ps.hf.namespace(ours)
        if not hasattr(namespace.begin_acquire, "asked"):
            setattr(namespace, "begin_acquire", _noting(namespace.begin_acquire))  # noqa: B010 - a method of an instance
        self._asked = namespace.begin_acquire.asked  # type: ignore[attr-defined]

    def forget(self) -> None:
        """Forgets which way was faster: other threads, and another volume, are tried anew."""
        self._early.gains.clear()

    @contextmanager
    def speculating(self, *, is_on: bool) -> Iterator[None]:
        """Guesses are made in the block, or not."""
        self._early.routers = self._routers if is_on else {}
        try:
            yield
        finally:
            self._early.routers = self._routers

    def decoded(self, text: Tensor, new: int) -> tuple[Decoded, Tensor]:
        """Decodes, and takes what was counted meanwhile."""
        self._asked.clear()
        before = (0, 0, 0)

        def begin() -> None:
            nonlocal before
            before = self._counts()
            self._service.store.trace_begin()

        seconds, logits = decode(self.ours, text, new, begin=begin)
        traced: Any = self._service.store.trace_end()
        visited, hits, read_bytes = (after - earlier for after, earlier in zip(self._counts(), before, strict=True))
        return Decoded(seconds, visited, hits, read_bytes, waits_of(traced["transfers"], self._asked)), logits

    def _counts(self) -> tuple[int, int, int]:
        counts = self._slots.counts
        read = sum(int(volume["bytes_read"]) for volume in self._service.stats()["volumes"].values())
        return counts.hits + counts.late + counts.misses + counts.passed, counts.hits, read


def _noting(begin_acquire: Callable[..., Any]) -> Callable[..., Any]:
    """The call, which also notes when it was made for each key."""
    asked: dict[ExpertKey, list[float]] = {}

    def noted(keys: Sequence[ExpertKey], **given: Any) -> Any:
        now_s = time.monotonic()
        for key in keys:
            asked.setdefault(key, []).append(now_s)
        return begin_acquire(keys, **given)

    noted.asked = asked  # type: ignore[attr-defined]
    return noted


def texts_of(corpus: Corpus, *, length: int, count: int) -> Tensor:
    """`count` pieces of held-out text, [count, length]."""
    return held_out_batches(corpus, count=1, batch=count, context=length)[0].input_BT


@torch.no_grad()
def decode(model: Any, text: Tensor, new: int, *, begin: Callable[[], None] = lambda: None) -> tuple[float, Tensor]:
    """Seconds that `new` bytes of the texts take after their prompt, each next byte being the text's own, and the logits. begin:
    called after the prompt."""
    given = {caches.name_in(model.forward): DynamicCache(config=model.config), "use_cache": True}
    model(input_ids=text[:, :PROMPT], **given)
    logits: list[Tensor] = []
    begin()
    started_s = time.perf_counter()
    for at in range(PROMPT, PROMPT + new):
        out = model(input_ids=text[:, at : at + 1], **given)
        logits.append(out.logits[:, -1])
    return time.perf_counter() - started_s, torch.stack(logits)


if __name__ == "__main__":
    sys.exit(main())
