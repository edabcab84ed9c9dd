"""`python -m paramstore_testkit.processes.rank_process`: ranks in processes of their own, which do as they are told, line by line.

A request {address, commands, environment} makes a child that connects and reads JSON commands from the FIFO `commands`; it
answers each with one line of JSON: {"result": ...} or {"error": class name, "message": ...}. `RankProcess` is the other end.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import paramstore_client as ps
from paramstore_testkit.processes.fork_server import ForkServer, say, serve_forks

MODULE = "paramstore_testkit.processes.rank_process"


def gradient(seed: int, shape: tuple[int, ...]) -> torch.Tensor:
    """Makes values whose sum over several seeds depends on its order."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 10.0 ** (seed * 7 % 5 - 2)


class RankProcess(ForkServer):
    """One rank at a time, in a process that can be killed."""

    def __init__(self, directory: Path) -> None:
        super().__init__(MODULE, log=directory / "rank.log")
        self._directory = directory
        self._commands = -1

    def start(self, address: str, environment: Mapping[str, str]) -> None:
        """Starts a new process, connected to the daemon."""
        fifo = self._directory / "commands"
        fifo.unlink(missing_ok=True)
        os.mkfifo(fifo, 0o600)
        self._close_commands()
        self._commands = os.open(fifo, os.O_RDWR)
        self.fork({"address": address, "commands": str(fifo), "environment": dict(environment)})

    def tell(self, what: str, **arguments: object) -> None:
        """Sends a command; `answer` gives its result."""
        os.write(self._commands, json.dumps({"what": what, **arguments}).encode() + b"\n")

    def answer(self) -> Any:
        """Gives the result of the oldest unanswered command. Raises the error that it met."""
        said = self.heard()
        assert said is not None, "the rank's process ended"
        answer = json.loads(said)
        if "error" in answer:
            raise getattr(ps, answer["error"])(answer["message"])
        return answer["result"]

    def ask(self, what: str, **arguments: object) -> Any:
        self.tell(what, **arguments)
        return self.answer()

    def close(self) -> None:
        super().close()
        self._close_commands()

    def _close_commands(self) -> None:
        if self._commands >= 0:
            os.close(self._commands)
            self._commands = -1


class _Commands:
    """The commands of a rank. It has one namespace, `moe`, and tickets that nobody has waited for."""

    def __init__(self, address: str) -> None:
        self.store = ps.connect(address)
        self.namespace: ps.Namespace
        self.tickets: list[ps.Ticket[Any]] = []

    def open(self, rank: int, world_size: int) -> int:
        self.namespace = self.store.open_namespace("moe", "write", rank=rank, world_size=world_size)
        return self.namespace.epoch

    def reconnect(self) -> None:
        self.store.reconnect()

    def push(self, keys: list[list[int]], seed: int) -> None:
        fields = {name: tuple(shape) for name, shape, _ in self.namespace.schema.specs}
        value = {name: gradient(seed, shape) for name, shape in fields.items()}
        self.namespace.push(dict.fromkeys([(layer, expert) for layer, expert in keys], value))

    def apply(self, lr: float = 0.1) -> int:
        return int(self.namespace.apply(ps.AdamW(lr=lr)).wait()["records"])

    def begin_apply(self, lr: float = 0.1) -> None:
        self.tickets.append(self.namespace.apply(ps.AdamW(lr=lr)))

    def begin_commit(self, step: int) -> None:
        self.tickets.append(self.namespace.commit(step))

    def wait(self) -> Any:
        return self.tickets.pop(0).wait()

    def norm(self) -> str:
        return self.namespace.gradient_norm().hex()

    def commit(self, step: int) -> Any:
        return self.namespace.commit(step).wait()

    def prepare(self, step: int) -> Any:
        return self.namespace.prepare(step).wait()

    def finalize(self, step: int) -> None:
        self.namespace.finalize(step).wait()

    def rollback(self, step: int) -> int:
        return self.namespace.rollback(step)

    def committed_step(self) -> int | None:
        return self.namespace.committed_step

    def values(self, key: list[int]) -> list[float]:
        wanted = (key[0], key[1])
        with self.namespace.acquire([wanted]) as lease:
            (field,) = self.namespace.schema.part("param").fields
            return list(lease[wanted][field.name].flatten().tolist())


def _live(request: dict[str, Any]) -> None:
    os.environ.update(request["environment"])
    commands = _Commands(request["address"])
    with Path(request["commands"]).open() as lines:
        for line in lines:
            told = json.loads(line)
            what = told.pop("what")
            try:
                answer = {"result": getattr(commands, what)(**told)}
            except ps.ParamStoreError as error:
                answer = {"error": type(error).__name__, "message": str(error)}
            say(json.dumps(answer))


if __name__ == "__main__":
    serve_forks(_live)
