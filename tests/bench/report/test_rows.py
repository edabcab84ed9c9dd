"""What a row and a report promise: verdicts, targets, and JSON that comes back as it went out."""

from __future__ import annotations

import json
import math

import pytest

from paramstore.bench.report.rows import Report, Row, Target, Verdict, decode, encode, judged


def row(**values: object) -> Row:
    given: dict[str, object] = {"name": "volume to host", "subject": "paramstore", "value": 3.5, "unit": "GB/s", **values}
    return judged(Row(**given))  # type: ignore[arg-type]


AT_LEAST = Target("ratio", ">=", 0.93)


def test_row_without_target_has_no_verdict() -> None:
    assert row().holds is None
    assert row().verdict is Verdict.NO_TARGET


@pytest.mark.parametrize(("ratio", "holds"), [(0.93, True), (0.94, True), (0.9299, False), (math.nan, False)])
def test_ratio_at_or_above_its_target_holds(ratio: float, holds: bool) -> None:
    assert row(ratio=ratio, target=AT_LEAST).holds is holds


def test_row_without_the_ratio_its_target_speaks_of_does_not_hold() -> None:
    assert row(ratio=None, target=AT_LEAST).holds is False


def test_target_on_the_value_looks_at_the_value() -> None:
    target = Target("value", "<=", 200.0)
    assert row(value=200.0, ratio=0.1, target=target).holds is True
    assert row(value=200.1, ratio=9.0, target=target).verdict is Verdict.SHORT


def test_miss_inside_the_spread_of_its_pairs_is_told_from_a_real_one() -> None:
    assert row(ratio=0.92, ratio_min=0.90, ratio_max=0.94, target=AT_LEAST).verdict is Verdict.WITHIN_SPREAD
    assert row(ratio=0.90, ratio_min=0.88, ratio_max=0.92, target=AT_LEAST).verdict is Verdict.SHORT
    assert row(ratio=0.95, ratio_min=0.80, ratio_max=0.99, target=AT_LEAST).verdict is Verdict.HOLDS


def report(rows: list[Row]) -> Report:
    return Report(machine={"cpu": "x", "cores": 2}, commit="c", command="bench", date="2026-01-01", seconds=1.5, rows=rows)


def test_report_comes_back_from_its_json() -> None:
    whole = report([row(ratio=0.95, target=AT_LEAST, parts={"ours_s": 0.2})])
    assert decode(encode(whole)) == whole


def test_json_has_the_names_that_readers_of_results_rely_on() -> None:
    document = json.loads(encode(report([row(ratio=0.95, target=AT_LEAST)])))
    assert set(document) == {"machine", "commit", "command", "date", "seconds", "rows"}
    relied_on = {"name", "record_bytes", "value", "unit", "limit", "ratio", "ratio_min", "ratio_max", "target", "holds"}
    assert relied_on | {"parts"} <= set(document["rows"][0])


def test_short_rows_are_those_whose_target_does_not_hold() -> None:
    short = row(ratio=0.5, target=AT_LEAST)
    assert report([row(), row(ratio=0.95, target=AT_LEAST), short]).short_rows == [short]
