"""`paramstore import`: copies the experts of a model's checkpoint into a namespace of a running daemon, one at a time.

An interrupt keeps what is there; the same command goes on with the rest.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

import typer

from paramstore.cli.address import ADDRESS_HELP
from paramstore.cli.signals import end_as_interrupt, told
from paramstore.errors import CheckpointError, ConfigError, NamespaceExists, StoreUnavailable

NO_OPTIMIZER = "none"


def _check_words(*, optimizer: str, updates: str, state_dtype: str | None, dtype: str | None) -> None:
    """Raises ConfigError if an option has a value that it does not know."""
    from paramstore.core.arguments import choice
    from paramstore.core.optimizers import OPTIMIZERS
    from paramstore.core.schema import ITEM_BYTES, PARAM_DTYPES, STATE_DTYPES, UPDATE_RULES

    choice("--optimizer", optimizer, (*OPTIMIZERS, NO_OPTIMIZER))
    choice("--updates", updates, UPDATE_RULES)
    if state_dtype is not None:
        choice("--state-dtype", state_dtype, STATE_DTYPES)
    if dtype is not None:
        choice("--dtype", dtype, tuple(ITEM_BYTES) if optimizer == NO_OPTIMIZER else PARAM_DTYPES)


def _check_packed(directory: Path, *, optimizer: str, dtype: str | None) -> None:
    """Raises CheckpointError, ConfigError where options ask for something else than quantized experts as they are."""
    if optimizer != NO_OPTIMIZER:
        raise CheckpointError(f"{directory}: its experts are quantized: --optimizer none keeps them as they are, to be served")
    if dtype is not None:
        raise ConfigError(f"--dtype {dtype}: the experts of {directory} are quantized, and kept as they are")


def import_checkpoint(
    path: str = typer.Argument(help="A directory of safetensors, or the id of a model in the hub's cache."),
    namespace: str = typer.Option(..., "--namespace", help="The namespace to make; one whose import was interrupted goes on."),
    optimizer: str = typer.Option("adamw", "--optimizer", help="Whose states are kept; 'none' for inference."),
    updates: str = typer.Option("exact", "--updates", help="'exact': as a dense optimizer; 'touched': those with gradients."),
    state_dtype: str = typer.Option(None, "--state-dtype", help="Of the optimizer's states; default float32."),
    dtype: str = typer.Option(None, "--dtype", help="Of the weights that are leased; default what the checkpoint's config says."),
    host_share: str = typer.Option(None, "--host-share", help="Of the daemon's host budget, as in 64GiB; default its own choice."),
    heat: str = typer.Option(None, "--heat", help="A recorded trace: what it uses most comes to the fastest volumes."),
    restart: bool = typer.Option(False, "--restart", help="Start over, whatever an interrupted import has brought in."),
    socket: str = typer.Option(None, "--socket", help=ADDRESS_HELP),
    as_json: bool = typer.Option(False, "--json", help="The result, as JSON."),
) -> None:
    """Import the experts of a Hugging Face checkpoint; interrupted, the same command goes on where it was."""
    import paramstore_client as client
    from paramstore.core.key import KeySpace
    from paramstore_client.checkpoint_directory import checkpoint_directory
    from paramstore_client.handle.given_heat import packed_heat, read_trace

    _check_words(optimizer=optimizer, updates=updates, state_dtype=state_dtype, dtype=dtype)
    trace = None if heat is None else read_trace(heat)
    directory = checkpoint_directory(path)  # told before the imports that take seconds
    from paramstore_client.hf.checkpoint.progress import bar
    from paramstore_client.hf.checkpoint.skeleton import skeleton
    from paramstore_client.hf.import_checkpoint import import_checkpoint as run
    from paramstore_client.hf.import_checkpoint import packed_schema
    from paramstore_client.hf.model.layout import find_layout

    model = skeleton(directory, dtype=dtype, mode="infer" if optimizer == NO_OPTIMIZER else "train")
    layout = find_layout(model)
    end_as_interrupt()
    schema = packed_schema(directory, layout, model)
    if schema is not None:
        _check_packed(directory, optimizer=optimizer, dtype=dtype)
    elif optimizer == NO_OPTIMIZER:
        schema = layout.schema(None)
    else:
        schema = layout.schema(optimizer, updates=updates, **({} if state_dtype is None else {"state_dtype": state_dtype}))
    with client.connect(socket) as store:
        steps = {entry["name"]: entry["committed_step"] for entry in store.namespaces()}
        if (step := steps.get(namespace)) is not None:
            raise NamespaceExists(f"namespace {namespace!r} is committed at step {step}: import into another --namespace")
        # Before a namespace is made, which would stay.
        packed_heat(trace, KeySpace.of(layout.layers, layout.experts), namespace=namespace)
        opened = store.create_namespace(namespace, schema, layers=layout.layers, experts=layout.experts, host_bytes=host_share)
        try:
            with bar("import") as report:
                result = run(path, opened, model, progress=report, resume=not restart, heat=trace)
        except BaseException as error:
            _tell_way_on(error, namespace)
            raise
    if as_json:
        sys.stdout.write(json.dumps({"namespace": namespace, **asdict(result)}, indent=2) + "\n")
    else:
        before = f", {result.resumed} were there before" if result.resumed else ""
        sys.stdout.write(
            f"{namespace}: {result.records} experts imported{before}; committed as step {result.step}, {result.bytes_read} bytes "
            f"read in {result.seconds:.1f} s\n"
        )


def _tell_way_on(error: BaseException, namespace: str) -> None:
    """Says what becomes of an import that an interrupt has ended, or the end of the daemon."""
    if told() is not None:  # an interrupt, whatever exception it has become on its way here
        way_on = "keeps what is there, and the same command goes on from it"
        sys.stderr.write(f"paramstore: interrupted; {namespace!r} {way_on}\n")
    elif isinstance(error, StoreUnavailable):  # its own advice is for programs
        way_on = "keeps what was saved, and once a daemon serves it again the same command goes on from it"
        sys.stderr.write(f"paramstore: {namespace!r} {way_on}\n")
