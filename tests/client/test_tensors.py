from __future__ import annotations

from pathlib import Path

import pytest
import torch

from paramstore_client.tensors import mapped


def mapped_bytes() -> int:
    """Size of this process's address space."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * 4096


@pytest.mark.parametrize("shape", [(), (3,), (0, 4), (2, 3, 4)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_mapped_memory_is_zeros_that_can_be_written(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tensor = mapped(shape, dtype)
    assert (tensor.shape, tensor.dtype) == (shape, dtype)
    assert torch.equal(tensor, torch.zeros(shape, dtype=dtype))
    tensor.fill_(1)
    assert torch.equal(tensor, torch.ones(shape, dtype=dtype))


def test_mapped_memory_goes_with_its_last_view() -> None:
    before = mapped_bytes()
    view = mapped((1 << 24,), torch.float32)[5:]
    assert mapped_bytes() - before >= 60 << 20
    del view
    assert mapped_bytes() - before < 8 << 20
