"""The peer of decoding: accelerate's `disk_offload`, with as many layers in memory as the budget has experts for, others on disk.

It reads a layer whole where a token needs a few of its experts. What it has read stays in the page cache, beyond any budget of its
own; so the pages of its files are dropped before each token, as they would be where memory is as small as the budget says.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM

TARGETS = {0.5: 10.0, 0.25: 6.0}
"""Share of the experts in memory -> how many times the peer's speed is asked."""
ALWAYS_IN_MEMORY = ("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head")


def offloaded(checkpoint: Path, folder: Path, *, layers: int, share: float) -> Any:
    """The checkpoint's model with its first layers in memory, `share` of them, and the others in files of `folder`."""
    kept = round(share * layers)
    places = dict.fromkeys(ALWAYS_IN_MEMORY, "cpu")
    places |= {f"model.layers.{layer}": "cpu" if layer < kept else "disk" for layer in range(layers)}
    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype="auto", device_map=places, offload_folder=folder)


def drop_pages(folders: Iterable[Path]) -> None:
    """Has the system forget what it keeps of the files in these folders; what is not written yet is written first."""
    for folder in folders:
        for path in folder.iterdir():
            with path.open("rb") as file:
                os.fdatasync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
