"""`paramstore export`: a namespace's experts and a checkpoint's other weights, as a new checkpoint of the hub."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

import typer

from paramstore.cli.address import ADDRESS_HELP
from paramstore.cli.signals import end_as_interrupt


def export(
    namespace: str = typer.Argument(help="The namespace that holds the experts."),
    model: str = typer.Option(..., "--model", help="The checkpoint that everything else is taken from: a directory, or a hub id."),
    out: Path = typer.Option(..., "--out", help="The directory to write, not --model's; a checkpoint that lies there is replaced."),
    at: int = typer.Option(None, "--at", min=0, help="A committed step; default the newest."),
    shard_size: str = typer.Option(None, "--shard-size", help="The most bytes of one file, as in 5GiB; default 50 GB."),
    socket: str = typer.Option(None, "--socket", help=ADDRESS_HELP),
    as_json: bool = typer.Option(False, "--json", help="The result, as JSON."),
) -> None:
    """Write a namespace as a Hugging Face checkpoint, streamed; whole, or without an index."""
    import paramstore_client as client
    from paramstore.sizes import format_size, parse_size
    from paramstore_client.checkpoint_directory import checkpoint_directory

    directory = checkpoint_directory(model)  # told before the imports that take seconds
    from paramstore_client.hf.checkpoint.progress import bar
    from paramstore_client.hf.checkpoint.shards import open_checkpoint
    from paramstore_client.hf.checkpoint.skeleton import skeleton
    from paramstore_client.hf.export_checkpoint import SHARD_BYTES_MAX, export_checkpoint

    shard_bytes = SHARD_BYTES_MAX if shard_size is None else parse_size(shard_size)
    shape, dense = skeleton(directory), open_checkpoint(directory)
    end_as_interrupt()
    with client.connect(socket) as store, store.open_namespace(namespace, at=at) as reader, bar("export") as report:
        result = export_checkpoint(
            shape, out, namespace=reader, dense=dense, tokenizer=dense.directory, max_shard_bytes=shard_bytes, progress=report
        )
    if as_json:
        sys.stdout.write(json.dumps({"namespace": namespace, **asdict(result)}, indent=2, default=str) + "\n")
    else:
        sys.stdout.write(
            f"{namespace} at step {result.step}: {result.records} experts, {format_size(result.bytes_written)} in "
            f"{len(result.files)} files of {result.directory}, {result.seconds:.1f} s\n"
        )
