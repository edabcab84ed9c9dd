"""`paramstore plan`: what a model's experts would take of volumes and host memory, without a daemon."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

import typer

from paramstore.cli.exits import FAILED
from paramstore.errors import ConfigError, SchemaMismatch
from paramstore.limits import RETAINED_STEPS, STEPS_MAX
from paramstore.sizes import format_size

if TYPE_CHECKING:
    from paramstore.core.schema import Schema
    from paramstore.engine.capacity.estimate import Estimate


def plan(
    layers: int = typer.Option(..., "--layers", min=1, help="Layers with experts."),
    experts: int = typer.Option(..., "--experts", min=1, help="Experts in each layer."),
    field: list[str] = typer.Option(..., "--field", help="NAME=AxB, a tensor of an expert, as gate_up=1536x2048; repeat for more."),
    optimizer: str = typer.Option("adamw", "--optimizer", help="adamw, sgd or adagrad; none: for inference only."),
    state_dtype: str = typer.Option("float32", "--state-dtype", help="Of optimizer states: float32, bfloat16 or int8_blockwise."),
    param_dtype: str = typer.Option("bfloat16", "--param-dtype", help="Of the weights that the model computes with."),
    gradient_dtype: str = typer.Option(None, "--gradient-dtype", help="Default --param-dtype."),
    volumes: int = typer.Option(1, "--volumes", min=1, help="How many volumes the daemon has."),
    host_budget: str = typer.Option(None, "--host-budget", help="Host memory of the daemon, as 64GiB; default as `serve`."),
    retained_steps: int = typer.Option(
        None, "--retained-steps", min=RETAINED_STEPS, max=STEPS_MAX, help="Steps that stay; default as `serve`."
    ),
    held_steps: int = typer.Option(
        None, "--held-steps", min=0, max=STEPS_MAX, help="Older steps of readers with room of their own; default as `serve`."
    ),
    as_json: bool = typer.Option(False, "--json", help="Everything, as JSON; sizes in bytes."),
) -> None:
    """Print bytes per parameter and per expert, and what volumes and host memory must hold. Exit code 1 if it is too small."""
    from paramstore.config import load
    from paramstore.core.key import KeySpace
    from paramstore.engine.capacity.estimate import estimate

    flags = {"host_budget": host_budget, "retained_steps": retained_steps, "held_steps": held_steps}
    config = load({name: value for name, value in flags.items() if value is not None})
    schema = schema_of(
        field, optimizer=optimizer, state_dtype=state_dtype, param_dtype=param_dtype, gradient_dtype=gradient_dtype
    )
    key_count = len(KeySpace.of(layers, experts))
    found = estimate(schema, key_count, config, volume_count=volumes, core_count=len(os.sched_getaffinity(0)))
    if as_json:
        sys.stdout.write(json.dumps({"schema": schema.describe(), **asdict(found)}, indent=2) + "\n")
    else:
        sys.stdout.writelines(line + "\n" for line in plan_lines(schema, found))
    if found.split is None:
        raise typer.Exit(FAILED)


def schema_of(
    fields: Sequence[str], *, optimizer: str, state_dtype: str, param_dtype: str, gradient_dtype: str | None
) -> Schema:
    """Makes the schema from the words of the command line. Raises ConfigError where there is none."""
    from paramstore.core.optimizers import OPTIMIZERS
    from paramstore.core.schema import Schema

    shapes = {}
    for text in fields:
        name, _, sizes = text.partition("=")
        try:
            shapes[name] = tuple(int(size) for size in sizes.split("x"))
        except ValueError as error:
            raise ConfigError(f"--field {text!r}: write NAME=AxB, as gate_up=1536x2048") from error
    if len(shapes) != len(fields):
        raise ConfigError(f"--field: a name is given twice in {', '.join(fields)}")
    if optimizer not in (*OPTIMIZERS, "none"):
        raise ConfigError(f"--optimizer {optimizer!r}: use {', '.join(OPTIMIZERS)} or none")
    try:
        if optimizer == "none":
            return Schema.param({name: (shape, param_dtype) for name, shape in shapes.items()})
        return Schema.trained(optimizer, shapes, param_dtype=param_dtype, gradient_dtype=gradient_dtype, state_dtype=state_dtype)
    except SchemaMismatch as error:
        raise ConfigError(str(error)) from error


def plan_lines(schema: Schema, found: Estimate) -> Iterator[str]:
    """The plan, for people."""
    from paramstore.engine.capacity.entitlements import in_words

    what = f"{schema.kind}, states in {schema.state_dtype}" if schema.is_trainable else "inference"
    yield f"{found.key_count:,} experts, {found.parameter_elements:,} parameters: {what}"
    yield f"bytes per parameter  {found.bytes_per_parameter:.4g}"
    yield f"one record           {format_size(found.record_bytes)}"
    yield f"all records          {format_size(found.state_bytes)}"
    if schema.is_trainable:
        yield f"weights ({schema.specs[0][2]})   {format_size(found.param_bytes)}"
        yield f"gradients of a step  {format_size(found.gradient_bytes)}, beside the host budget"
    each = _exact(found.volume_size_bytes)
    yield f"volumes              {format_size(found.volume_bytes)}, with the steps that stay: --volume-size {each}"
    yield f"                     {in_words(found.volume_shares)}"
    yield f"least host budget    {format_size(found.least_host_bytes)}: --host-budget {_exact(found.least_host_bytes)}"
    if found.split is None:
        yield f"host budget          {format_size(found.host_budget_bytes)}: too small"
        return
    slots = f"{found.split.param_slots:,} param slots"
    if schema.is_trainable:
        slots = f"{found.split.working_slots:,} optim slots, {slots}, {format_size(found.split.staging_bytes)} staging"
    yield f"host budget          {format_size(found.host_budget_bytes)}: {slots}"


def _exact(size_bytes: int) -> str:
    """A size in whole MiB, as `serve` takes it: a rounded one with fewer digits could be too small."""
    return f"{size_bytes >> 20}MiB"
