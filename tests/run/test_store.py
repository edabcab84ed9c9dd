"""What a store is found to have before a run: nothing, another's experts, an import's first ones, all; served or not."""

from __future__ import annotations

import pytest
import torch

import paramstore_client as ps
from paramstore.run.home import Home
from paramstore.run.store import RunStore, look
from paramstore_testkit.processes.forked_daemon import ForkedDaemon

MIB = 1 << 20
SCHEMA = ps.param_schema({"w": ((8, 8), torch.float32)})


def values(key: tuple[int, int]) -> dict[str, torch.Tensor]:
    return {"w": torch.full((8, 8), float(key[1]))}


def test_what_is_there_is_counted_for_this_namespace_alone_served_or_not(tmp_path_factory: pytest.TempPathFactory) -> None:
    directory = tmp_path_factory.mktemp("s") / "store"

    def there(namespace: str) -> RunStore:
        return look(Home("m", directory, directory, namespace, is_default=False))

    assert there("begun") == RunStore(None, 0)
    with ForkedDaemon(directory, "--host-budget", "48MiB") as daemon, ps.connect(daemon.address) as store:
        with store.create_namespace("whole", SCHEMA, layers=1, experts=4) as whole:
            whole.initialize(values)
            whole.commit(1).wait()
            record_bytes = whole.schema.record_bytes
        with store.create_namespace("begun", SCHEMA, layers=1, experts=4) as begun, begun.begin_initialize() as initialization:
            initialization.put((0, 0), values((0, 0)))
            initialization.settle()
            initialization.save(b"one of four").wait()
        assert there("whole") == RunStore(48 * MIB, None)
        assert there("none") == RunStore(48 * MIB, 0)
    assert there("begun") == RunStore(None, record_bytes)
    assert there("whole") == RunStore(None, None)
    assert there("none") == RunStore(None, 0)
    (directory / "catalog" / "data.mdb").write_bytes(b"damaged")
    assert there("whole") == RunStore(None, None)  # whoever opens it says so
