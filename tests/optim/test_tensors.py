"""Tensors over memoryviews share their bytes; worker threads run torch with one thread, the main thread as
before."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from paramstore.core.schema import Field
from paramstore.optim import tensors
from paramstore.optim.tensors import configure_threads, field_tensor, flat_tensor, torch_dtype


def test_a_field_is_seen_in_place() -> None:
    image = bytearray(4096 + 12)
    tensor = field_tensor(memoryview(image), Field("w", (3, 2), "bfloat16", 4096))
    tensor.fill_(1.0)
    assert image[4096:] == b"\x80\x3f" * 6
    assert not any(image[:4096])


def test_a_range_is_seen_in_place() -> None:
    image = bytearray(16)
    flat_tensor(memoryview(image)[4:12], "float32")[1] = 1.0
    assert image == bytes(8) + b"\x00\x00\x80\x3f" + bytes(4)


def test_a_range_of_part_of_an_element_is_refused() -> None:
    with pytest.raises(AssertionError):
        flat_tensor(memoryview(bytearray(6)), "float32")


def test_dtypes_are_found_by_the_names_the_schema_uses() -> None:
    assert torch_dtype("float8_e4m3fn") is torch.float8_e4m3fn


@pytest.fixture
def two_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No thread is configured yet, and torch has two threads."""
    monkeypatch.setattr(tensors, "_thread", threading.local())
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("two_threads")
def test_a_worker_runs_torch_with_one_thread_from_its_first_call_on() -> None:
    seen = list[int]()

    def work() -> None:
        torch.set_num_threads(2)
        configure_threads()
        seen.append(torch.get_num_threads())

    worker = threading.Thread(target=work)
    worker.start()
    worker.join()
    assert seen == [1]
    assert torch.get_num_threads() == 2


@pytest.mark.usefixtures("two_threads")
def test_the_main_thread_keeps_its_threads() -> None:
    configure_threads()
    assert torch.get_num_threads() == 2
