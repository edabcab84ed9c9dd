"""A rank of a job that trains the toy model on a store, for torchrun.

`-m paramstore_testkit.training.attached_rank ADDRESS MODE...`; the mode `restart` is alone, with a file for its weights.

Every rank also trains the model in its own memory on all ranks' batches and compares; a difference ends it with an error. Each mode
has a namespace of its own; rank 0 writes a mode's name to stdout when all ranks have done it.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.utils.data
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

import paramstore_client as ps
from paramstore_client import ranges
from paramstore_client.training import Experts, bind, launched
from paramstore_client.training.timeline import BUCKETS, DAEMON_PID, DENSE, EXCHANGES
from paramstore_testkit.training.toy_moe import (
    EXPERTS,
    FIELDS,
    LAYERS,
    ToyMoE,
    adamw,
    batch,
    initial_value,
    make_resident,
    make_stored,
)

MAX_NORM = 0.1
CLOSE = {"rtol": 1e-4, "atol": 1e-6}


class Job:
    """This rank's part: the stored model, wrapped, beside the resident one that sees every rank's batches."""

    def __init__(
        self, store: ps.Store, name: str, wrap: Callable[[nn.Module], nn.Module], *, updates_in_backward: bool = False,
        is_parallel: bool = False, has_columns: bool = False, placement: ps.moe.Placement | None = None,
        pipeline: str | None = None,
    ) -> None:  # fmt: skip
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.namespace = self._open(store, name)
        self.is_sharded = wrap is shard
        self.is_exact = not (is_parallel or has_columns)
        self.store = store
        parallel = ps.moe.ExpertParallel(placement=placement, pipeline=pipeline)
        self.stored = make_stored(self.namespace, parallel=parallel if is_parallel else None)
        if has_columns:
            mesh = mesh_of_all() if wrap is shard else None
            columns: Any = ps.moe.ColumnEmbedding.from_embedding(self.stored.embedding, parallel=parallel, mesh=mesh)
            self.stored.embedding = columns
        self.experts: Experts = bind(self.stored, self.namespace)
        self.model = wrap(self.stored)
        self.optimizer = adamw(self.model.parameters())
        self.experts.attach(self.optimizer, updates_in_backward=updates_in_backward)
        self.resident = make_resident()
        self.expected = adamw(self.resident.parameters())
        self.next_step = 0

    @staticmethod
    def _open(store: ps.Store, name: str) -> ps.Namespace:
        if any(known["name"] == name and known["committed_step"] is not None for known in store.namespaces()):
            return store.open_namespace(name, mode="write", **launched())
        schema = ps.adamw_schema(FIELDS, param_dtype="float32")
        namespace = store.create_namespace(name, schema, layers=LAYERS, experts=EXPERTS, **launched())
        namespace.initialize(initial_value)
        namespace.commit(0).wait()
        return namespace

    def train(self, steps: int, *, clip: dict[str, Any] | None = None, micro_batches: int = 1) -> None:
        """Trains both models, step by step; checks that their norms agree."""
        for _ in range(steps):
            self.optimizer.zero_grad()
            self.expected.zero_grad()
            for micro in range(micro_batches):
                number = self.next_step * micro_batches + micro
                with self.experts.accumulate() if micro < micro_batches - 1 else nullcontext():
                    self.model(batch(number * self.world_size + self.rank)).backward()
                self.differentiate_resident(number)
            if clip is not None:
                norm = clip_grad_norm_(self.model.parameters(), MAX_NORM, **clip)
                wanted = clip_grad_norm_(self.resident.parameters(), MAX_NORM)
                torch.testing.assert_close(_whole(norm), wanted, rtol=1e-6, atol=0.0)
            self.optimizer.step()
            self.expected.step()
            self.next_step += 1

    def differentiate_resident(self, number: int | None = None) -> None:
        """Computes the resident model's gradients of the `number`-th batch of every rank, averaged; None: of the next step."""
        first = (self.next_step if number is None else number) * self.world_size
        for rank in range(self.world_size):
            (self.resident(batch(first + rank)) / self.world_size).backward()

    def check(self, *, rtol: float = 0.0, atol: float = 0.0) -> None:
        """Checks that dense weights and experts are those of the resident model, which adds one rank's gradients to the other's:
        bit for bit but for expert-parallel ranks, where an expert multiplies the tokens of all at once, and a table whose columns
        are spread, which adds up the tokens of all at once."""
        if not self.is_exact:
            rtol, atol = CLOSE["rtol"], CLOSE["atol"]
        values = {name: _whole(value) for name, value in self.stored.state_dict().items()}
        for layer, expert in self.namespace.space:
            record = self.namespace.read((layer, expert))
            values |= {f"layers.{layer}.weights.{expert}.{name}": record[f"master/{name}"] for name in FIELDS}
        for name, value in self.resident.named_parameters():
            assert torch.allclose(values[name], value, rtol=rtol, atol=atol), f"{name}: {values[name]} instead of {value}"
        assert _whole(self.experts.sentinel.sentinel).item() == 0.0


