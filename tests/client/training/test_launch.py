from __future__ import annotations

import pytest

from paramstore.errors import ConfigError
from paramstore_client.training import launched


def test_outside_of_torchrun_there_is_one_rank() -> None:
    assert launched({}) == {"rank": 0, "world_size": 1}


def test_the_ranks_of_a_node_are_counted_on_it() -> None:
    assert launched({"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "RANK": "5", "WORLD_SIZE": "8"}) == {"rank": 1, "world_size": 2}


def test_what_is_no_number_is_named() -> None:
    with pytest.raises(ConfigError, match="LOCAL_RANK"):
        launched({"LOCAL_RANK": "first"})
