"""The programs of docs/client.md and the pages beside it run as they stand, against a daemon that they start themselves."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from paramstore_client.connection.address import parse_address
from paramstore_client.connection.ticket import Ticket
from paramstore_client.running import find_daemon

ROOT = Path(__file__).parent.parent.parent
PAGE = ROOT / "docs" / "client.md"
RANKS = ROOT / "docs" / "ranks.md"
PARALLEL = ROOT / "docs" / "expert-parallel.md"
NODES = ROOT / "docs" / "nodes.md"
TRAINING = ROOT / "docs" / "training.md"
TRANSFORMERS = ROOT / "docs" / "transformers.md"
SERVING = ROOT / "docs" / "serving.md"
REPEATABLE = (TRANSFORMERS, SERVING)
"""Programs that run again in the same directory, beside the daemon that they left."""
HANDLE = ("namespace.py", "handle/residency.py", "handle/steps.py", "handle/updates.py")
"""What a namespace's calls are written in."""
LINES_MAX = 200
END_TIMEOUT_S = 30.0


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where the program runs; its daemon is ended."""
    folder = tmp_path_factory.mktemp("page")
    yield folder
    if (daemon := find_daemon(parse_address(folder / "client-data"))) is not None:
        with daemon:
            daemon.send(signal.SIGTERM)
            assert daemon.has_ended(END_TIMEOUT_S), f"the page's daemon did not end within {END_TIMEOUT_S:g} s"


def program(page: Path) -> str:
    """The blocks of the page, one after the other, on the lines they have there: a failure names the page's line."""
    lines, is_code = [], False
    for line in page.read_text().splitlines():
        is_fence = line.startswith("```")
        lines.append(line if is_code and not is_fence else "")
        is_code = line == "```python" if is_fence else is_code
    return "\n".join(lines) + "\n"


def client_source(*names: str) -> str:
    return "".join((ROOT / "client" / "paramstore_client" / name).read_text() for name in names)


@pytest.mark.slow
@pytest.mark.parametrize("page", [PAGE, RANKS, PARALLEL, NODES, TRAINING, TRANSFORMERS, SERVING], ids=lambda page: page.stem)
def test_the_pages_program_runs(page: Path, folder: Path) -> None:
    script = folder / "client_page.py"
    script.write_text(program(page))
    paths = [str(path) for path in (ROOT, ROOT / "client", ROOT / "native")]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PARAMSTORE_")}
    environment["PYTHONPATH"] = os.pathsep.join([*paths, *filter(None, [os.environ.get("PYTHONPATH")])])
    for _ in range(2 if page in REPEATABLE else 1):
        done = subprocess.run(
            [sys.executable, "-X", "dev", str(script)], cwd=folder, env=environment, capture_output=True, text=True, timeout=100,
            check=False,
        )  # fmt: skip
        log = folder / "client-data" / "daemon.log"
        assert done.returncode == 0, f"{done.stderr}\n{log.read_text() if log.exists() else 'no daemon log'}"
        assert "nobody waited" not in done.stderr


@pytest.mark.parametrize("page", [PAGE, SERVING], ids=lambda page: page.stem)
def test_the_page_is_one_screenful_of_pages(page: Path) -> None:
    assert len(page.read_text().splitlines()) <= LINES_MAX


def test_the_page_names_every_call_that_returns_a_ticket() -> None:
    source = client_source(*HANDLE, "client.py")
    methods = re.findall(r"^    def ([a-z]\w*)\([^)]*\)\s*-> (\w+)", source, flags=re.MULTILINE | re.DOTALL)
    calls = {name for name, answer in methods if answer == Ticket.__name__}
    tickets = PAGE.read_text().partition("## Tickets")[2].partition("\n## ")[0]
    assert len(calls) >= 6
    assert {name for name in calls if f"`{name}`" not in tickets and f".{name}`" not in tickets} == set()


def test_the_page_explains_every_public_call_of_a_namespace() -> None:
    source = client_source(*HANDLE)
    calls = set(re.findall(r"^    def ([a-z]\w*)\(\s*self", source, flags=re.MULTILINE))
    internal = {"keys", "layers", "experts", "epoch", "view_change_count", "report_device", "store_uuid"}
    internal |= {"before_unmap", "before_push", "let_stand", "check_usable"}
    text = PAGE.read_text()
    assert {name for name in calls - internal if not re.search(rf"\b{name}\b", text)} == set()