def _whole(value: Tensor) -> Tensor:
    value = value.detach()
    return value.full_tensor() if isinstance(value, DTensor) else value


@cache
def mesh_of_all() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def shard(model: nn.Module) -> nn.Module:
    """Applies FSDP2 layer by layer, as users do, without a word about experts."""
    assert isinstance(model, ToyMoE)
    for router in model.routers:
        fully_shard(router, mesh=mesh_of_all())
    fully_shard(model, mesh=mesh_of_all())
    return model


class Outer(nn.Module):
    """A model around the bound one, as a LightningModule is."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, tokens: Tensor) -> Tensor:
        loss: Tensor = self.inner(tokens)
        return loss


def nest(model: nn.Module) -> nn.Module:
    """Applies DDP around a module that has the bound one inside."""
    return DistributedDataParallel(Outer(model))


def replicate(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model)


def train_plainly(job: Job) -> None:
    """Trains without clipping, bit for bit; then with accumulation, whose sums come in another order, and each way of clipping."""
    job.train(3)
    job.check()
    job.train(1, micro_batches=3)
    job.check(**CLOSE)
    for foreach in (None, True, False):
        job.train(2, clip={"foreach": foreach})
        job.check(**CLOSE)


def train_scaled(job: Job) -> None:
    """Trains under a GradScaler. The second step overflows on one rank alone: all skip it, and all scale by less."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(4):
        does_overflow = step == 1
        job.optimizer.zero_grad()
        job.expected.zero_grad()
        loss = job.model(batch(job.next_step * job.world_size + job.rank))
        scaler.scale(loss * (torch.inf if does_overflow and job.rank == 0 else 1.0)).backward()
        scaler.unscale_(job.optimizer)
        clip_grad_norm_(job.model.parameters(), MAX_NORM)
        scaler.step(job.optimizer)
        scaler.update()
        if not does_overflow:
            job.differentiate_resident()
            clip_grad_norm_(job.resident.parameters(), MAX_NORM)
            job.expected.step()
        job.next_step += 1
    assert scaler.get_scale() == 512.0
    job.check(**CLOSE)


def train_early(job: Job) -> None:
    """Trains with updates that begin in backward: without clipping."""
    job.train(3)
    job.check()
    job.train(2, micro_batches=3)
    job.check(**CLOSE)


