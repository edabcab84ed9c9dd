"""Device sums where the bytes are: the formula of `core.checksums` as one expression of torch, for any device.

Equal on the CPU to plain integers; never run on a GPU.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from paramstore.core.checksums import WORD_BYTES, WORDS, multipliers
from paramstore.core.schema import CHUNK_BYTES, Part


def multipliers_on(device: torch.device) -> Tensor:
    """The multipliers, int64 [WORDS], on a device."""
    with torch.inference_mode(False):
        return torch.from_numpy(multipliers().copy()).to(device)


def device_sums(image: Tensor, part: Part, odd: Tensor) -> Tensor:
    """The device sum of each chunk of `part`, in order, int64 [C]: the bits of the unsigned number.

    image: uint8 [image_bytes], without gaps, on the device of odd, which are the multipliers. One chunk at a time takes
    8 MiB beside it.
    """
    return torch.stack([one for field in part.fields for one in _field_sums(image, field.offset_bytes, field.length_bytes, odd)])


def _field_sums(image: Tensor, start: int, length_bytes: int, odd: Tensor) -> list[Tensor]:
    whole = length_bytes // CHUNK_BYTES * CHUNK_BYTES
    rows = image[start : start + whole].view(torch.int32).view(-1, WORDS)
    sums = [(words * odd).sum() for words in rows]
    if left := length_bytes - whole:
        rest = image[start + whole : start + length_bytes]
        if left % WORD_BYTES:
            rest = pad(rest, (0, WORD_BYTES - left % WORD_BYTES))
        words = rest.view(torch.int32)
        sums.append((words * odd[: len(words)]).sum())
    return sums
