"""Serves the model of a run over HTTP: transformers' own server, at a socket of this process."""

from __future__ import annotations

import importlib
import socket
from collections.abc import Callable
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from paramstore.errors import ConfigError

if TYPE_CHECKING:
    from paramstore.run.model import RunModel

PACKAGES = ("fastapi", "uvicorn", "openai", "pydantic")
"""Packages that the extra `serve` has, as transformers' server needs them."""
SHUTDOWN_S = 5
"""Seconds that answers under way have to end once the server is told to; then their connections are closed."""
REQUESTS_MAX = 64
"""Requests that are answered or wait for their turn at one time: answers are computed one after the other."""
BACKLOG = 128
"""Connections that wait to be accepted."""


def check_packages() -> None:
    """Raises ConfigError, with the command that mends it, where a package is missing. Loads none of them."""
    missing = [name for name in PACKAGES if find_spec(name) is None]
    if missing:
        raise ConfigError(f"serving over HTTP needs {', '.join(missing)}: pip install 'paramstore[serve]'")


def bind(host: str, port: int) -> socket.socket:
    """A socket that has its place there and does not listen yet: nobody connects who would wait for an import. Port 0 for any that
    is free. Raises ConfigError naming what is in the way."""
    bound = None
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        bound = socket.socket(family, socket.SOCK_STREAM)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
        return bound
    except (OSError, OverflowError) as error:
        if bound is not None:
            bound.close()
        raise ConfigError(f"--host {host} --port {port}: {error}: give another") from error


class ModelServer:
    """transformers' server, for the model `name`; made before the model is there, so that what it lacks is told first.

    Raises ConfigError where the installed transformers has no such server.
    """

    def __init__(self, name: str) -> None:
        from paramstore_client.hf.compat.serving import openai_server

        self._opened: RunModel | None = None
        self._app = openai_server(self._model, name=name)

    def serve(
        self, opened: RunModel, listener: socket.socket, *, ready: Callable[[], object], tell: Callable[[str], object]
    ) -> None:
        """Answers requests at `listener`, which `bind` made, until the process is told to end: answers under way end at their next
        token, and that signal is raised again. Above REQUESTS_MAX at a time, requests are refused with 503. ready: called when
        requests can come. tell: is given lines for people. Raises ConfigError where another listens there meanwhile."""
        from paramstore.run.answers import stopping_when

        self._opened = opened
        if not getattr(opened.tokenizer, "chat_template", None):
            tell("the model has no chat template: /v1/completions alone answers")
        uvicorn = importlib.import_module("uvicorn")
        config = uvicorn.Config(  # uvloop waits for ever where an interrupt comes just before uvicorn takes signals over
            self._app, log_level="warning", ws="none", loop="asyncio", lifespan="off", limit_concurrency=REQUESTS_MAX,
            timeout_graceful_shutdown=SHUTDOWN_S,
        )  # fmt: skip
        server, generate = uvicorn.Server(config), opened.model.generate

        def generate_until_the_end(*given: Any, **named: Any) -> Any:
            return generate(*given, stopping_criteria=stopping_when(lambda: server.should_exit), **named)

        opened.model.generate = generate_until_the_end  # else an answer under way would go on without its experts
        try:
            listener.listen(BACKLOG)
        except OSError as error:
            raise ConfigError(f"port {listener.getsockname()[1]}: {error}: give another") from error
        ready()
        server.run(sockets=[listener])

    def _model(self) -> tuple[Any, Any]:
        return (None, None) if self._opened is None else (self._opened.model, self._opened.tokenizer)