def save_and_load(job: Job) -> None:
    """Saves a distributed checkpoint of everything; what is then trained is trained once more from it, with equal results."""
    job.train(2)
    directory = [tempfile.mkdtemp() if job.rank == 0 else ""]
    dist.broadcast_object_list(directory)
    path = Path(directory[0])
    job.experts.commit(2, dense=path / "dense")
    dense = {name: _whole(value).clone() for name, value in job.stored.state_dict().items()}
    model, optimizer = get_state_dict(job.stored, job.optimizer)
    save({"model": model, "optimizer": optimizer, "experts": job.experts}, checkpoint_id=path)
    job.train(2)
    job.check()
    job.experts.rollback()
    assert job.experts.load_dense() == 2
    for name, value in job.stored.state_dict().items():
        assert torch.equal(_whole(value), dense[name]), f"{name} is not that of step 2"
    model, optimizer = get_state_dict(job.stored, job.optimizer)
    states = {"model": model, "optimizer": optimizer, "experts": job.experts}
    job.optimizer.zero_grad()
    load(states, checkpoint_id=path)
    set_state_dict(job.stored, job.optimizer, model_state_dict=model, optim_state_dict=optimizer)
    for step in range(job.next_step - 2, job.next_step):
        job.optimizer.zero_grad()
        job.model(batch(step * job.world_size + job.rank)).backward()
        job.optimizer.step()
    job.check()


def restart(job: Job) -> None:
    """Commits a step, goes on and dies in the first start; goes back to that step and finishes in the second."""
    if job.namespace.committed_step == 0:
        job.train(2)
        job.experts.commit(2).wait()
        if job.rank == 0:
            torch.save({"model": job.stored.state_dict(), "optimizer": job.optimizer.state_dict()}, Path(sys.argv[3]))
        dist.barrier()
        job.train(1)
        job.namespace.push({(0, 0): {name: torch.ones(shape) for name, shape in FIELDS.items()}})
        dist.barrier()
        raise SystemExit(3)
    saved = torch.load(Path(sys.argv[3]), weights_only=True)
    job.stored.load_state_dict(saved["model"])
    job.optimizer.load_state_dict(saved["optimizer"])
    for step in range(2):  # the resident model alone catches up with the saved one
        job.expected.zero_grad()
        job.differentiate_resident(step)
        job.expected.step()
    job.next_step = 2
    job.check()
    job.train(2)
    job.check()


def trainer(job: Job) -> None:
    """Trains with transformers' Trainer, which makes the DDP around the model, splits the batches, clips and saves."""
    import transformers

    steps = 4
    batches = [batch(index) for index in range(steps * job.world_size)]
    constant: Any = torch.optim.lr_scheduler.ConstantLR(job.optimizer, factor=1.0)

    class Trainer(transformers.Trainer):
        def _get_train_sampler(self, *arguments: object) -> Any:
            return torch.utils.data.SequentialSampler(batches)

        def compute_loss(self, model: nn.Module, inputs: dict[str, Tensor], *arguments: object, **others: object) -> Any:
            return model(inputs["tokens"][0])

    arguments = transformers.TrainingArguments(
        output_dir=tempfile.mkdtemp(), use_cpu=True, max_steps=steps, per_device_train_batch_size=1, max_grad_norm=MAX_NORM,
        report_to=[], save_steps=3, disable_tqdm=True, remove_unused_columns=False,
    )  # fmt: skip
    Trainer(
        model=job.stored, args=arguments, train_dataset=batches, optimizers=(job.optimizer, constant),
        data_collator=lambda rows: {"tokens": torch.stack(rows)}, callbacks=[ps.hf.trainer_callback(job.stored)],
    ).train()  # fmt: skip
    for _ in range(steps):
        job.expected.zero_grad()
        job.differentiate_resident()
        clip_grad_norm_(job.resident.parameters(), MAX_NORM)
        job.expected.step()
        job.next_step += 1
    job.check(**CLOSE)
    assert job.namespace.steps() == [3, steps]


def commit_dense(job: Job) -> None:
    """Commits with a file of the dense weights, goes on, and goes back; the table is whole in the file."""
    job.train(2)
    directory = [tempfile.mkdtemp() if job.rank == 0 else ""]
    dist.broadcast_object_list(directory)
    job.experts.commit(2, dense=directory[0])
    columns: Any = job.stored.embedding
    table = columns.gathered()
    job.train(1)
    assert not torch.equal(columns.gathered(), table)
    job.experts.rollback()
    assert job.experts.load_dense() == 2
    assert torch.equal(columns.gathered(), table)
    (file,) = Path(directory[0]).iterdir()
    assert torch.equal(load_file(file)["embedding.weight"], table)


