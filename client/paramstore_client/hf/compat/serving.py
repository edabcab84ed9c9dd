"""What is relied on of transformers' OpenAI-compatible server (`transformers serve`): that it serves a model that is there.

| name | status | seen the same in |
|---|---|---|
| `ModelManager(force_model=)`: each request is for that one model, another name is refused | internal | 5.24 |
| `ModelManager.load_model_and_processor(...)` -> (model, tokenizer), asked once in vain, and at each request | internal | 5.24 |
| `build_server(manager, handlers..., generation_state=)` -> a FastAPI application | internal | 5.24 |
| `GenerationState.get_manager(name)`: one thread computes all answers of a name, one after the other | internal | 5.24 |
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from paramstore.errors import ConfigError
from paramstore_client.hf.compat.modeling import transformers

HANDLERS = {
    "chat_handler": ("chat_completion", "ChatCompletionHandler"), "completion_handler": ("completion", "CompletionHandler"),
    "response_handler": ("response", "ResponseHandler"), "transcription_handler": ("transcription", "TranscriptionHandler"),
    "systemone_handler": ("systemone", "SystemOneHandler"),
}  # fmt: skip
"""Arguments of `build_server`, each with the module and class of what answers those requests."""


def openai_server(find: Callable[[], tuple[Any, Any]], *, name: str) -> Any:
    """An ASGI application that answers for a model under `name`: /v1/chat/completions, /v1/completions, /v1/responses, streamed or
    not, /v1/models and /health. Answers are computed one after the other, by one thread. find: gives the model and its tokenizer
    as each request comes; what it gives while the application is made is not used.

    Raises ConfigError where transformers has no such server, or another one than is known.
    """
    version = transformers().__version__
    try:
        found = {part: importlib.import_module(f"transformers.cli.serving.{part}") for part, _ in HANDLERS.values()}
        server, managers, utils = (
            importlib.import_module(f"transformers.cli.serving.{part}") for part in ("server", "model_manager", "utils")
        )

        class OneModel(managers.ModelManager):  # type: ignore[misc, name-defined]  # of a module that is found as it runs
            """Has the model that it was given, and loads none."""

            def load_model_and_processor(self, *names: Any, **options: Any) -> tuple[Any, Any]:
                return find()

        state, manager = utils.GenerationState(continuous_batching=False), OneModel(force_model=name)
        handlers = {argument: getattr(found[part], kind)(manager, state) for argument, (part, kind) in HANDLERS.items()}
        return server.build_server(manager, **handlers, generation_state=state)
    except (ImportError, AttributeError, TypeError, NameError) as error:
        raise ConfigError(
            f"transformers {version} has no server that this version of paramstore knows ({error}): 5.24 has, with its extra "
            "`serving`: pip install 'paramstore[serve]' 'transformers~=5.24'"
        ) from error
