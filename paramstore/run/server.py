"""Serves the model of a run over HTTP: transformers' own server, at a socket of this process."""

from __future__ import annotations

import importlib
import socket
from collections.abc import Callable
from importlib.util import find_spec
from typing import TYPE_CHECKING

from paramstore.errors import ConfigError

if TYPE_CHECKING:
    from paramstore.run.model import RunModel

PACKAGES = ("fastapi", "uvicorn", "openai", "pydantic")
"""Packages that the extra `serve` has, as transformers' server needs them."""
SHUTDOWN_S = 5
"""Seconds that answers under way have to end once the server is told to; then their connections are closed."""
BACKLOG = 128
"""Connections that wait to be accepted."""


def check_packages() -> None:
    """Raises ConfigError, with the command that mends it, where a package is missing. Loads none of them."""
    missing = [name for name in PACKAGES if find_spec(name) is None]
    if missing:
        raise ConfigError(f"serving over HTTP needs {', '.join(missing)}: pip install 'paramstore[serve]'")


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens there, port 0 for any that is free. Raises ConfigError naming what is in the way."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except (OSError, OverflowError) as error:
        raise ConfigError(f"--host {host} --port {port}: {error}: give another") from error


def serve(opened: RunModel, listener: socket.socket, *, name: str, tell: Callable[[str], object]) -> None:
    """Answers requests for the model `name` at `listener` until the process is told to end; then that signal is raised again.

    Raises ConfigError where the installed transformers has no such server.
    """
    from paramstore_client.hf.compat.serving import openai_server

    if not getattr(opened.tokenizer, "chat_template", None):
        tell("the model has no chat template: /v1/completions alone answers")
    uvicorn = importlib.import_module("uvicorn")
    app = openai_server(opened.model, opened.tokenizer, name=name)
    config = uvicorn.Config(app, log_level="warning", ws="none", timeout_graceful_shutdown=SHUTDOWN_S)
    uvicorn.Server(config).run(sockets=[listener])
