"""transformers' server takes a model that is there, and what it lacks is told with the command that mends it."""

from __future__ import annotations

import importlib
import json
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from paramstore.errors import ConfigError
from paramstore_client.hf.compat import serving
from paramstore_client.hf.compat.serving import openai_server


def test_the_server_has_the_paths_of_openai_and_knows_one_model_alone() -> None:
    app: Any = openai_server(lambda: (object(), PreTrainedTokenizerFast.__new__(PreTrainedTokenizerFast)), name="org/model")
    paths = {route.path for route in app.routes}
    assert {"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/models", "/health"} <= paths
    listed = next(route for route in app.routes if route.path == "/v1/models").endpoint()
    assert [model["id"] for model in json.loads(listed.body)["data"]] == ["org/model"]


@pytest.mark.parametrize("part", ["server", "model_manager", "chat_completion"])
def test_a_transformers_without_that_server_is_told_with_the_way_out(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.import_module

    def without(name: str) -> Any:
        if name == f"transformers.cli.serving.{part}":
            raise ModuleNotFoundError(f"No module named {name!r}")
        return found(name)

    monkeypatch.setattr(serving.importlib, "import_module", without)
    with pytest.raises(ConfigError, match=rf"has no server .*{part}.*pip install 'paramstore\[serve\]'"):
        openai_server(lambda: (object(), object()), name="m")


def test_a_server_that_takes_other_arguments_is_told_too(monkeypatch: pytest.MonkeyPatch) -> None:
    server = importlib.import_module("transformers.cli.serving.server")
    monkeypatch.setattr(server, "build_server", lambda manager: None)
    with pytest.raises(ConfigError, match=r"has no server that this version of paramstore knows .*unexpected keyword"):
        openai_server(lambda: (object(), object()), name="m")
