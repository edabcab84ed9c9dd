"""Expert-parallel ranks against a real daemon: what goes wrong on one, all learn in time, and the job goes on."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from paramstore_client import connect, hf
from paramstore_testkit.processes.daemon_process import QUIET, DaemonProcess
from paramstore_testkit.processes.forked_daemon import ForkedDaemon
from paramstore_testkit.training.moe_families import tiny_config
from paramstore_testkit.training.parallel_generate import NEW_TOKENS, prompt
from paramstore_testkit.training.parallel_rank import FAULTS, LIMIT_S, PLACES

pytestmark = pytest.mark.slow

RANKS = 3
PROGRAM = "paramstore_testkit.training.parallel_rank"
GENERATES = "paramstore_testkit.training.parallel_generate"
WAIT_S = 100.0


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[DaemonProcess]:
    settings = {**QUIET, "PARAMSTORE_WAIT_TIMEOUT_S": f"{LIMIT_S:g}"}
    with ForkedDaemon(tmp_path / "store", "--host-budget", "64MiB", environment=settings) as daemon:
        yield daemon


def run(daemon: DaemonProcess, start: str, fault: str = "none", victim: int = 1) -> dict[int, dict[str, Any]]:
    """Starts a job's ranks anew; gives what each said that ended by itself."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", PROGRAM, daemon.address, str(port), str(rank), str(RANKS), start, fault, str(victim)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
        )
        for rank in range(RANKS)
    ]  # fmt: skip
    said = {}
    try:
        for rank, process in enumerate(ranks):
            if rank == victim and fault.startswith(("kill", "stop")):
                continue
            out, err = process.communicate(timeout=WAIT_S)
            assert process.returncode == 0, err
            said[rank] = json.loads(out)
    finally:
        for process in ranks:
            process.kill()
            process.communicate(timeout=WAIT_S)
    if fault.startswith("kill"):
        assert ranks[victim].returncode == -signal.SIGKILL
    return said


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The digest of the experts of a job in which nothing happens."""
    directory = tmp_path_factory.mktemp("undisturbed")
    with ForkedDaemon(directory / "store", "--host-budget", "64MiB", environment=QUIET) as daemon:
        (digest,) = {told["digest"] for told in run(daemon, "first").values()}
    return str(digest)


CASES = [(fault, 1) for fault in FAULTS if fault != "none"] + [("stop in dispatch", 0)]
"""Rank 0 keeps the store in which the roll is called."""
ALWAYS = {("kill in backward", 1), ("stop in dispatch", 0)}


@pytest.mark.parametrize(
    ("fault", "victim"), [pytest.param(*case, marks=[] if case in ALWAYS else [pytest.mark.soak]) for case in CASES]
)
def test_what_happens_to_one_rank_the_others_learn_and_the_job_goes_on_to_the_same_experts(
    daemon: DaemonProcess, undisturbed: str, fault: str, victim: int
) -> None:
    said = run(daemon, "first", fault, victim)
    is_lost = fault.startswith("kill")
    named = f"rank {victim}" if victim else "one of them"
    name_it = {rank for rank, told in said.items() if named in told["message"] or rank == victim}
    for rank, told in said.items():
        # The first to give a rank up that came too late ends, and is gone for the others then.
        gone = {other for other in name_it - {rank} if not is_lost and f"rank {other} is gone" in told["message"]}
        assert told["error"] in ({"RankLost"} if is_lost or gone else {"StepMismatch", "RankLost"}), told
        assert rank in name_it or gone, told
        assert told["seconds"] < (LIMIT_S if is_lost else 3 * LIMIT_S), told
        assert told["leased"] == 0, told
    with connect(daemon.address) as store:
        (known,) = store.namespaces()
        assert known["committed_step"] == 1
    again = run(daemon, "second")
    assert {told.get("digest") for told in again.values()} == {undisturbed}, again


def test_experts_that_are_placed_anew_between_steps_end_as_those_that_stay(daemon: DaemonProcess, undisturbed: str) -> None:
    said = run(daemon, "first", PLACES)
    assert {told.get("digest") for told in said.values()} == {undisturbed}, said
    (chosen,) = {json.dumps(told["chosen"]) for told in said.values()}
    assert json.loads(chosen).keys() == {"0", "1"}


def test_ranks_that_serve_one_model_generate_what_the_unmodified_one_does(tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint"
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config("qwen3_moe"))
    model.save_pretrained(checkpoint)
    with ForkedDaemon(tmp_path / "store", "--host-budget", "64MiB", environment=QUIET) as daemon:
        with connect(daemon.address) as store:
            served = hf.from_pretrained(AutoModelForCausalLM, checkpoint, store=store, mode="infer", name="served")
            del served
        arguments = (daemon.address, str(tmp_path / "meeting"))
        ranks = [
            subprocess.Popen(
                [sys.executable, "-m", GENERATES, *arguments, str(rank), str(len(NEW_TOKENS)), str(checkpoint)],
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
            for rank in range(len(NEW_TOKENS))
        ]  # fmt: skip
        try:
            done = [process.communicate(timeout=WAIT_S) for process in ranks]
        finally:
            for process in ranks:
                process.kill()
    for rank, (out, err) in enumerate(done):
        assert ranks[rank].returncode == 0, err
        expected = model.generate(
            prompt(rank), max_new_tokens=NEW_TOKENS[rank], do_sample=False, eos_token_id=-1, pad_token_id=0
        )
        assert json.loads(out)["tokens"] == expected.tolist(), rank
