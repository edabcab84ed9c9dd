"""A process that imports a checkpoint, can be stopped at any record, and reports how much its memory grew.

    python -m paramstore_testkit.processes.importer ADDRESS PATH NAMESPACE [STOP_AT [SAVE_EVERY_S]]

It prints `record N` after each record. At record STOP_AT it waits for a line on stdin, so that a test can kill or interrupt it
there. At the end it prints its result as JSON, with `peak_bytes`: the highest resident memory of the import, less that before it,
in the kernel's figures.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict

from paramstore.bench.process import peak_bytes, reset_peak, resident_bytes
from paramstore_client import connect
from paramstore_client.hf.checkpoint.progress import Progress
from paramstore_client.hf.checkpoint.skeleton import skeleton
from paramstore_client.hf.import_checkpoint import SAVE_EVERY_S, import_checkpoint
from paramstore_client.hf.model.layout import find_layout

NEVER = -1


def main(address: str, path: str, name: str, stop_at: int = NEVER, save_every_s: float = SAVE_EVERY_S) -> None:
    def report(progress: Progress) -> None:
        sys.stdout.write(f"record {progress.records}\n")
        sys.stdout.flush()
        if progress.records == stop_at:
            sys.stdin.readline()

    model = skeleton(path)
    layout = find_layout(model)
    with connect(address) as store:
        schema = layout.schema("adamw", updates="touched")
        namespace = store.create_namespace(name, schema, layers=layout.layers, experts=layout.experts)
        before = resident_bytes(os.getpid())
        reset_peak()
        result = import_checkpoint(path, namespace, model, progress=report, save_every_s=save_every_s)
        grown_bytes = peak_bytes(os.getpid()) - before
    sys.stdout.write(json.dumps({**asdict(result), "peak_bytes": grown_bytes, "record_bytes": schema.record_bytes}) + "\n")


if __name__ == "__main__":
    _, given_address, given_path, given_name, *numbers = sys.argv
    stops, saves = [*numbers, str(NEVER), str(SAVE_EVERY_S)][:2] if len(numbers) != 1 else (numbers[0], str(SAVE_EVERY_S))
    main(given_address, given_path, given_name, int(stops), float(saves))
