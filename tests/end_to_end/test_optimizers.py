"""Every optimizer and every way to keep its states, through a real daemon: what torch makes, and the same again after a crash."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import paramstore_client as ps
from paramstore.core.key import ExpertKey
from paramstore.core.optimizers import Options
from paramstore.core.schema import STATE_DTYPES
from paramstore_testkit.oracles.optim_records import TorchOptimizer
from paramstore_testkit.processes.daemon_process import DaemonProcess

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("in_time")]

PAGE = Path(__file__).parents[2] / "docs" / "optimizers.md"
SHAPES = {"up": (96, 64), "down": (64, 33)}
KEYS = [(0, expert) for expert in range(3)]
OPTIONS: list[Options] = [
    ps.AdamW(lr=0.1), ps.SGD(lr=0.1, momentum=0.9, nesterov=True), ps.Adagrad(lr=0.1, initial_accumulator_value=0.1)
]  # fmt: skip
Value = dict[str, torch.Tensor]


def random_value(step: int, key: ExpertKey) -> Value:
    generator = torch.Generator().manual_seed(100 * step + key[1])
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def train(namespace: ps.Namespace, options: Options, step: int) -> None:
    for key in KEYS:
        namespace.push({key: random_value(step, key)})
    namespace.apply(options).wait()


def everything(namespace: ps.Namespace) -> dict[ExpertKey, Value]:
    return {key: dict(namespace.read(key)) for key in KEYS}


@pytest.mark.parametrize("state_dtype", STATE_DTYPES)
@pytest.mark.parametrize("options", OPTIONS, ids=[options.kind for options in OPTIONS])
def test_a_step_made_again_after_a_crash_gives_the_same_record(
    serve: Callable[..., DaemonProcess], tmp_path: Path, options: Options, state_dtype: str
) -> None:
    schema = ps.Schema.trained(options.kind, SHAPES, param_dtype="float32", state_dtype=state_dtype)
    directory = tmp_path / "store"
    daemon = serve(directory).start()
    with ps.connect(daemon.address) as store, store.create_namespace("new", schema, layers=1, experts=len(KEYS)) as namespace:
        namespace.initialize(lambda key: random_value(0, key))
        namespace.commit(0).wait()
        train(namespace, options, 1)
        namespace.commit(1).wait()
        committed = everything(namespace)
        train(namespace, options, 2)
        made = everything(namespace)
        stats = store.stats()["namespaces"]["new"]
        assert (stats["optimizer"], stats["state_dtype"]) == (options.kind, state_dtype)
        assert stats["bytes_per_parameter"] == schema.bytes_per_parameter
    daemon.kill()
    with ps.connect(serve(directory).start().address) as store:
        with store.open_namespace("new", mode="write") as namespace:
            assert namespace.schema == schema
            assert_equal(everything(namespace), committed)
            train(namespace, options, 2)
            assert_equal(everything(namespace), made)
            namespace.commit(2).wait()
            assert_torch_made(made, options, exact=state_dtype == "float32")
        assert store.verify().wait()["found"] == 0


def test_the_program_of_the_page_runs(store: ps.Store) -> None:
    (program,) = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), flags=re.MULTILINE | re.DOTALL)
    names: dict[str, object] = {"ps": ps, "torch": torch, "store": store}
    exec(compile(program, str(PAGE), "exec"), names)
    assert isinstance(names["schema"], ps.Schema)
    assert names["schema"].bytes_per_parameter == 6


def test_a_store_of_reduced_states_is_checked_byte_by_byte(serve: Callable[..., DaemonProcess], tmp_path: Path) -> None:
    directory = tmp_path / "store"
    daemon = serve(directory).start()
    with ps.connect(daemon.address) as store:
        for options, state_dtype in zip(OPTIONS, STATE_DTYPES, strict=True):
            schema = ps.Schema.trained(options.kind, SHAPES, state_dtype=state_dtype, gradient_dtype="float32")
            with store.create_namespace(options.kind, schema, layers=1, experts=len(KEYS)) as namespace:
                namespace.initialize(lambda key: random_value(0, key))
                train(namespace, options, 1)
                namespace.commit(1).wait()
    daemon.stop()
    command = [sys.executable, "-m", "paramstore", "fsck", "--dir", str(directory), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(json.loads(done.stdout)["namespaces"]) == len(OPTIONS)


def assert_equal(found: dict[ExpertKey, Value], expected: dict[ExpertKey, Value]) -> None:
    for key, fields in expected.items():
        assert found[key].keys() == fields.keys()
        for name, value in fields.items():
            assert torch.equal(found[key][name], value), (key, name)


def assert_torch_made(found: dict[ExpertKey, Value], options: Options, *, exact: bool) -> None:
    """Two steps of torch's own optimizer: bitwise, or close where the states between them were rounded."""
    for key in KEYS:
        reference = TorchOptimizer(random_value(0, key), options)
        for step in (1, 2):
            reference.step(random_value(step, key))
        for name in SHAPES:
            expected = reference.state(name)
            if exact:
                assert all(torch.equal(found[key][f"{prefix}/{name}"], value) for prefix, value in expected.items())
            assert (found[key][name] - expected["master"]).abs().mean() < 0.01
