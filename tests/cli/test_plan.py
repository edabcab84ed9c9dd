"""`paramstore plan`: sizes of a model's experts before there is a store."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from paramstore.config import Config
from paramstore.core.schema import Schema
from paramstore.engine.store import Store
from paramstore.errors import CapacityError
from paramstore.sizes import format_size, parse_size
from paramstore_testkit.stores.assembled import with_store

Run = Callable[..., int]
QWEN3_30B = ("--layers", "48", "--experts", "128", "--field", "gate_up=1536x2048", "--field", "down=2048x768")


def test_json_has_every_size_in_bytes(paramstore: Run, capsys: pytest.CaptureFixture[str]) -> None:
    words = (*QWEN3_30B, "--host-budget", "64GiB", "--retained-steps", "3", "--held-steps", "0", "--json")
    assert paramstore("plan", *words) == 0
    found = json.loads(capsys.readouterr().out)
    schema = Schema.from_description(found["schema"])
    assert schema == Schema.adamw({"gate_up": (1536, 2048), "down": (2048, 768)})
    assert found["parameter_elements"] == 28_991_029_248
    assert found["bytes_per_parameter"] == 12
    assert found["state_bytes"] == 6144 * schema.record_bytes
    assert found["volume_bytes"] == pytest.approx(4.05 * found["state_bytes"], rel=0.001)
    assert found["split"]["param_slots"] == 6144
    assert found["split"]["working_slots"] > 100


@pytest.mark.parametrize(
    ("optimizer", "state_dtype", "bytes_per_parameter"),
    [("adamw", "bfloat16", 8), ("adamw", "int8_blockwise", 6.03125), ("sgd", "float32", 8), ("adagrad", "bfloat16", 6)],
)
def test_bytes_per_parameter_follow_optimizer_and_state_dtype(
    paramstore: Run, capsys: pytest.CaptureFixture[str], optimizer: str, state_dtype: str, bytes_per_parameter: float
) -> None:
    assert paramstore("plan", *QWEN3_30B, "--optimizer", optimizer, "--state-dtype", state_dtype, "--json") == 0
    assert json.loads(capsys.readouterr().out)["bytes_per_parameter"] == bytes_per_parameter


def test_people_read_what_fits_and_what_does_not(paramstore: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert paramstore("plan", *QWEN3_30B, "--host-budget", "64GiB") == 0
    out = capsys.readouterr().out
    assert "6,144 experts, 28,991,029,248 parameters: adamw, states in float32" in out
    assert "bytes per parameter  12\n" in out
    assert "64 GiB: " in out
    assert "optim slots, 6,144 param slots" in out
    assert paramstore("plan", *QWEN3_30B, "--host-budget", "64MiB") == 1
    assert "64 MiB: too small" in capsys.readouterr().out
    assert paramstore("plan", *QWEN3_30B, "--host-budget", "64MiB", "--json") == 1
    assert json.loads(capsys.readouterr().out)["split"] is None


@pytest.mark.slow
@pytest.mark.parametrize("volumes", [1, 3])
@pytest.mark.parametrize("optimizer", ["adamw", "none"])
def test_a_store_that_is_made_as_the_plan_says_takes_the_namespace(
    paramstore: Run, capsys: pytest.CaptureFixture[str], tmp_path: Path, volumes: int, optimizer: str
) -> None:
    words = ("--layers", "2", "--experts", "4", "--field", "w=64x64", "--optimizer", optimizer, "--volumes", str(volumes))
    assert paramstore("plan", *words) == 0
    out = capsys.readouterr().out
    volume_size, host_budget = (parse_size(out.partition(f"{flag} ")[2].split()[0]) for flag in ("--volume-size", "--host-budget"))
    assert paramstore("plan", *words, "--json") == 0
    schema = Schema.from_description(json.loads(capsys.readouterr().out)["schema"])

    async def create(store: Store) -> None:
        await store.admission.create("moe", schema.describe(), layers=[0, 1], experts=4, host_bytes=None)

    places = tuple(tmp_path / f"volume{index}" for index in range(volumes))
    settings = Config(
        dir=tmp_path / "store", volumes=places, volume_size_bytes=volume_size, host_budget_bytes=host_budget, prefill=False
    )
    with_store(settings, create)
    small = replace(settings, dir=tmp_path / "other", volumes=(), host_budget_bytes=host_budget - 1)
    with pytest.raises(CapacityError, match=f"needs at least {format_size(host_budget)} of host memory"):
        with_store(small, create)


def test_inference_needs_no_optimizer(paramstore: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert paramstore("plan", *QWEN3_30B, "--optimizer", "none") == 0
    out = capsys.readouterr().out
    assert "inference" in out
    assert "gradients" not in out
    assert "optim slots" not in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--field", "w"), "--field 'w': write NAME=AxB"),
        (("--field", "w=4xb"), "--field 'w=4xb': write NAME=AxB"),
        (("--field", "w=4", "--field", "w=5"), "a name is given twice"),
        (("--field", "w=4", "--optimizer", "lion"), "--optimizer 'lion': use adamw, sgd, adagrad or none"),
        (("--field", "w=4", "--state-dtype", "int4"), "state_dtype=int4"),
        (("--field", "w=4x0"), "field 'w' has shape"),
        (("--field", "w=0x2"), "field 'w' has shape"),
        (("--field", "=1x2"), "field"),
        (("--field", "w=4", "--param-dtype", "bf16"), "bf16"),
        (("--field", "w=4", "--gradient-dtype", "bf16"), "bf16"),
        (("--field", "w=4", "--state-dtype", "fp8"), "state_dtype=fp8"),
        (("--field", "w=4", "--host-budget", "1KiB"), "must be a size of at least 2 MiB"),
        (("--field", "w=4", "--host-budget", "much"), "host_budget"),
        (("--field", "w=4", "--retained-steps", "0"), "Invalid value for '--retained-steps'"),
        (("--field", "w=4", "--held-steps", "99"), "Invalid value for '--held-steps'"),
    ],
)
def test_wrong_words_are_refused_with_what_is_right(
    paramstore: Run, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], message: str
) -> None:
    assert paramstore("plan", "--layers", "2", "--experts", "4", *words) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("size", [10**6, 10**9, 10**11, 10**18])
@pytest.mark.parametrize("optimizer", ["adamw", "none"])
def test_records_that_no_machine_holds_are_answered_by_arithmetic(
    paramstore: Run, capsys: pytest.CaptureFixture[str], size: int, optimizer: str
) -> None:
    tracemalloc.start()
    try:
        assert paramstore("plan", "--layers", "2", "--experts", "4", "--field", f"w={size}x{size}", "--optimizer", optimizer) == 1
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()
    assert "host budget          1 GiB: too small" in capsys.readouterr().out


@pytest.mark.slow
def test_it_loads_no_torch_and_asks_no_daemon(modules_of: Callable[..., set[str]]) -> None:
    modules = modules_of("plan", *QWEN3_30B)
    assert "paramstore.engine.capacity.estimate" in modules
    assert not modules & {"torch", "lmdb", "paramstore_client"}
