"""`python -m paramstore_testkit.processes.killable_serve [plain]`: daemons that are killed at a point of their work, one by one.

Each request, a mapping {flags, kill_at, point, gates, bugs, switches}, makes a child that serves a store with those settings, as
`paramstore serve` does, on volumes and a catalog with kill points, with the named bugs planted. With `switches`, a folder, the
volumes' files fail as that says (`faulty_os.Switches`). Slow imports are done before the first fork, so that a daemon is up in some
30 ms: torch, or with `plain` no torch but the arithmetic of `plain_arithmetic`. `KillableDaemons` is the other end.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paramstore.config import load
from paramstore.daemon import assembly, server, volume_places
from paramstore.storage.volume import backing_file
from paramstore_testkit.bugs import daemon_bugs
from paramstore_testkit.oracles import plain_arithmetic
from paramstore_testkit.processes import kill_points
from paramstore_testkit.processes.fork_server import ForkServer, serve_forks
from paramstore_testkit.trials.faulty_os import FaultyOs, Switches

PLAIN = "plain"
MODULE = "paramstore_testkit.processes.killable_serve"
MIB = 1 << 20
FLAGS: Mapping[str, Any] = {"host_budget": 16 * MIB, "prefill": False, "update_workers": 2, "io_workers": 2}
VOLUMES = ("a", "b")


class KillableDaemons(ForkServer):
    """Real daemons over real files; at most one of them lives at a time.

    is_plain: they run `plain_arithmetic` and never load torch.
    """

    def __init__(self, log: Path, *, is_plain: bool = False) -> None:
        super().__init__(MODULE, *([PLAIN] if is_plain else []), log=log)

    def launch(
        self, directory: Path, *, kill_at: int = 0, point: str = "", flags: Mapping[str, Any] | None = None,
        gates: Mapping[str, Path] | None = None, bugs: Sequence[str] = (), switches: Path | None = None,
    ) -> None:  # fmt: skip
        """Starts a daemon; it may not serve yet. See `kill_points.KillPoints`, `daemon_bugs`."""
        settings = {"dir": str(directory), "volumes": [str(directory / name) for name in VOLUMES], **FLAGS, **(flags or {})}
        gate_paths = {name: str(path) for name, path in (gates or {}).items()}
        request = {"flags": settings, "kill_at": kill_at, "point": point, "bugs": list(bugs), "gates": gate_paths}
        self.fork({**request, "switches": None if switches is None else str(switches)})

    def address(self) -> str | None:
        """Waits until it serves; gives its address, or None if it was killed before. Raises AssertionError if it refused."""
        said = self.heard()
        return None if said is None else said.removeprefix("ready ")

    def start(self, directory: Path, **arguments: Any) -> str | None:
        """Does `launch` and `address`."""
        self.launch(directory, **arguments)
        return self.address()


def main() -> None:
    if PLAIN in sys.argv[1:]:
        plain_arithmetic.install()
    else:
        import paramstore.optim.update  # noqa: F401 - loads torch for every child at once
    logging.basicConfig(level=logging.WARNING)
    kill_points.instrument()
    vars(assembly).update(LmdbCatalog=kill_points.KillableCatalog)
    vars(volume_places).update(FileVolume=kill_points.KillableVolume)
    vars(server).update(harden=lambda: None)  # tests may look into /proc/PID
    serve_forks(_serve)


def _serve(request: dict[str, Any]) -> None:
    gates = {name: Path(path) for name, path in request["gates"].items()}
    kill_points.points = kill_points.KillPoints(request["kill_at"], request["point"], gates)
    for bug in request["bugs"]:
        daemon_bugs.plant(bug)
    if (switches := request["switches"]) is not None:
        vars(backing_file).update(os=FaultyOs(Switches(Path(switches))))
    server.run(load(request["flags"], environ={}))


if __name__ == "__main__":
    main()
