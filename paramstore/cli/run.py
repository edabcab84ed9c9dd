"""`paramstore run` and `paramstore serve-model`: a model answers, on the terminal or over HTTP, its experts in a store of its own.

An interrupt keeps what was imported; the same command goes on with the rest.
"""

from __future__ import annotations

import logging
import select
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import typer

from paramstore.cli.signals import end_as_interrupt, stopping, told
from paramstore.errors import ConfigError
from paramstore.sizes import parse_size

MODEL_HELP = "A directory of safetensors, or the id of a model in the hub's cache; nothing is fetched."
PROMPT_HELP = "What to answer, above what standard input has. Without both, on a terminal, a chat, line by line."
DIR_HELP = "The store's directory; default one of the model's own in ~/.cache/paramstore."
NAMESPACE_HELP = "The namespace in the store; default named from the checkpoint's place."
MEMORY_HELP = "Experts that stay in memory: a size, as 12GiB, or how many; default what the host budget allows."
BUDGET_HELP = "Host memory of the daemon that is started, as 64GiB; default PARAMSTORE_HOST_BUDGET, else half of what is available."
DTYPE_HELP = "float32, bfloat16 or float16; default the checkpoint's."
KEEP_HELP = "Leave the daemon that was started running: the next run finds experts in its memory."
NOTHING_TO_FOLLOW = (
    "--follow without --dir: nobody trains in the store that a run makes for itself; give the --dir of the trainer's store, and "
    "the --namespace that it commits"
)
PROMPT_SIGN = ">>> "
SEED_MAX = (1 << 64) - 1
PIPE_WAIT_S = 2.0
"""Seconds in which something has to come on a standard input that is given beside PROMPT."""


def run(
    model: str = typer.Argument(help=MODEL_HELP),
    prompt: str = typer.Argument(None, help=PROMPT_HELP),
    tokens: int = typer.Option(None, "--tokens", min=1, help="Most new tokens of an answer; default the checkpoint's, else 1024."),
    temperature: float = typer.Option(None, "--temperature", min=0.0, help="0: the likeliest token; default the checkpoint's way."),
    seed: int = typer.Option(None, "--seed", min=0, max=SEED_MAX, help="Of tokens that are drawn; default another one each time."),
    raw: bool = typer.Option(False, "--raw", help="Give the prompt to the model as it is, without its chat template."),
    follow: bool = typer.Option(False, "--follow", help="Move to the newest committed step before each answer."),
    expert_memory: str = typer.Option(None, "--expert-memory", help=MEMORY_HELP),
    dtype: str = typer.Option(None, "--dtype", help=DTYPE_HELP),
    host_budget: str = typer.Option(None, "--host-budget", help=BUDGET_HELP),
    directory: Path = typer.Option(None, "--dir", help=DIR_HELP),
    namespace: str = typer.Option(None, "--namespace", help=NAMESPACE_HELP),
    keep: bool = typer.Option(False, "--keep", help=KEEP_HELP),
) -> None:
    """Answer a prompt with a mixture-of-experts model that need not fit into memory; without a prompt, chat."""
    from paramstore.core.arguments import number
    from paramstore.run.home import home_of

    _check_words(expert_memory=expert_memory, dtype=dtype, host_budget=host_budget)
    if follow and directory is None:
        raise ConfigError(NOTHING_TO_FOLLOW)
    if temperature is not None:
        number("--temperature", temperature, least=0.0, expected="a finite number from 0 on")
    home = home_of(model, directory=directory, namespace=namespace, dtype=dtype)  # told before the imports that take seconds
    asked = _asked(prompt)
    import torch

    from paramstore.run.answers import Answers, AnswerSettings
    from paramstore.run.chat import chat, user_says
    from paramstore.run.model import RunModel, RunSettings, use_model

    end_as_interrupt()
    if seed is None:
        torch.seed()
    else:
        torch.manual_seed(seed)
    settings = RunSettings(expert_memory=_memory(expert_memory), dtype=dtype, host_budget=host_budget, keeps=keep)
    how = AnswerSettings(tokens=tokens, temperature=temperature, is_raw=raw, follows=follow)

    def use(opened: RunModel) -> None:
        imported()
        answers = Answers(opened, how, tell=_tell)
        try:
            if asked is not None:
                answers.answer([user_says(asked)])
            else:
                chat(_read_line, _stoppable(answers.answer, answers.stop), fits=answers.fits, tell=_tell)
        finally:
            if answers.figures.answers:
                _tell(answers.figures.line())

    with _telling_of_interrupts() as imported:
        use_model(home, settings, _tell, use)


