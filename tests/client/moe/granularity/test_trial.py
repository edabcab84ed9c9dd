"""A trial finds the best of what it may choose where the model holds, and never stays with what loses by the clock."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

import pytest

from paramstore_client.moe.granularity.clock import Times
from paramstore_client.moe.granularity.model import Curve, passed
from paramstore_client.moe.granularity.trial import CALLS, FAILURES, GAIN, MOST_BEGUN, TURNS, PipelineChoice, Trial
from paramstore_client.moe.pipeline_plan import Pipeline, PipelineSearch, pipelines_of

BYTES = 1 << 22
MOST_CALLS = 100


@dataclass(frozen=True)
class Layer:
    """What a layer takes, as it is. exchange_s, latency_s: of all rows one way, and of each exchange. computing_s: of a forward; a
    backward takes twice as long. part_s: what each further part adds to computing. lost_s: what it costs beside all that the model
    knows."""

    exchange_s: float
    computing_s: float
    latency_s: float = 0.0
    part_s: float = 0.0
    lost_s: float = 0.0
    again_s: float = 0.0
    copy_s: float = 0.0

    @property
    def curve(self) -> Curve:
        return Curve(tuple((BYTES // parts, self.exchange_s / parts + self.latency_s) for parts in (16, 8, 4, 2, 1)))

    def times(self, pipeline: Pipeline) -> Times:
        parts, exchange_s = pipeline.parts, self.curve.at(BYTES / pipeline.parts)
        forward_s = self.computing_s + self.part_s * (parts - 1) + self.copy_s * pipeline.copies_rows
        backward_s = 2 * self.computing_s + self.part_s * (parts - 1) + self.again_s * pipeline.computes_again
        forward = passed(parts, there_s=exchange_s, computing_s=forward_s / parts, back_s=exchange_s)
        there_s = exchange_s * (1 + pipeline.sends_again)
        backward = passed(parts, there_s=there_s, computing_s=backward_s / parts, back_s=exchange_s)
        lost_s = self.lost_s * (parts - 1)
        return Times(forward.seconds + lost_s, forward_s, backward.seconds + lost_s, backward_s)


def _found(layer: Layer, options: PipelineSearch, *, least: int = 1, most: int = 8) -> tuple[PipelineChoice, Counter[Pipeline]]:
    """What a trial chooses, and which calls it took."""
    trial, calls = Trial(options, 1000, least=least, most=most, sent_bytes=BYTES, records=True), Counter[Pipeline]()
    while trial.choice is None and calls.total() < MOST_CALLS:
        if trial.awaits_curve:
            trial.note_exchanges(layer.curve)
        else:
            pipeline = trial.next()
            calls[pipeline] += 1
            trial.begin(pipeline)
            trial.note_call(pipeline, layer.times(pipeline))
    assert trial.choice is not None
    return trial.choice, calls


def _best(layer: Layer, pipelines: list[Pipeline]) -> float:
    return min(layer.times(pipeline).seconds for pipeline in pipelines)


@pytest.mark.parametrize("layer", [
    Layer(exchange_s=0.4, computing_s=0.3), Layer(exchange_s=0.1, computing_s=0.3, latency_s=0.02),
    Layer(exchange_s=1.0, computing_s=0.2),
    Layer(exchange_s=0.4, computing_s=0.3, part_s=0.03), Layer(exchange_s=0.2, computing_s=0.2, latency_s=0.05),
], ids=str)  # fmt: skip
def test_the_best_is_found_where_the_model_holds(layer: Layer) -> None:
    options = PipelineSearch(splits=("experts", "tokens"))
    choice, calls = _found(layer, options)
    pipelines = [pipeline for parts in (1, 2, 4, 8) for pipeline in pipelines_of(options, parts)]
    assert layer.times(choice.pipeline).seconds <= GAIN * _best(layer, pipelines)
    assert choice.pipeline.parts > 1
    expected = {each.pipeline: each.seconds for each in choice.estimates}
    for pipeline in pipelines:
        assert expected[pipeline] == pytest.approx(layer.times(pipeline).seconds, rel=0.02)
    assert calls[Pipeline()] == CALLS + TURNS
    assert "expected" in str(choice)


def test_what_loses_by_the_clock_does_not_stay() -> None:
    layer = Layer(exchange_s=0.4, computing_s=0.3, lost_s=0.5)
    choice, calls = _found(layer, PipelineSearch())
    assert choice.pipeline == Pipeline()
    assert any(pipeline.parts > 1 and count >= TURNS for pipeline, count in calls.items())
    assert " took " in choice.why


def test_nothing_is_tried_that_is_not_expected_to_win() -> None:
    choice, calls = _found(Layer(exchange_s=0.001, computing_s=0.3, part_s=0.01), PipelineSearch())
    assert choice.pipeline == Pipeline()
    assert calls.total() == 2 * CALLS
    assert "mostly computing" in choice.why


def test_a_search_among_one_pipeline_measures_no_exchange() -> None:
    choice, calls = _found(Layer(exchange_s=1.0, computing_s=1.0), PipelineSearch(most_parts=1), most=1)
    assert choice.pipeline == Pipeline()
    assert calls == {Pipeline(): CALLS}


@pytest.mark.parametrize(
    ("layer", "reuse"),
    [
        (Layer(exchange_s=0.4, computing_s=0.05, again_s=0.05, copy_s=0.1), "S3"),
        (Layer(exchange_s=0.02, computing_s=0.3, again_s=0.01, copy_s=0.4), "S4"),
    ],
)
def test_the_quickest_strategy_is_found(layer: Layer, reuse: str) -> None:
    options = PipelineSearch(reuses=("S4", "S3"))
    choice, _ = _found(layer, options)
    assert choice.pipeline.reuse == reuse
    pipelines = [pipeline for parts in (1, 2, 4, 8) for pipeline in pipelines_of(options, parts)]
    assert layer.times(choice.pipeline).seconds <= GAIN * _best(layer, pipelines)


def test_parts_are_searched_within_bounds() -> None:
    choice, _ = _found(Layer(exchange_s=1.0, computing_s=1.0), PipelineSearch(), least=2, most=4)
    assert {each.pipeline.parts for each in choice.estimates} == {2, 4}
    assert choice.pipeline == Pipeline(4)


def _trial() -> Trial:
    return Trial(PipelineSearch(), 1000, least=1, most=8, sent_bytes=BYTES, records=True)


def test_calls_that_end_late_or_never_hold_up_no_trial() -> None:
    layer, trial = Layer(exchange_s=0.4, computing_s=0.3), _trial()
    for _ in range(MOST_CALLS):
        begun = []
        for _ in range(24):  # a step's layers, forward
            begun.append(trial.next())
            trial.begin(begun[-1])
        for pipeline in begun[::2]:
            trial.note_call(pipeline, layer.times(pipeline))
        if trial.awaits_curve:
            trial.note_exchanges(layer.curve)
        if trial.choice is not None:
            break
    assert trial.choice is not None
    assert trial.choice.pipeline.parts > 1


def test_nothing_is_tried_any_more_where_no_call_ends_until_one_does() -> None:
    trial, begun = _trial(), []
    for _ in range(2 * MOST_BEGUN):
        begun.append(trial.next())
        trial.begin(begun[-1])
    assert begun[0] != begun[1]
    assert set(begun[MOST_BEGUN:]) == {Pipeline()}
    trial.note_call(Pipeline(), Times(1.0, 1.0))
    assert trial.next() != Pipeline()


def test_what_wins_in_most_turns_stays() -> None:
    layer, trial = Layer(exchange_s=0.4, computing_s=0.3), _trial()
    while trial.choice is None:
        if trial.awaits_curve:
            trial.note_exchanges(layer.curve)
        pipeline = trial.next()
        trial.begin(pipeline)
        is_disturbed = trial._tried is not None and trial._begun[pipeline] <= TURNS // 2 and pipeline.parts > 1
        times = layer.times(pipeline)
        trial.note_call(pipeline, replace(times, forward_s=times.forward_s + 10.0 * is_disturbed))
    assert trial.choice.pipeline.parts > 1


def test_what_fails_twice_is_left_out() -> None:
    layer, options = Layer(exchange_s=0.4, computing_s=0.3), PipelineSearch(reuses=("keep", "S1"))
    trial = Trial(options, 1000, least=1, most=8, sent_bytes=BYTES, records=True)
    failures = 0
    while trial.choice is None:
        if trial.awaits_curve:
            trial.note_exchanges(layer.curve)
            continue
        pipeline = trial.next()
        trial.begin(pipeline)
        if pipeline.reuse == "S1":
            failures += 1
            trial.note_failure(pipeline)
        else:
            trial.note_call(pipeline, layer.times(pipeline))
    assert failures == FAILURES
    assert trial.choice.pipeline.parts > 1
    assert {each.pipeline.reuse for each in trial.choice.estimates} == {"keep"}


def test_where_all_but_one_part_fails_that_is_chosen() -> None:
    trial, layer = _trial(), Layer(exchange_s=0.4, computing_s=0.3)
    while trial.choice is None:
        assert not trial.awaits_curve
        pipeline = trial.next()
        trial.begin(pipeline)
        if pipeline.parts > 1:
            trial.note_failure(pipeline)
        else:
            trial.note_call(pipeline, layer.times(pipeline))
    assert trial.choice.pipeline == Pipeline()