def keep(model: nn.Module) -> nn.Module:
    return model


def look(job: Job) -> None:
    """Trains under a timeline, which shows each kind of what ranks do, where it can have been."""
    path = Path(tempfile.mkdtemp(), "trace.json")
    job.train(1)
    began_us = time.time() * 1e6
    with ps.training.Timeline(job.store, path) as timeline:
        job.train(2)
    ended_us = time.time() * 1e6
    picture = json.loads(path.read_text())
    events = [event for event in picture["traceEvents"] if event.get("ph") == "X" and event.get("pid") != DAEMON_PID]
    base_us = picture["baseTimeNanoseconds"] / 1e3
    overlap = timeline.overlap
    ours = [(name,) for name in (ranges.EXCHANGE, ranges.EXPERTS, ranges.ACQUIRE, ranges.PUSH)]
    for names in (*ours, EXCHANGES, BUCKETS, DENSE if job.is_sharded else BUCKETS):
        found = [event for event in events if event["name"].startswith(names)]
        assert found, f"{names} in none of {sorted({event['name'] for event in events})}"
        assert all(began_us <= event["ts"] + base_us <= event["ts"] + event["dur"] + base_us <= ended_us for event in found)
    assert overlap.experts_s > 0 < overlap.acquires_s
    assert overlap.pushes_s > 0 < overlap.updates.seconds
    for each in (overlap.exchanges, overlap.buckets):
        assert 0 <= each.beside_compute_s <= each.seconds <= (ended_us - began_us) / 1e6
    assert overlap.exchanges.seconds > 0 < overlap.buckets.seconds
    assert (overlap.dense.seconds > 0) == job.is_sharded
    job.check()


MODES: dict[str, tuple[Callable[[nn.Module], nn.Module], Callable[[Job], None]]] = {
    "ddp": (replicate, train_plainly),
    "fsdp2": (shard, train_plainly),
    "checkpoint": (shard, save_and_load),
    "trainer": (keep, trainer),
    "nested": (nest, train_plainly),
    "restart": (replicate, restart),
    "scaler ddp": (replicate, train_scaled),
    "early ddp": (replicate, train_early),
    "early fsdp2": (shard, train_early),
    "dense": (replicate, commit_dense),
    "timeline": (replicate, look),
    "timeline fsdp2": (shard, look),
}
PARALLEL, REPLICAS, SEARCH = "parallel ", "parallel replicas ", "parallel search "
"""Before a mode: experts are spread over the ranks; and the first of them lies on all ranks; or their pipeline is searched for."""
COLUMNS = "columns "
"""Before a mode: the embedding's columns are spread over the ranks."""


def _placement(mode: str) -> ps.moe.Placement | None:
    in_order = ps.moe.Placement.in_order(EXPERTS, dist.get_world_size())
    everywhere = tuple(range(in_order.world_size))
    return ps.moe.Placement((everywhere, *in_order.ranks[1:]), in_order.world_size) if mode.startswith(REPLICAS) else None


def main() -> None:
    address, *modes = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        for mode in modes[:1] if modes[0].endswith("restart") else modes:
            kind = mode.removeprefix(REPLICAS).removeprefix(SEARCH).removeprefix(PARALLEL).removeprefix(COLUMNS)
            wrap, act = MODES[kind]
            torch.manual_seed(0)
            with ps.connect(address) as store:
                act(
                    Job(
                        store, mode.replace(" ", "-"), wrap, updates_in_backward=kind.startswith("early"),
                        is_parallel=mode.startswith(PARALLEL), has_columns=COLUMNS in mode, placement=_placement(mode),
                        pipeline="auto" if mode.startswith(SEARCH) else None,
                    )
                )  # fmt: skip
                dist.barrier()
            if dist.get_rank() == 0:
                sys.stdout.write(f"{mode}\n")
                sys.stdout.flush()
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
