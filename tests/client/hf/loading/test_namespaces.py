from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import paramstore_client as ps
from paramstore.errors import SchemaMismatch
from paramstore_client.hf import ExpertLayout, ExpertTensor
from paramstore_client.hf.loading.namespaces import open_experts
from paramstore_testkit.processes.forked_daemon import ForkedDaemon

pytestmark = pytest.mark.slow

LAYOUT = ExpertLayout({2: "layers.2.experts", 5: "layers.5.experts"}, 4, (ExpertTensor("w", (8, 8), torch.float32),))
SCHEMA = LAYOUT.schema(updates="touched")


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory):  # type: ignore[no-untyped-def]
    with ForkedDaemon(tmp_path_factory.mktemp("namespaces") / "store", "--host-budget", "64MiB") as daemon:
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


def test_of_two_that_fill_at_once_the_first_is_told_to_load_again_and_can(address: str) -> None:
    schema = LAYOUT.schema(None)
    with ps.connect(address) as store, ps.connect(address) as other:

        def overtaken(namespace: ps.Namespace) -> None:
            assert open_experts(other, "both", LAYOUT, schema, mode="infer", fill=fill).view_step == 0
            fill(namespace)

        with pytest.raises(ps.WriterFenced, match=r"has begun to fill the new namespace 'both', .* load this model again"):
            open_experts(store, "both", LAYOUT, schema, mode="infer", fill=overtaken)
        assert open_experts(store, "both", LAYOUT, schema, mode="infer", fill=refuse).view_step == 0


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


def test_who_forgets_that_a_namespace_is_served_is_told_the_mode(address: str) -> None:
    with ps.connect(address) as store:
        open_experts(store, "served", LAYOUT, LAYOUT.schema(None), mode="infer", fill=fill).close()
        with pytest.raises(SchemaMismatch, match=r"'served' was made to be served.* mode='infer' .* another name= to train"):
            open_experts(store, "served", LAYOUT, SCHEMA, mode="train", fill=refuse)


@pytest.mark.parametrize("mode", ["train", "infer"])
@pytest.mark.parametrize("is_committed", [False, True])
def test_lease_slots_are_promised_as_asked_or_refused(address: str, mode: str, is_committed: bool) -> None:
    name, schema = f"slots-{mode}-{is_committed}", SCHEMA if mode == "train" else LAYOUT.schema(None)
    with ps.connect(address) as store:
        if is_committed:
            open_experts(store, name, LAYOUT, schema, mode="train", fill=fill).close()
        with pytest.raises(ps.CapacityError, match="min_lease_slots=1000, but"):
            open_experts(store, name, LAYOUT, schema, mode=mode, bounds=(1000, None), fill=fill)
        usual = open_experts(store, name, LAYOUT, schema, mode=mode, fill=refuse)
        usual.close()
        more = usual.lease_slots + (1 if mode == "infer" else 0)
        bounds = more, None
        assert open_experts(store, name, LAYOUT, schema, mode=mode, bounds=bounds, fill=refuse).lease_slots == more


def test_a_model_to_which_no_lease_slot_is_left_is_refused_when_it_opens(address: str) -> None:
    schema, readers = LAYOUT.schema(None), list[ps.Namespace]()
    with ps.connect(address) as store:
        open_experts(store, "crowded", LAYOUT, schema, mode="infer", fill=fill).close()
        while (reader := store.open_namespace("crowded")).lease_slots:
            readers.append(reader)
        with pytest.raises(ps.CapacityError, match=r"served needs a lease slot: .* 0 of its \d+ slots are left .* was promised 4"):
            open_experts(store, "crowded", LAYOUT, schema, mode="infer", fill=refuse)
        readers.pop().close()
        opened = open_experts(store, "crowded", LAYOUT, schema, mode="infer", fill=refuse)
        with opened.acquire([(5, 3)]) as lease:
            assert torch.equal(lease[5, 3]["w"], torch.full((8, 8), 3.0))


@pytest.mark.parametrize("wrong", ["updates", "layers"])
def test_refused_writer_does_not_fence_the_one_at_work(address: str, wrong: str) -> None:
    layout = ExpertLayout({0: "layers.0.experts"}, 4, LAYOUT.tensors) if wrong == "layers" else LAYOUT
    schema = LAYOUT.schema(updates="exact") if wrong == "updates" else SCHEMA
    with ps.connect(address) as store, ps.connect(address) as other:
        trainer = open_experts(store, f"busy-{wrong}", LAYOUT, SCHEMA, mode="train", fill=fill)
        with pytest.raises(SchemaMismatch, match=f"has {wrong} .*another name="):
            open_experts(other, f"busy-{wrong}", layout, schema, mode="train", fill=refuse)
        trainer.commit(1).wait()


@pytest.mark.parametrize("mode", ["train", "infer"])
def test_committed_namespace_that_the_check_refuses_is_not_opened(address: str, mode: str) -> None:
    def refuse_it(reader: ps.Namespace) -> None:
        assert reader.view_step == 0
        raise SchemaMismatch("not the one that is meant")

    with ps.connect(address) as store, ps.connect(address) as other:
        trainer = open_experts(store, f"checked-{mode}", LAYOUT, SCHEMA, mode="train", fill=fill, check=refuse_it)
        with pytest.raises(SchemaMismatch, match="not the one"):
            open_experts(other, f"checked-{mode}", LAYOUT, SCHEMA, mode=mode, fill=refuse, check=refuse_it)
        trainer.commit(1).wait()


RANK = """
import sys, torch, paramstore_client as ps
from paramstore_client.hf.loading.namespaces import open_experts
from tests.client.hf.loading.test_namespaces import LAYOUT
asked = []
def fill(namespace):
    namespace.initialize(lambda key: (asked.append(key), {"w": torch.full((8, 8), float(key[1]))})[1])
with ps.connect(sys.argv[1]) as store:
    reader = open_experts(store, "ranks", LAYOUT, LAYOUT.schema(None), mode="infer", fill=fill)
    values = []
    for key in reader.keys():
        with reader.acquire([key]) as lease:
            values.append(int(lease[key]["w"][0, 0]))
    print(reader.mode, reader.view_step, len(asked), values)
"""


def test_ranks_that_read_make_the_namespace_together(address: str) -> None:
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, address], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env={
                **os.environ, "PYTHONPATH": f"{Path.cwd()}{os.pathsep}{os.environ.get('PYTHONPATH', '')}", "LOCAL_RANK": str(rank),
                "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "run",
            },
        )
        for rank in range(2)
    ]  # fmt: skip
    said = [process.communicate(timeout=60)[0] for process in processes]
    assert said == ["read 0 4 [0, 1, 2, 3, 0, 1, 2, 3]\n"] * 2
