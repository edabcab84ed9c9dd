"""Records which experts the routers of a model of transformers choose, for a routing trace."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import nn

from paramstore.core.arguments import path, text
from paramstore.core.trace import Trace
from paramstore.directories import check_writable
from paramstore.errors import ConfigError
from paramstore_client.client import Store
from paramstore_client.hf.checkpoint.skeleton import skeleton
from paramstore_client.hf.checkpoint.tokenizers import load_tokenizer
from paramstore_client.hf.compat import modeling
from paramstore_client.hf.loading.stored_models import from_pretrained
from paramstore_client.hf.loading.stored_models import namespace as namespace_of
from paramstore_client.hf.model.binding import find_experts
from paramstore_client.hf.model.recording import Recording


def recording(
    model: nn.Module, file: str | os.PathLike[str] | None = None, *, name: str | None = None, how: str = ""
) -> Recording:  # fmt: skip
    """A block in which every decision of the routers of `model` is taken down, with the number of tokens of each expert.

        with ps.hf.recording(model, "run.trace"):
            model.generate(...)

    model: with stored experts, of either mode; one that trains has its backwards, pushes and updates recorded too. file: written
    when the block ends, however it ends; None: none, `recorded()` of the block's value is the trace. name, how: what ran, for
    people; the name is the namespace's by default. `paramstore trace replay` and `trace plot` take the file. Gradients that are
    dropped without an update (`abort`, a step that is skipped) count for the next one.

    Costs nothing outside of the block. Raises ConfigError for another model, a file that cannot be written, and where a recording
    of this model is on; when the block ends, OSError where the file cannot be written after all.
    """
    target = None if file is None else Path(path("file", file))
    name = None if name is None else text("name", name)
    how = text("how", how)
    handle = namespace_of(model)
    if target is not None:
        check_writable("file", target)
    experts = find_experts(model)
    assert experts is not None, "it has a namespace"
    applies = (lambda: handle.apply_count) if handle.mode == "write" else None
    how = how or f"ps.hf.recording of a {type(model).__name__}"
    return Recording(experts, handle.schema, applies=applies, file=target, name=name or handle.name, how=how)


def record_text(directory: Path, file: Path, prompt: str, *, tokens: int, store: Store, name: str | None) -> Trace:
    """Writes the trace of a checkpoint that continues `prompt` by at most `tokens` tokens, the likeliest each time, and gives it.

    name: of the namespace, as for `from_pretrained`, mode="infer"; its progress is a bar. Raises what that raises, and
    CheckpointError without a tokenizer, before the model is loaded.
    """
    transformers = modeling.transformers()
    inputs = load_tokenizer(directory)(prompt, return_tensors="pt")
    if not inputs["input_ids"].numel():
        raise ConfigError(f"the prompt {prompt!r} has no token: say something")
    config = skeleton(directory, mode="infer").config
    auto = transformers.AutoModelForSeq2SeqLM if config.is_encoder_decoder else transformers.AutoModelForCausalLM
    model = from_pretrained(auto, directory, store=store, mode="infer", name=name, progress=True).eval()
    given = inputs["input_ids"]
    how = f"paramstore trace record: {directory.name} continues a prompt of {given.numel()} tokens by {tokens}, greedily"
    with torch.no_grad(), recording(model, file, name=directory.name, how=how) as kept:
        model.generate(
            input_ids=given, attention_mask=inputs.get("attention_mask"), max_new_tokens=tokens, do_sample=False
        )  # fmt: skip
    return kept.recorded()
