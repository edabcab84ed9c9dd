"""The frame of a bench: options, one report whatever the rows say, the exit code, and nothing left behind."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from paramstore.bench.context import Bench
from paramstore.bench.report.rows import Row, Target, decode, judged
from paramstore.errors import CapacityError
from paramstore_bench import frame
from paramstore_bench.frame import Script, wait_policy


@pytest.fixture(autouse=True)
def signals_stay_those_of_the_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frame, "end_as_interrupt", lambda: None)


def row(value: float) -> Row:
    return judged(Row(name="work", subject="paramstore", value=value, unit="s", target=Target("value", "<=", 1.0)))


def ran(script: Script, tmp_path: Path, rows: Sequence[Row], *words: str, left_out: dict[str, str] | None = None) -> int:
    arguments = script.parser().parse_args(["--dir", str(tmp_path), "--out", str(tmp_path / "new" / "r.json"), *words])
    return script.run(arguments, lambda bench: rows, facts={"model": "small"}, left_out=left_out)


@pytest.mark.parametrize(("values", "code"), [((0.5, 1.0), 0), ((0.5, 2.0), 1)])
def test_the_report_is_written_and_printed_whatever_holds(
    values: tuple[float, ...], code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = Script("works", "What it does.", quick="less", words="CACHE")
    assert ran(script, tmp_path, [row(value) for value in values], "--quick", left_out={"peer": "not here"}) == code
    report = decode((tmp_path / "new" / "r.json").read_bytes())
    assert (report.command, [row.value for row in report.rows]) == ("python bench/bench_works.py CACHE --quick", list(values))
    assert (report.machine["model"], report.machine["left_out"]) == ("small", {"peer": "not here"})
    out = capsys.readouterr()
    assert "2 targets" in out.out
    assert "left out: peer: not here" in out.err
    assert "written: " in out.err


def test_a_bench_gets_an_empty_folder_that_is_gone_afterwards_and_the_picture_is_drawn(tmp_path: Path) -> None:
    drawn: list[Path] = []
    script = Script("works", None, draw=lambda report, file: drawn.append(file))
    seen: list[Path] = []

    def measure(bench: Bench) -> list[Row]:
        seen.append(bench.directory)
        assert list(bench.directory.iterdir()) == []
        (bench.directory / "something").touch()
        return []

    assert script.run(script.parser().parse_args(["--dir", str(tmp_path), "--out", str(tmp_path / "r.json")]), measure) == 0
    assert (seen[0].parent, seen[0].exists(), drawn) == (tmp_path, False, [tmp_path / "r.png"])


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [(CapacityError("no room"), 1, "bench_works: CapacityError: no room\n"), (KeyboardInterrupt(), 130, "")],
)
def test_what_ends_a_bench_is_its_exit_code_and_writes_no_report(
    error: BaseException, code: int, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = Script("works", None)

    def measure(bench: Bench) -> list[Row]:
        raise error

    assert script.run(script.parser().parse_args(["--dir", str(tmp_path), "--out", str(tmp_path / "r.json")]), measure) == code
    assert capsys.readouterr().err.endswith(said)
    assert list(tmp_path.iterdir()) == []


def test_an_interrupt_leaves_a_report_of_the_rows_before_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = Script("works", None)

    def measure(bench: Bench) -> Iterator[Row]:
        yield row(0.5)
        raise KeyboardInterrupt

    out = tmp_path / "r.json"
    assert script.run(script.parser().parse_args(["--dir", str(tmp_path), "--out", str(out)]), measure) == 130
    assert not out.exists()
    report = decode((tmp_path / "r-interrupted.json").read_bytes())
    assert ([found.value for found in report.rows], report.machine["left_out"]) == ([0.5], {"what comes after": "an interrupt"})
    assert "left out: what comes after: an interrupt" in capsys.readouterr().err


def test_only_a_bench_that_knows_a_quick_run_has_the_option(tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        Script("works", None).parser().parse_args(["--quick"])
    assert Script("works", None).parser().parse_args([]).quick is False
    assert Script("works", None, quick="less").parser().parse_args(["--quick"]).quick is True


@pytest.mark.parametrize(("out", "problem"), [("r.png", "it is the JSON file"), ("/proc/self/r.json", "--out /proc/self/r.json: ")])
def test_a_file_that_cannot_be_written_is_refused_before_anything_is_measured(
    out: str, problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = Script("works", None)
    assert script.run(script.parser().parse_args(["--out", str(tmp_path / out)]), lambda bench: pytest.fail("measured")) == 2
    assert problem in capsys.readouterr().err


def test_a_run_says_how_threads_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    assert wait_policy() == {"OMP_WAIT_POLICY": "PASSIVE"}
    monkeypatch.delenv("OMP_WAIT_POLICY")
    assert wait_policy() == {"OMP_WAIT_POLICY": ""}
