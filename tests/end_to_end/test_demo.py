"""The demo against the real daemon: whole, with the trainer killed, and interrupted."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from paramstore.demo.corpus import open_corpus
from paramstore.demo.run import StoredRun
from paramstore.demo.service import DemoDaemon
from paramstore.demo.settings import quick
from paramstore.demo.training import ResidentPlace, Trainer, repeatable
from paramstore.holder import daemon_of

pytestmark = pytest.mark.slow

COMMAND = (sys.executable, "-m", "paramstore", "demo", "--quick")

TRAINER = """
import sys
from pathlib import Path
from paramstore.demo.corpus import open_corpus
from paramstore.demo.run import StoredRun
from paramstore.demo.service import DemoDaemon
from paramstore.demo.settings import quick
from paramstore.demo.training import repeatable

directory, settings = Path(sys.argv[1]), quick()
corpus = open_corpus(directory / "corpus", size_bytes=settings.corpus_bytes)
daemon = DemoDaemon(directory / "store", host_budget_bytes=settings.host_budget_bytes)
with repeatable(threads=settings.threads), daemon.connect() as store:
    run = StoredRun.begin(store, settings, corpus, directory=directory / "checkpoints")
    while True:
        result = run.train_step()
        print(result.step, result.loss.hex(), flush=True)
"""


@pytest.fixture
def daemon(tmp_path):
    daemon = DemoDaemon(tmp_path / "store", host_budget_bytes=quick().host_budget_bytes)
    yield daemon
    daemon.stop()


def test_quick_demo_proves_its_claims_and_leaves_no_process(tmp_path, daemon):
    ended = subprocess.run([*COMMAND, "--json", "--dir", str(tmp_path)], capture_output=True, text=True, timeout=280, check=False)
    assert ended.returncode == 0, ended.stderr
    report = json.loads(ended.stdout)
    assert report["losses_bitwise_equal"] is True
    assert report["weights_bitwise_equal"] is True
    assert report["resume_exact"] is True
    assert 0 < report["host_peak_bytes"] <= report["host_budget_bytes"] == report["expert_state_bytes"] // 8
    assert 0 < report["ring_resident_fraction"] < 1
    assert 0 < report["hit_rate"]["host"] < 1
    assert min(report["bytes_moved"].values()) > 0
    assert len(report["generated_text"]) > 100
    assert json.loads((tmp_path / "report.json").read_text()) == report
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")
    assert len(list((tmp_path / "checkpoints").iterdir())) == 2
    assert daemon_of(daemon.directory) is None


@pytest.mark.soak  # tests/end_to_end/test_finetune.py kills a trainer in every run
def test_trainer_killed_while_the_daemon_lives_ends_the_same_way(tmp_path, daemon):
    settings = quick()
    first = _train_and_die(tmp_path, last_step=settings.kill_step)
    pid = daemon_of(daemon.directory)
    assert pid is not None, "the daemon outlives the trainer that started it"
    corpus = open_corpus(tmp_path / "corpus", size_bytes=settings.corpus_bytes)
    with repeatable(threads=settings.threads):
        with daemon.connect() as store:
            run = StoredRun.resume(store, settings, corpus, directory=tmp_path / "checkpoints")
            assert run.step == settings.resume_step
            resumed = {result.step: result.loss for result in (run.train_step() for _ in range(settings.steps - run.step))}
            digests = run.place.digests()
        assert daemon_of(daemon.directory) == pid, "the same daemon all the time"
        place = ResidentPlace(settings.shape, seed=settings.seed)
        trainer = Trainer(settings, corpus, place)
        uninterrupted = {result.step: result.loss for result in (trainer.train_step() for _ in range(settings.steps))}
    assert first == {step: uninterrupted[step] for step in range(1, settings.kill_step + 1)}
    assert resumed == {step: uninterrupted[step] for step in range(settings.resume_step + 1, settings.steps + 1)}
    assert digests == place.digests()


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.soak)])
def test_interrupted_demo_leaves_no_process(tmp_path, daemon, number):
    environment = {**os.environ, "HOME": "/nonexistent"}
    with subprocess.Popen(
        [*COMMAND, "--dir", str(tmp_path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if "committed" in line:
                break
        assert daemon_of(daemon.directory) is not None
        process.send_signal(number)
        out, _ = process.communicate(timeout=100)
    assert process.returncode == -number
    assert out == ""
    assert daemon_of(daemon.directory) is None


def _train_and_die(directory: Path, *, last_step: int) -> dict[int, float]:
    """A trainer's losses by step up to `last_step`, when it is killed."""
    losses: dict[int, float] = {}
    with subprocess.Popen([sys.executable, "-c", TRAINER, str(directory)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            step, loss = line.split()
            losses[int(step)] = float.fromhex(loss)
            if int(step) == last_step:
                process.kill()
                break
    return losses
