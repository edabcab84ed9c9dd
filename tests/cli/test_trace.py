"""`paramstore trace`: tables, JSON and pictures of replays; what is wrong is told in one line, before any work."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paramstore.core.schema import Schema
from paramstore.core.trace import Trace, TraceEvent, TraceEventKind, TraceHeader, unpack_trace

Run = Callable[..., int]
Capture = pytest.CaptureFixture[str]
TRACES = Path(__file__).parents[2] / "bench" / "traces"
ACQUIRE, STEP = TraceEventKind.ACQUIRE, TraceEventKind.STEP


def served(*, tokens: tuple[int, ...] = (), steps: int = 6) -> Trace:
    schema = Schema.param({"w": ((4, 4), "float32")})
    events = [
        event for step in range(steps)
        for event in (TraceEvent(ACQUIRE, 0, (step % 3, 3 + step % 5), tokens), TraceEvent(STEP, 0, ()))
    ]  # fmt: skip
    return Trace(TraceHeader("toy", schema.describe(), [0], 8, "by hand"), tuple(events))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    made = tmp_path / "toy.trace"
    made.write_bytes(served(tokens=(3, 1)).pack())
    return made


def said(capsys: Capture) -> str:
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err


def test_help_loads_neither_torch_nor_matplotlib_nor_the_simulator(modules_of: Callable[..., set[str]]) -> None:
    for words in (("trace", "--help"), ("trace", "replay", "--help"), ("trace", "plot", "--help")):
        modules = modules_of(*words)
        assert not {name.partition(".")[0] for name in modules} & {"torch", "matplotlib", "numpy", "transformers", "rich"}
        assert not any(name.startswith("paramstore.sim") for name in modules)


def test_a_replay_loads_no_torch(file: Path, modules_of: Callable[..., set[str]]) -> None:
    assert not {"torch", "matplotlib", "lmdb"} & modules_of("trace", "replay", str(file), "--slots", "4")


def test_a_table_has_every_policy_at_every_size(file: Path, paramstore: Run, capsys: Capture) -> None:
    assert paramstore("trace", "replay", str(file), "--slots", "4,8") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "toy: 6 steps, 6 dispatches, 12 uses of 1 x 8 experts; tokens: 24, each choice of an expert counted"
    assert lines[3].split() == ["slots", "share", "schedule", "decayed_lfu", "lru", "lifo_inactive", "ring", "algorithm2", "belady"]
    assert [line.split()[:2] for line in lines[4:]] == [["4", "50.0%"], ["8", "100.0%"]]
    assert lines[5].split()[2:] == ["0.667"] * 7, "eight experts, each missing once of twelve uses"


def test_json_has_everything_and_times_only_from_a_rate(file: Path, paramstore: Run, capsys: Capture) -> None:
    words = ("trace", "replay", str(file), "--shares", "0.5", "--policy", "lru", "--json")
    assert paramstore(*words) == 0
    plain = json.loads(capsys.readouterr().out)
    assert plain["trace"] | {"record_bytes": 0} == {
        "name": "toy", "how": "by hand", "layers": 1, "experts": 8, "record_bytes": 0, "steps": 6, "dispatches": 6, "uses": 12,
        "tokens": 24,
    }  # fmt: skip
    assert [(point["policy"], point["slots"]) for point in plain["points"]] == [("lru", 4), ("belady", 4)]
    assert plain["cost"] is None
    assert not any("step_s" in point for point in plain["points"])
    assert paramstore(*words, "--load-rate", "1MB/s", "--compute-ms", "2") == 0
    timed = json.loads(capsys.readouterr().out)
    for point in timed["points"]:
        assert point["step_s"] == pytest.approx(point["bytes_moved"] / 6 / 1e6 + 0.002)
    assert timed["cost"] == {"bytes_per_s": 1e6, "source": "1MB/s", "compute_s": 0.002}


def test_a_rate_is_that_of_the_nearest_records_of_a_bench(file: Path, paramstore: Run, capsys: Capture) -> None:
    tiers = TRACES.parent / "results" / "tiers-2026-11-21.json"
    assert paramstore("trace", "replay", str(file), "--slots", "4", "--json", "--load-rate", str(tiers)) == 0
    cost: dict[str, Any] = json.loads(capsys.readouterr().out)["cost"]
    rates = [
        row["value"] * 1e9 for row in json.loads(tiers.read_text())["rows"]
        if (row["name"], row["subject"]) == ("volume to host", "paramstore") and row["record_bytes"] < 14e6
    ]  # fmt: skip
    assert cost["bytes_per_s"] in rates
    assert "records of 13 MB" in cost["source"]


def test_a_trace_without_tokens_is_replayed_and_says_so(tmp_path: Path, paramstore: Run, capsys: Capture) -> None:
    (tmp_path / "a.trace").write_bytes(served().pack())
    assert paramstore("trace", "replay", str(tmp_path / "a.trace"), "--slots", "4") == 0
    assert "tokens: not counted" in capsys.readouterr().out
    assert paramstore("trace", "replay", str(tmp_path / "a.trace"), "--slots", "4", "--json") == 0
    assert json.loads(capsys.readouterr().out)["trace"]["tokens"] is None


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "No such file or directory: `paramstore trace record` makes a trace"),
        (b"", "this is no trace"),
        (b"\x80\x04 a model", "this is no trace: it begins with"),
        (served().pack().replace(b"trace 1", b"trace 4"), "a newer paramstore has written it"),
        (served().pack()[:-4], "this is no trace: "),
        (served().pack()[:-9] + b"\xff" + served().pack()[-8:], "this is no trace: "),
        (served(steps=0).pack(), "trace 'toy' uses no expert of 8: there is nothing to replay"),
    ],
)
def test_what_is_no_trace_ends_with_a_line(
    content: bytes | None, words: str, tmp_path: Path, paramstore: Run, capsys: Capture
) -> None:
    path = tmp_path / "a.trace"
    if content is not None:
        path.write_bytes(content)
    assert paramstore("trace", "replay", str(path)) == 2
    told = said(capsys)
    assert words in told
    assert told.startswith("paramstore: ConfigError: ")
    assert told.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("--slots", "0"), "slots=0: give a whole number from 2 to 8"),
        (("--slots", "9"), "slots=9: give a whole number from 2 to 8"),
        (("--slots", "4,many"), "--slots 4,many: give numbers with commas between them"),
        (("--shares", "0"), "give shares of the 8 experts, above 0 and at most 1"),
        (("--shares", "1.5"), "give shares of the 8 experts, above 0 and at most 1"),
        (("--slots", "4", "--shares", "0.5"), "slots and shares are both given"),
        (("--policy", "fifo"), "'schedule' or 'decayed_lfu' or 'lru' or 'lifo_inactive' or 'ring' or 'algorithm2' or 'belady'"),
        (("--place", "gpu"), "give 'reader' or 'daemon'"),
        (("--load-rate", "fast"), "give a rate, as 3GiB/s, or what `paramstore bench tiers --json` has printed"),
        (("--load-rate", "0/s"), "give more than 0, as 3GiB/s"),
        (("--load-rate", "3 parsec/s"), "write a number and one of"),
        (("--compute-ms", "3"), "--compute-ms without --load-rate"),
    ],
)
def test_wrong_options_end_with_a_line(
    words: tuple[str, ...], problem: str, file: Path, paramstore: Run, capsys: Capture
) -> None:
    assert paramstore("trace", "replay", str(file), *words) == 2
    assert problem in said(capsys)


def test_a_picture_that_cannot_be_written_is_refused_before_the_replay(file: Path, paramstore: Run, capsys: Capture) -> None:
    for name, problem in (("no/a.png", "cannot be written"), ("a.gif9", "the suffix chooses the format")):
        out = file.parent / name
        assert paramstore("trace", "plot", str(file), "--out", str(out)) == 2
        assert f"--out {out}: {problem}" in said(capsys)


@pytest.mark.slow
def test_a_picture_is_drawn(file: Path, paramstore: Run, capsys: Capture) -> None:
    out = file.with_suffix(".png")
    assert paramstore("trace", "plot", str(file), "--out", str(out), "--load-rate", "1GiB/s", "--compute-ms", "1") == 0
    assert out.read_bytes().startswith(b"\x89PNG")
    assert capsys.readouterr().out == ""


@pytest.mark.slow
def test_an_interrupt_ends_a_replay_by_its_signal_and_without_a_traceback() -> None:
    words = ("paramstore", "trace", "replay", str(TRACES / "decode-1.trace"), "--uses", "0")
    command = [sys.executable, "-X", "importtime", "-m", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        while "paramstore.sim.sweep" not in process.stderr.readline():  # the last of the imports, after `end_as_interrupt`
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGINT
    assert out == ""
    assert "Traceback" not in err


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A tiny checkpoint with a tokenizer of four words."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from paramstore_testkit.training.saved_models import save_stock

    path = save_stock("mixtral", tmp_path / "tiny")
    words = Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1, "b": 2, "c": 3}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]").save_pretrained(path)
    return path


@pytest.mark.slow
def test_a_checkpoint_is_recorded_and_replayed(checkpoint: Path, tmp_path: Path, paramstore: Run, capsys: Capture) -> None:
    from paramstore_client.hf.compat import modeling
    from paramstore_testkit.processes.forked_daemon import ForkedDaemon

    modeling.transformers().logging.enable_progress_bar()  # as it is where nothing else ran before
    capsys.readouterr()
    out = tmp_path / "tiny.trace"
    with ForkedDaemon(tmp_path / "store", "--host-budget", "64MiB") as daemon:
        words = ("trace", "record", str(checkpoint), str(out), "a b c a", "--tokens", "5", "--socket", daemon.address)
        assert paramstore(*words) == 0
        shown = capsys.readouterr()
        assert "tiny.trace: " in shown.out
        assert "Loading" not in shown.err
    trace = unpack_trace(out.read_bytes())
    visits = [event for event in trace.events if event.kind is ACQUIRE]
    assert 1 <= trace.steps <= 5
    assert len(visits) == trace.steps * len(trace.header.layers)
    top = json.loads((checkpoint / "config.json").read_text())["num_experts_per_tok"]
    assert [sum(event.tokens) for event in visits] == [4 * top] * 2 + [top] * (len(visits) - 2), "a prompt of four, then one each"
    assert paramstore("trace", "replay", str(out), "--slots", "4") == 0
    assert capsys.readouterr().out.startswith(f"tiny: {trace.steps} steps")


@pytest.mark.slow
def test_a_recording_that_cannot_be_is_refused_first(checkpoint: Path, tmp_path: Path, paramstore: Run, capsys: Capture) -> None:
    out = str(tmp_path / "a.trace")
    for words, code, problem in (
        ((str(checkpoint), str(tmp_path / "no" / "a.trace")), 2, "FILE .*: cannot be written"),
        ((str(tmp_path / "none"), out), 1, "CheckpointError"),
        ((str(checkpoint), out, "--socket", f"unix://{tmp_path}/none"), 3, "StoreUnavailable"),
    ):
        assert paramstore("trace", "record", *words) == code
        assert re.search(problem, said(capsys))
    assert not Path(out).exists()
