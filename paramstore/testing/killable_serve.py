"""`python -m paramstore.testing.killable_serve`: daemons that are killed at a point of their work, one after the other.

Each line on stdin is a JSON mapping {kill_at, flags}; a child is forked for it that serves a store with those settings, as
`paramstore serve` does, on volumes and a catalog with kill points. torch is loaded once, before the first fork, so that a
daemon is up in a tenth of a second. stdout gets `pid N`, the daemon's `ready ...`, and `ended STATUS`.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import traceback

from paramstore.config import load
from paramstore.daemon import assembly
from paramstore.daemon.server import run
from paramstore.testing import kill_points


def main() -> None:
    import paramstore.optim.adamw  # noqa: F401 - loads torch for every child at once

    logging.basicConfig(level=logging.WARNING)
    vars(assembly).update(FileVolume=kill_points.KillableVolume, LmdbCatalog=kill_points.KillableCatalog)
    for line in sys.stdin:
        request = json.loads(line)
        child = os.fork()
        if child == 0:
            _serve(request["kill_at"], request["flags"])
        _say(f"pid {child}")
        _, status = os.waitpid(child, 0)
        _say(f"ended {os.waitstatus_to_exitcode(status)}")


def _serve(kill_at: int, flags: dict[str, object]) -> None:
    """The child's whole life."""
    code = 1
    try:
        kill_points.points.kill_at = kill_at
        run(load(flags, environ={}))
        code = 0
    except BaseException:  # noqa: BLE001 - a child never returns to its parent's loop
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _say(line: str) -> None:
    os.write(sys.stdout.fileno(), f"{line}\n".encode())


if __name__ == "__main__":
    main()
