"""Loads a checkpoint's tokenizer, by transformers' own code alone: Python that lies in a checkpoint is never run."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from paramstore.errors import CheckpointError
from paramstore_client.hf.compat import modeling
from paramstore_client.hf.compat.refusals import check_code


def load_tokenizer(path: str | os.PathLike[str]) -> Any:
    """The tokenizer beside the checkpoint in directory `path`. Raises CheckpointError where none can be loaded, UnsupportedModel
    where it would take the checkpoint's own Python; nobody is asked whether to run that."""
    try:
        return modeling.transformers().AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # what tokenizers raise has no common class
        for file in ("tokenizer_config.json", "config.json"):
            check_code(Path(path) / file, error)
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise CheckpointError(
            f"{os.fspath(path)} has no tokenizer that can be loaded ({reason[0]}): put the model's tokenizer files beside its "
            "config.json"
        ) from error
