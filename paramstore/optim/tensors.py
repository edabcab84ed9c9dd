"""Makes tensors of the bytes of slots, and sets how many threads torch may use on them.

This is the one place where a memoryview becomes a tensor. Nothing is copied, and a tensor keeps its memory alive.
"""

from __future__ import annotations

import threading

import torch

from paramstore.core.schema import ITEM_BYTES, Field

_thread = threading.local()


def field_tensor(image: memoryview, field: Field) -> torch.Tensor:
    """The field's elements in `image`, flat. image: writable, whole part or initial value."""
    return torch.frombuffer(image, dtype=torch_dtype(field.dtype), count=field.elements, offset=field.offset_bytes)


def flat_tensor(view: memoryview, dtype: str) -> torch.Tensor:
    """All of `view` as elements of `dtype`. view: writable, one or more whole elements."""
    assert view.nbytes % ITEM_BYTES[dtype] == 0
    return torch.frombuffer(view, dtype=torch_dtype(dtype))


def torch_dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def configure_threads() -> None:
    """Gives torch one intra-op thread on the calling worker thread; the main thread is left as it is.

    Workers run records side by side, which needs no hand-over between threads. torch keeps the number per thread, and a
    new thread starts with the number that any thread set last: so every function of this package that computes calls this
    first, and only a thread's first call costs anything.
    """
    if threading.current_thread() is threading.main_thread() or hasattr(_thread, "is_configured"):
        return
    torch.set_num_threads(1)
    _thread.is_configured = True
