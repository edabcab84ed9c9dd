"""Builds a checkpoint's model without memory, for whoever needs to know where its experts are, and no more."""

from __future__ import annotations

import os
from typing import Any

import torch

from paramstore.core.schema import dtype_name
from paramstore.errors import CheckpointError
from paramstore_client.checkpoint_directory import checkpoint_directory
from paramstore_client.hf.compat import modeling
from paramstore_client.hf.compat.refusals import check_code, check_config
from paramstore_client.tensors import DTYPES


def skeleton(path: str | os.PathLike[str], *, dtype: str | None = None, mode: str = "infer") -> Any:
    """The model of the checkpoint at `path` (a directory, or an id in the hub's cache), every tensor on meta, as transformers
    builds it. dtype: of its weights; None: what its configuration says, else float32. mode: "train" refuses quantized experts.

    Raises CheckpointError, UnsupportedModel, ConfigError, SchemaMismatch for an unknown dtype.
    """
    directory, transformers = checkpoint_directory(path), modeling.transformers()
    if not (directory / "config.json").exists():
        raise CheckpointError(f"{directory} is no checkpoint of transformers: it has no config.json")
    try:
        config, _ = modeling.load_config(
            transformers.AutoModelForCausalLM, directory, local_files_only=True, trust_remote_code=False
        )  # fmt: skip
    except (OSError, ValueError) as error:
        check_code(directory / "config.json", error)
        raise CheckpointError(f"{directory} is no checkpoint of transformers: {str(error).splitlines()[0]}") from error
    check_config(config, mode=mode)
    named = next((getattr(transformers, name, None) for name in config.architectures or ()), None)
    model_class = modeling.concrete_class(named or transformers.AutoModelForCausalLM, config)
    found = dtype or getattr(config, "dtype", None) or torch.float32
    return modeling.on_meta(model_class, modeling.config_of(model_class, config)).to(DTYPES[dtype_name(found)])
