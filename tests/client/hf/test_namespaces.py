from __future__ import annotations

import pytest
import torch

import paramstore_client as ps
from paramstore.errors import SchemaMismatch
from paramstore.testing.daemon_process import DaemonProcess
from paramstore_client.hf import ExpertLayout, ExpertTensor
from paramstore_client.hf.namespaces import open_experts

pytestmark = pytest.mark.slow

LAYOUT = ExpertLayout({2: "layers.2.experts", 5: "layers.5.experts"}, 4, (ExpertTensor("w", (8, 8), torch.float32),))
SCHEMA = LAYOUT.schema(updates="touched")


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory):  # type: ignore[no-untyped-def]
    with DaemonProcess(tmp_path_factory.mktemp("namespaces") / "store", "--host-budget", "64MiB") as daemon:
        yield daemon.address


def fill(namespace: ps.Namespace) -> None:
    namespace.initialize(lambda key: {"w": torch.full((8, 8), float(key[1]))})


def refuse(namespace: ps.Namespace) -> None:
    raise AssertionError("a committed namespace is not filled again")


def test_new_namespace_is_filled_committed_and_written(address: str) -> None:
    with ps.connect(address) as store:
        namespace = open_experts(store, "new", LAYOUT, SCHEMA, mode="train", fill=fill)
        assert (namespace.mode, namespace.committed_step, namespace.layers) == ("write", 0, (2, 5))


def test_committed_namespace_is_opened_as_it_is(address: str) -> None:
    with ps.connect(address) as store:
        open_experts(store, "kept", LAYOUT, SCHEMA, mode="train", fill=fill).commit(7).wait()
        assert open_experts(store, "kept", LAYOUT, SCHEMA, mode="train", fill=refuse).committed_step == 7
        reader = open_experts(store, "kept", LAYOUT, LAYOUT.schema(None), mode="infer", fill=refuse)
        assert (reader.mode, reader.view_step) == ("read", 7)


def test_filling_that_failed_is_begun_again(address: str) -> None:
    with ps.connect(address) as store:
        with pytest.raises(AssertionError):
            open_experts(store, "again", LAYOUT, SCHEMA, mode="train", fill=refuse)
        assert open_experts(store, "again", LAYOUT, SCHEMA, mode="train", fill=fill).committed_step == 0


def test_another_schema_is_refused_and_nobody_is_left_writing(address: str) -> None:
    with ps.connect(address) as store:
        open_experts(store, "other", LAYOUT, SCHEMA, mode="train", fill=fill).close()
        with pytest.raises(SchemaMismatch, match="another name="):
            open_experts(store, "other", LAYOUT, LAYOUT.schema(None), mode="train", fill=refuse)
        assert open_experts(store, "other", LAYOUT, SCHEMA, mode="train", fill=refuse).mode == "write"


def test_inference_namespace_is_made_from_a_checkpoints_own_bytes(address: str) -> None:
    with ps.connect(address) as store:
        reader = open_experts(store, "bytes", LAYOUT, LAYOUT.schema(None), mode="infer", fill=fill)
        assert (reader.mode, reader.schema.kind) == ("read", "param")
        with reader.acquire([(5, 3)]) as lease:
            assert torch.equal(lease[5, 3]["w"], torch.full((8, 8), 3.0))
