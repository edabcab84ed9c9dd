"""Tells the demo: seven steps, in this order, over one directory that belongs to it.

The daemon ends with the demo, whatever ends that. A directory that the demo did not make is refused; in its own it keeps the
corpus and replaces the rest.
"""

from __future__ import annotations

import fcntl
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import paramstore as ps
from paramstore.core.key import ExpertKey
from paramstore.demo.batches import held_out_batches
from paramstore.demo.checkpoint import CheckpointFolder, CheckpointName
from paramstore.demo.corpus import Corpus, open_corpus
from paramstore.demo.generation import Generation, generate
from paramstore.demo.progress import DemoProgress, figures
from paramstore.demo.report import DemoReport
from paramstore.demo.run import NAMESPACE, StoredRun
from paramstore.demo.service import DemoDaemon
from paramstore.demo.settings import DemoSettings
from paramstore.demo.trace import StepTrace, equal_losses
from paramstore.demo.traffic import ExpertTiers, Memory, Traffic, resident_param_bytes
from paramstore.demo.training import ResidentPlace, Trainer, repeatable
from paramstore.errors import ConfigError, StoreLocked
from paramstore.sizes import format_size

MARKER = ".paramstore-demo"
CORPUS, STORE, CHECKPOINTS, REPORT, PICTURE = "corpus", "store", "checkpoints", "report.json", "report.png"
REPLACED = (STORE, CHECKPOINTS, REPORT, PICTURE)
VALIDATION_BATCHES = 4

Digests = dict[ExpertKey, str]


def tell(settings: DemoSettings, directory: Path, *, progress: DemoProgress, keeps_daemon: bool = False) -> DemoReport:
    """Runs the whole demo in `directory` and returns what it found; the report and the picture are written there.

    keeps_daemon: leaves the daemon running at the end, but not after an error.
    Raises ConfigError on a directory that is not the demo's, StoreLocked while another demo runs there.
    """
    daemon = DemoDaemon(
        directory / STORE, host_budget_bytes=settings.host_budget_bytes, reader_slots=settings.reader_slots
    )
    with owned_directory(directory), repeatable(threads=settings.threads), daemon:
        for name in REPLACED:
            _remove(directory / name)
        report = Story(settings, directory, daemon, progress).run()
        report.write(directory / REPORT)
        progress.fact(f"{directory / REPORT} and {_drawn(report, directory / PICTURE)}")
        if keeps_daemon:
            daemon.keep()
    return report


def _drawn(report: DemoReport, file: Path) -> str:
    """Draws the picture, and names it; without matplotlib says what is missing."""
    try:
        from paramstore.demo.picture import draw
    except ImportError:
        return f"no {file.name}, which needs matplotlib: pip install matplotlib"
    draw(report, file)
    return str(file)


@contextmanager
def owned_directory(directory: Path) -> Iterator[None]:
    """Makes `directory` if need be, and keeps other demos out of it meanwhile; an OSError from within names it. Raises ConfigError
    if it is not the demo's, StoreLocked, OSError if it cannot be looked at."""
    marker = directory / MARKER
    if directory.exists() and not directory.is_dir():
        raise ConfigError(f"--dir {directory}: it is a file")
    if directory.exists() and not marker.exists() and any(directory.iterdir()):
        raise ConfigError(f"--dir {directory}: it has files and no {MARKER}, so it is not the demo's; give another or an empty one")
    with _marked(directory) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise StoreLocked(f"--dir {directory}: another demo runs there") from error
        try:
            yield
        except OSError as error:
            if error.errno and error.filename is None:  # as from a write that found the disk full
                error.filename = str(directory)
            raise


def _marked(directory: Path) -> TextIO:
    """Opens the marker file of the directory; both are made if need be."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        return (directory / MARKER).open("a")
    except OSError as error:
        raise ConfigError(f"--dir {directory}: cannot be made or written: {error.strerror}: give another --dir") from error


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@dataclass(frozen=True, slots=True)
class SecondPass:
    """Result of the resumed training. at_kill: the experts' digests at the step where the first pass ended."""

    traces: list[StepTrace]
    at_kill: Digests
    valid_loss: float
    placement: ExpertTiers
    routed_tokens: tuple[tuple[int, ...], ...]


