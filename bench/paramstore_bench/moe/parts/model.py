"""Makes the rows of the model of a layer in parts: beside what was measured, and for more ranks than there are, by simulation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from statistics import fmean

from paramstore.bench.report.rows import SUBJECT, Row, Target, judged
from paramstore_bench.moe.parts.task import PartsFound, PartsRun
from paramstore_bench.moe.sizes import RANKS
from paramstore_client.moe.granularity.model import Curve, passed
from paramstore_client.moe.pipeline_plan import SPLITS

ERROR_TARGETS = {"experts": Target("value", "<=", 0.22), "tokens": Target("value", "<=", 0.15)}
CHOICE_TARGET = Target("ratio", "<=", 1.10)
NODE_RANKS = 2
SIMULATED_RANKS = 8, 16, 32, 64
COUNTS = 1, 2, 4, 8


def model_rows(runs: Mapping[str, PartsRun]) -> Iterator[Row]:
    """How far the model is off by each way to split, and what the choice of its search costs. runs: by case."""
    for split in SPLITS:
        errors = _errors(runs, split)
        yield judged(
            Row(
                name="model of a layer in parts", case=f"{len(errors)} points, parts of {split}", subject=SUBJECT,
                value=fmean(errors), unit="mean error", target=ERROR_TARGETS[split], parts={"worst": max(errors)},
            )
        )  # fmt: skip
        for case, run in runs.items():
            found = _of(run, split)
            best_s = min(found[0].one_part_s, *(each.seconds for each in found))
            chosen_s = next((each.seconds for each in found if each.is_chosen), found[0].one_part_s)
            yield judged(
                Row(
                    name="chosen number of parts", case=f"{case}, parts of {split}", subject=SUBJECT, value=chosen_s, unit="s",
                    against="the best number", limit=best_s, ratio=chosen_s / best_s, target=CHOICE_TARGET,
                    parts={f"{each.parts}_parts_expected_s": each.expected_s for each in found},
                )
            )  # fmt: skip


def simulated_rows(runs: Mapping[str, PartsRun]) -> Iterator[Row]:
    """What parts would gain on more nodes of as many ranks, each with a link of its own: a rank sends as much, more of it to other
    nodes, in more messages."""
    off = fmean([error for split in SPLITS for error in _errors(runs, split)])
    for case, run in runs.items():
        for ranks in SIMULATED_RANKS:
            seconds = {parts: _simulated_s(run, parts, ranks=ranks) for parts in COUNTS}
            best = min(seconds, key=seconds.__getitem__)
            yield Row(
                name="simulated: layer in parts", case=f"{case}, {ranks} ranks on {ranks // NODE_RANKS} nodes, {best} parts",
                subject=SUBJECT, value=seconds[best], unit="s", against="one part", limit=seconds[1],
                ratio=seconds[1] / seconds[best],
                note=f"simulated from what {RANKS} ranks measured, where the model is off by {off:.0%} in the mean",
            )  # fmt: skip


def _simulated_s(run: PartsRun, parts: int, *, ranks: int) -> float:
    curve, sent_bytes = Curve(tuple((size, seconds) for size, seconds in run.curve)), run.curve[-1][0]
    few_s, more_s = sorted(curve.at(sent_bytes / smaller) for smaller in (16, 8))
    latency_s = max(0.0, 2 * few_s - more_s)  # where the line through both begins
    crossing = (1 - NODE_RANKS / ranks) / (1 - NODE_RANKS / RANKS)
    exchange_s = latency_s * (ranks - 1) / (RANKS - 1) + max(0.0, curve.at(sent_bytes / parts) - latency_s) * crossing
    return passed(parts, there_s=exchange_s, computing_s=run.compute_s / parts, back_s=exchange_s).seconds


def _errors(runs: Mapping[str, PartsRun], split: str) -> list[float]:
    return [abs(each.expected_s / each.seconds - 1) for run in runs.values() for each in _of(run, split)]


def _of(run: PartsRun, split: str) -> list[PartsFound]:
    return [each for each in run.found if each.split == split]
