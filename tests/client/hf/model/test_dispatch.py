from __future__ import annotations

import pytest
import torch

from paramstore.errors import ConfigError
from paramstore_client.hf.model.dispatch import look_up
from paramstore_testkit.streams.cuda import simulated_cuda
from paramstore_testkit.streams.device_tensor import CUDA
from paramstore_testkit.streams.world import StreamWorld


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("shape", [(1, 1), (1, 4), (17, 3), (64, 8)])
def test_dispatch_is_what_unique_gives(shape: tuple[int, int], dtype: torch.dtype) -> None:
    for seed in range(5):
        ids = torch.randint(11, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
        experts, positions, counts = torch.unique(ids, return_inverse=True, return_counts=True)
        found = look_up(ids, experts=11)
        assert found.experts == experts.tolist(), f"seed {seed}"
        assert found.counts == counts.tolist(), f"seed {seed}"
        assert torch.equal(found.positions_TK, positions), f"seed {seed}"
        assert found.positions_TK.dtype is torch.int64


def test_guesses_come_as_they_were_given_in_the_same_transfer(monkeypatch: pytest.MonkeyPatch) -> None:
    transfers: list[int] = []
    tolist = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda self: transfers.append(1) or tolist(self))
    found = look_up(torch.tensor([[3, 1], [3, 0]]), experts=4, guesses_G=torch.tensor([[2, 2], [9, 0]], dtype=torch.int32))
    assert (found.experts, found.counts, found.guesses) == ([0, 1, 3], [1, 1, 2], [2, 2, 9, 0])
    assert len(transfers) == 1


def test_no_token_chooses_nothing() -> None:
    found = look_up(torch.empty(0, 2, dtype=torch.int64), experts=4)
    assert (found.experts, found.counts, found.guesses, found.positions_TK.shape) == ([], [], [], (0, 2))


def test_capture_of_a_cuda_graph_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch would end it as well, with words about streams."""
    with simulated_cuda(StreamWorld(0)):
        ids = torch.tensor([[1, 2]], device=CUDA)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        with pytest.raises(ConfigError, match=r"in a CUDA graph.* ContinuousBatchingConfig\(use_cuda_graph=False\)"):
            look_up(ids, experts=4)
    look_up(torch.tensor([[1, 2]]), experts=4)  # on the host there is none
