"""The report says what is promised, under the names that are promised, and fails on any difference."""

import io
import json
from dataclasses import replace

import pytest
from rich.console import Console

KEYS = {
    "losses_bitwise_equal", "weights_bitwise_equal", "resume_exact", "host_budget_bytes", "host_peak_bytes", "expert_state_bytes",
    "ring_resident_fraction", "hit_rate", "bytes_moved", "generated_text",
}  # fmt: skip


def test_promised_keys_are_there(report):
    assert report.to_dict().keys() >= KEYS


def test_json_is_what_is_written(report, tmp_path):
    report.write(tmp_path / "report.json")
    assert json.loads((tmp_path / "report.json").read_text()) == json.loads(json.dumps(report.to_dict()))
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]


@pytest.mark.parametrize("claim", ["losses_bitwise_equal", "weights_bitwise_equal", "resume_exact"])
def test_any_difference_is_a_failure(report, claim):
    assert report.is_ok
    failed = replace(report, **{claim: False})
    assert not failed.is_ok
    assert "DIFFERENT" in rendered(failed)


def test_committed_traces_have_each_step_once(report):
    assert [trace.step for trace in report.committed_traces] == list(range(1, 61))
    resumed = {id(trace) for trace in report.resumed}
    assert all((id(trace) in resumed) == (trace.step > 50) for trace in report.committed_traces)


def test_bytes_moved_count_the_steps_that_were_lost_too(report):
    steps = len(report.first) + len(report.resumed)
    assert steps == 67
    assert report.to_dict()["bytes_moved"]["nvme_read"] == sum(
        trace.traffic.nvme_read_bytes for trace in (*report.first, *report.resumed)
    )


def test_table_tells_the_same(report):
    text = rendered(report)
    assert "bitwise equal (steps 1 to 10)" in text
    assert "killed after step 57, resumed at 50" in text
    assert "648 MiB" in text
    assert "25% of the experts' weights resident" in text


def test_text_of_all_domains_is_in_the_generated_text(report):
    text = report.to_dict()["generated_text"]
    assert "[python] import this" in text
    assert "[prose] Once upon" in text


def rendered(report) -> str:
    stream = io.StringIO()
    Console(file=stream, width=160, color_system=None).print(report.table())
    return stream.getvalue()