def serve_model(
    model: str = typer.Argument(help=MODEL_HELP),
    host: str = typer.Option("127.0.0.1", "--host", help="Where to listen; whoever reaches it may ask, without a password."),
    port: int = typer.Option(8000, "--port", min=0, max=65535, help="0: any that is free."),
    expert_memory: str = typer.Option(None, "--expert-memory", help=MEMORY_HELP),
    dtype: str = typer.Option(None, "--dtype", help=DTYPE_HELP),
    host_budget: str = typer.Option(None, "--host-budget", help=BUDGET_HELP),
    directory: Path = typer.Option(None, "--dir", help=DIR_HELP),
    namespace: str = typer.Option(None, "--namespace", help=NAMESPACE_HELP),
    keep: bool = typer.Option(False, "--keep", help=KEEP_HELP),
) -> None:
    """Serve a model as OpenAI does, by transformers' own server. Prints `ready http://...` when requests can come."""
    from paramstore.run.home import home_of
    from paramstore.run.server import ModelServer, bind, check_packages

    check_packages()
    _check_words(expert_memory=expert_memory, dtype=dtype, host_budget=host_budget)
    home = home_of(model, directory=directory, namespace=namespace, dtype=dtype)
    listener = bind(host, port)
    from paramstore.run.model import RunModel, RunSettings, use_model

    end_as_interrupt()
    settings = RunSettings(expert_memory=_memory(expert_memory), dtype=dtype, host_budget=host_budget, keeps=keep)

    def ready() -> None:
        place = f"[{host}]" if ":" in host else host
        sys.stdout.write(f"ready http://{place}:{listener.getsockname()[1]}/v1\n")
        sys.stdout.flush()

    def use(opened: RunModel) -> None:
        imported()
        server.serve(opened, listener, ready=ready, tell=_tell)
        _tell("stopped")

    with listener, _telling_of_interrupts() as imported:
        server = ModelServer(model)
        use_model(home, settings, _tell, use)


def _check_words(*, expert_memory: str | None, dtype: str | None, host_budget: str | None) -> None:
    """Raises ConfigError if an option has a value that it does not know."""
    from paramstore.core.arguments import choice
    from paramstore.core.schema import PARAM_DTYPES

    if dtype is not None:
        choice("--dtype", dtype, PARAM_DTYPES)
    for name, size in (("--host-budget", host_budget), ("--expert-memory", expert_memory)):
        if size is not None and not (name == "--expert-memory" and size.isdecimal() and int(size)):
            try:
                parse_size(size)
            except ConfigError as error:
                raise ConfigError(f"{name}: {error}") from error


def _memory(expert_memory: str | None) -> str | int | None:
    return int(expert_memory) if expert_memory is not None and expert_memory.isdecimal() else expert_memory


def _asked(prompt: str | None) -> str | None:
    """The prompt that was given, and below it what lies on standard input; None for a chat. Raises ConfigError for an empty one,
    and for bytes that are no UTF-8."""
    if prompt is None and sys.stdin is not None and sys.stdin.isatty():
        return None
    try:
        asked = "\n".join(text for text in (prompt, _piped(waits=prompt is None)) if text)
        asked.encode()  # in some locales Python reads other bytes as surrogates
    except UnicodeError as error:
        raise ConfigError(f"the prompt is no text in UTF-8: {error}") from error
    if not asked.strip():
        raise ConfigError("there is no prompt: give PROMPT, or one on standard input; on a terminal, without either, it is a chat")
    return asked


def _piped(*, waits: bool) -> str:
    """All of standard input, less the end of its last line, which `echo` and editors write; "" where it is closed or a terminal.

    waits: for as long as it takes. Else something has to come within PIPE_WAIT_S: a program that starts this one may have left open
    a pipe in which nothing ever comes; and input that cannot be read has nothing. Raises ConfigError, UnicodeDecodeError."""
    if sys.stdin is None or sys.stdin.isatty():
        return ""
    try:
        if not waits and not select.select([sys.stdin], [], [], PIPE_WAIT_S)[0]:
            _tell(f"nothing came on standard input within {PIPE_WAIT_S:g} s: the prompt is PROMPT alone")
            return ""
        return sys.stdin.read().removesuffix("\n")
    except OSError as error:
        if waits:
            raise ConfigError(f"standard input cannot be read: {error}: give PROMPT") from error
        return ""


def _tell(line: str) -> None:
    sys.stderr.write(f"paramstore: {line}\n")
    sys.stderr.flush()


def _read_line() -> str | None:
    """The next line of the terminal; None at its end (Ctrl-D)."""
    with suppress(ImportError):
        import readline  # noqa: F401 - `input` edits lines by it
    try:
        return input(PROMPT_SIGN if sys.stdout.isatty() else "")
    except EOFError:
        sys.stderr.write("\n")
        return None


def _stoppable(answer: Callable[[Sequence[dict[str, str]]], str], stop: Callable[[], object]) -> Callable[..., str]:
    """`answer`, with Ctrl-C ending the answer under way, and not the chat."""

    def stoppable(messages: Sequence[dict[str, str]]) -> str:
        with stopping(stop):
            return answer(messages)

    return stoppable


@contextmanager
def _telling_of_interrupts() -> Iterator[Callable[[], None]]:
    """A block whose interrupt is told in one line, whatever exception it has become on its way here; what it yields is called once
    nothing is imported any more. Warnings of the libraries look like our lines."""
    logging.basicConfig(format="paramstore: %(message)s", level=logging.WARNING)
    done = list[bool]()
    try:
        yield lambda: done.append(True)
    except BaseException:
        if told() is not None:
            _tell("interrupted" if done else "interrupted; what was imported stays, and the same command goes on from it")
        raise