class Story:
    """One run through the demo. Owner of the most memory that was seen."""

    def __init__(self, settings: DemoSettings, directory: Path, daemon: DemoDaemon, progress: DemoProgress) -> None:
        self._settings = settings
        self._directory = directory
        self._daemon = daemon
        self._progress = progress
        self._peak_bytes = 0
        self._budget_bytes = 0

    def run(self) -> DemoReport:
        started_s = time.monotonic()
        settings = self._settings
        corpus = self._build_corpus()
        with self._start_daemon() as store:
            first, early, at_kill = self._train_until_kill(store, corpus)
        reference, in_memory = self._train_in_memory(corpus)
        losses_equal = equal_losses(first[: settings.reference_steps], reference)
        weights_equal = early == in_memory
        self._progress.fact(f"losses bitwise equal: {losses_equal}; expert weights bitwise equal: {weights_equal}")
        self._kill_daemon()
        with self._daemon.connect() as store:
            second = self._resume(store, corpus)
            repeated = [trace for trace in second.traces if trace.step <= settings.kill_step]
            resume_exact = equal_losses(first[settings.resume_step :], repeated) and at_kill == second.at_kill
            self._progress.fact(f"steps {settings.resume_step + 1} to {settings.kill_step} repeated bitwise: {resume_exact}")
            generation = self._generate(store, corpus)
        self._progress.chapter(7, "Report")
        return DemoReport(
            settings=settings, corpus_bytes=corpus.total_bytes, corpus_sha256=corpus.sha256, first=tuple(first),
            resumed=tuple(second.traces), reference=tuple(reference), losses_bitwise_equal=losses_equal,
            weights_bitwise_equal=weights_equal, resume_exact=resume_exact, valid_loss=second.valid_loss,
            host_budget_bytes=self._budget_bytes, host_peak_bytes=self._peak_bytes, placement=second.placement,
            routed_tokens=second.routed_tokens, generation=generation, seconds=time.monotonic() - started_s,
        )  # fmt: skip

    # --- the steps

    def _build_corpus(self) -> Corpus:
        self._progress.chapter(1, "Corpus out of what is installed")
        size_bytes = self._settings.corpus_bytes
        with self._progress.counting("bytes", size_bytes) as advance:
            corpus = open_corpus(self._directory / CORPUS, size_bytes=size_bytes, on_progress=lambda _, count: advance(count))
        shares = ", ".join(f"{text.name} {text.train.numel() / 1e6:.1f} MB" for text in corpus.domains)
        self._progress.fact(f"{corpus.total_bytes / 1e6:.1f} MB: {shares}; whole files held out")
        return corpus

    def _start_daemon(self) -> ps.Store:
        shape, budget_bytes = self._settings.shape, self._settings.host_budget_bytes
        self._progress.chapter(2, "Daemon with a host budget of an eighth of the experts' training state")
        store = self._daemon.connect()
        self._progress.fact(
            f"{store.address}, {format_size(budget_bytes)} of host memory for {format_size(shape.expert_state_bytes)} of state"
        )
        return store

    def _train_until_kill(self, store: ps.Store, corpus: Corpus) -> tuple[list[StepTrace], Digests, Digests]:
        """Trains the first pass; gives its traces, and the experts' digests where the reference will end and at its own end."""
        settings = self._settings
        self._progress.chapter(3, f"Training out of the store, {settings.tokens_per_step} tokens a step")
        run = StoredRun.begin(store, settings, corpus, directory=self._directory / CHECKPOINTS)
        traces = self._train(run, store, last_step=settings.reference_steps)
        early = run.place.digests()
        traces += self._train(run, store, last_step=settings.kill_step)
        return traces, early, run.place.digests()

    def _train_in_memory(self, corpus: Corpus) -> tuple[list[StepTrace], Digests]:
        settings = self._settings
        self._progress.chapter(4, f"The first {settings.reference_steps} steps again, everything in memory, torch's fused AdamW")
        place = ResidentPlace(settings.shape, seed=settings.seed)
        trainer = Trainer(settings, corpus, place)
        traces = []
        with self._bar(first_step=0, last_step=settings.reference_steps) as show:
            for _ in range(settings.reference_steps):
                started_s = time.monotonic()
                result = trainer.train_step()
                traces.append(StepTrace(result.step, result.loss, time.monotonic() - started_s))
                show(traces[-1])
        return traces, place.digests()

    def _kill_daemon(self) -> None:
        settings = self._settings
        self._progress.chapter(5, f"SIGKILL to the daemon after step {settings.kill_step}, then resume at {settings.resume_step}")
        self._daemon.kill()

    def _resume(self, store: ps.Store, corpus: Corpus) -> SecondPass:
        """Trains from the last commit to the end."""
        settings = self._settings
        run = StoredRun.resume(store, settings, corpus, directory=self._directory / CHECKPOINTS)
        traces = self._train(run, store, last_step=settings.kill_step)
        digests = run.place.digests()
        traces += self._train(run, store, last_step=settings.steps)
        placement = ExpertTiers.of(run.namespace.residency())
        routed_tokens = tuple(tuple(row) for row in run.trainer.routed_tokens.tolist())
        shape = settings.shape
        batches = held_out_batches(corpus, count=VALIDATION_BATCHES, batch=settings.batch, context=shape.context)
        valid_loss = run.trainer.evaluate(batches)
        run.namespace.close()
        return SecondPass(traces, digests, valid_loss, placement, routed_tokens)

    def _generate(self, store: ps.Store, corpus: Corpus) -> Generation:
        settings = self._settings
        self._progress.chapter(6, f"Text through a ring of {settings.ring_slots} layer slots for {settings.shape.layers} layers")
        with store.open_namespace(NAMESPACE, min_lease_slots=settings.ring_slots) as namespace:
            step = namespace.view_step
            assert step is not None, "a reader stands on a committed step"
            checkpoints = CheckpointFolder(self._directory / CHECKPOINTS)
            dense = checkpoints.load(CheckpointName.from_extra(namespace.extra(step)))
            with self._progress.counting("bytes of text", settings.generated_bytes) as advance:
                return generate(
                    namespace, dense, corpus, settings,
                    count_resident_bytes=lambda: resident_param_bytes(self._look(store), NAMESPACE),
                    on_byte=lambda: advance(1),
                )  # fmt: skip

    # --- what several steps need

    def _train(self, run: StoredRun, store: ps.Store, *, last_step: int) -> list[StepTrace]:
        """Trains up to `last_step`; gives a trace for each step. The bytes of a commit count for its step."""
        traces: list[StepTrace] = []
        before = Traffic.of(self._look(store), NAMESPACE)
        with self._bar(first_step=run.step, last_step=last_step) as show:
            while run.step < last_step:
                started_s = time.monotonic()
                result = run.train_step()
                after = Traffic.of(self._look(store), NAMESPACE)
                traces.append(StepTrace(result.step, result.loss, time.monotonic() - started_s, after - before))
                before = after
                show(traces[-1])
                if run.is_commit_due:
                    self._progress.fact(f"step {result.step} committed · {figures(traces[-1], self._settings.tokens_per_step)}")
        return traces

    @contextmanager
    def _bar(self, *, first_step: int, last_step: int) -> Iterator[Callable[[StepTrace], None]]:
        tokens = self._settings.tokens_per_step
        with self._progress.training(first_step=first_step, last_step=last_step, tokens_per_step=tokens) as show:
            yield show

    def _look(self, store: ps.Store) -> dict[str, object]:
        """Reads the daemon's counters, and remembers the most memory seen."""
        stats = store.stats()
        memory = Memory.of(stats)
        self._peak_bytes = max(self._peak_bytes, memory.peak_bytes)
        self._budget_bytes = memory.budget_bytes
        return stats
