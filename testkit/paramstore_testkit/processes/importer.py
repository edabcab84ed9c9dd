"""A process that imports a checkpoint, can be stopped at any record, and reports how much its memory grew.

    python -m paramstore_testkit.processes.importer ADDRESS PATH NAMESPACE [STOP_AT [SAVE_EVERY_S]]

It prints `record N` after each record. At record STOP_AT it waits for a signal, so that a test can kill or interrupt it
there. At the end it prints its result as JSON, with `peak_bytes`: the highest resident memory of the import, less that before it,
in the kernel's figures. With `forks` for all arguments it makes such a process for each request, a mapping of `main`'s arguments:
`Importers` is the other end.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from paramstore.bench.process import peak_bytes, reset_peak, resident_bytes
from paramstore_client import connect
from paramstore_client.hf.checkpoint.progress import Progress
from paramstore_client.hf.checkpoint.skeleton import skeleton
from paramstore_client.hf.import_checkpoint import SAVE_EVERY_S, import_checkpoint
from paramstore_client.hf.model.layout import find_layout
from paramstore_testkit.processes.fork_server import ForkServer, serve_forks

MODULE = "paramstore_testkit.processes.importer"
FORKS = "forks"
NEVER = -1


class Importers(ForkServer):
    """Imports in processes of their own, one after the other."""

    statuses = (0, 1, -signal.SIGKILL)

    def __init__(self, log: Path) -> None:
        super().__init__(MODULE, FORKS, log=log)

    def begin(self, address: str, path: Path, name: str, *, stop_at: int = NEVER, save_every_s: float = SAVE_EVERY_S) -> None:
        self.fork({"address": address, "path": str(path), "name": name, "stop_at": stop_at, "save_every_s": save_every_s})

    def until(self, line: str) -> None:
        """Returns when it has printed `line`."""
        said: list[str] = []
        while (one := self.heard()) != line:
            assert one is not None, f"it ended after {said}"
            said.append(one)

    def result(self) -> dict[str, Any]:
        """Waits for its end; gives what it printed last."""
        lines = self.wait_ended()
        assert self.status == 0, lines
        found: dict[str, Any] = json.loads(lines[-1])
        return found


def main(address: str, path: str, name: str, stop_at: int = NEVER, save_every_s: float = SAVE_EVERY_S) -> None:
    def report(progress: Progress) -> None:
        sys.stdout.write(f"record {progress.records}\n")
        sys.stdout.flush()
        if progress.records == stop_at:
            signal.pause()

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


def serve() -> None:
    """Makes processes that have imported what they need, down to the model's own module."""
    import transformers.models.qwen3_moe.modeling_qwen3_moe  # noqa: F401

    serve_forks(lambda request: main(**request))


if __name__ == "__main__":
    if sys.argv[1:] == [FORKS]:
        serve()
    else:
        _, given_address, given_path, given_name, *numbers = sys.argv
        stops, saves = [*numbers, str(NEVER), str(SAVE_EVERY_S)][:2] if len(numbers) != 1 else (numbers[0], str(SAVE_EVERY_S))
        main(given_address, given_path, given_name, int(stops), float(saves))
