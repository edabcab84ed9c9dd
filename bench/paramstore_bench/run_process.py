"""Measures `paramstore run` beside the script that somebody would write with `ps.hf`: from the start of the process to the first
token on its stdout, and to its end. Both start a daemon over one store, which holds the experts already."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from paramstore.bench.context import Bench
from paramstore.bench.pairs import Pair, Pairs, Sample, sample_pairs
from paramstore.bench.report.rows import SUBJECT, Row, Target, judged
from paramstore.errors import StepMismatch
from paramstore.run.home import home_of
from paramstore_testkit.training.small_tokenizer import save_tokenizer

PROMPT, TOKENS = "How large is one expert?", 16
BUDGET = "1GiB"
ROUNDS, QUICK_ROUNDS = 9, 2
TIMES_MAX = 1.5
"""Most times the script's seconds that ours may take."""
LIMIT_S = 300.0
ALL_S = "all_s"
SCRIPT = """
import sys
import paramstore as ps
from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer
path, directory, name, budget, prompt, tokens = sys.argv[1:]
daemon = ps.ServeOptions(dir=directory, host_budget=budget)
with ps.connect(autostart=daemon, timeout_s=60) as store:
    model = ps.hf.from_pretrained(AutoModelForCausalLM, path, store=store, mode="infer", name=name)
    tokenizer = AutoTokenizer.from_pretrained(path)
    asked = [{"role": "user", "content": prompt}]
    given = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    model.generate(**given, streamer=streamer, max_new_tokens=int(tokens), do_sample=False)
"""


def measure_run(bench: Bench, *, is_quick: bool) -> Iterator[Row]:
    """Makes the rows of the first token and of the whole process. Raises StepMismatch where the two write other tokens."""
    checkpoint, directory = bench.directory / "model", bench.directory / "store"
    bench.tell("a checkpoint, and its import")
    make_checkpoint(checkpoint, is_quick=is_quick)
    name = home_of(str(checkpoint), directory=directory, namespace=None, dtype=None).namespace
    ours = [
        sys.executable, "-m", "paramstore", "run", str(checkpoint), PROMPT, "--dir", str(directory), "--host-budget", BUDGET,
        "--tokens", str(TOKENS), "--temperature", "0",
    ]  # fmt: skip
    script = [sys.executable, "-c", SCRIPT, str(checkpoint), str(directory), name, BUDGET, PROMPT, str(TOKENS)]
    stop = [sys.executable, "-m", "paramstore", "stop", str(directory)]
    answers: set[str] = set()

    def sample(command: list[str]) -> Callable[[int], Sample]:
        def take(number: int) -> Sample:
            bench.tell(f"round {number + 1}")
            first_s, all_s, said = _timed(bench, command)
            if command is script:  # its daemon outlives it
                subprocess.run(stop, check=True, capture_output=True, timeout=LIMIT_S)
            answers.add(said)
            return Sample(1.0, first_s, parts={ALL_S: all_s})

        return take

    answers.add(_timed(bench, ours)[2])
    pairs = sample_pairs(QUICK_ROUNDS if is_quick else ROUNDS, sample(ours), sample(script))
    if len(answers) != 1:
        raise StepMismatch(f"paramstore run and the script answer otherwise: {sorted(answers)}")
    yield _row("first token", pairs, target=Target("ratio", ">=", 1 / TIMES_MAX))
    whole = (Pair(*(Sample(1.0, each.parts[ALL_S]) for each in (pair.ours, pair.limit))) for pair in pairs.pairs)
    yield _row("whole process, the script's without the end of its daemon", Pairs(tuple(whole)), target=None)


def make_checkpoint(directory: Path, *, is_quick: bool) -> None:
    """Writes a Qwen3-MoE of random weights, with a tokenizer: 0.9 GB of experts, with `is_quick` 12 MB."""
    size, layers, experts = (128, 2, 16) if is_quick else (768, 8, 32)
    torch.manual_seed(0)
    config = Qwen3MoeConfig(  # type: ignore[call-arg]  # its stub lacks one
        vocab_size=256, hidden_size=size, intermediate_size=size, moe_intermediate_size=size, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2, head_dim=size // 4, num_experts=experts, num_experts_per_tok=4,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(directory)  # type: ignore[no-untyped-call]
    save_tokenizer(directory, vocabulary=256)


def _timed(bench: Bench, command: list[str]) -> tuple[float, float, str]:
    """(seconds to the first byte on stdout, seconds to the end, what it wrote) of a process. Raises CalledProcessError."""
    begun_s = bench.clock.now_s()
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0) as process:
        assert process.stdout is not None
        first = process.stdout.read(1)
        first_s = bench.clock.now_s() - begun_s
        rest, said = process.communicate(timeout=LIMIT_S)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command, rest, said)
    return first_s, bench.clock.now_s() - begun_s, (first + rest).decode()


def _row(case: str, pairs: Pairs, *, target: Target | None) -> Row:
    taken = sorted(pair.ours.seconds for pair in pairs.pairs)
    beside = sorted(pair.limit.seconds for pair in pairs.pairs)
    middle = len(taken) // 2
    return judged(
        Row(
            name="paramstore run", subject=SUBJECT, case=case, value=taken[middle], unit="s", against="a script with ps.hf",
            limit=beside[middle], ratio=pairs.ratio, ratio_min=pairs.ratio_min, ratio_max=pairs.ratio_max, target=target,
            parts={"least_s": taken[0], "most_s": taken[-1], "script_least_s": beside[0], "script_most_s": beside[-1]},
        )
    )  # fmt: skip
