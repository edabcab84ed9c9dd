"""An embedding whose columns are spread over data-parallel ranks: ids travel to all ranks, columns to those that asked.

    ids ── header, sizes ── ids of all ranks ── own columns of them ── header ── columns ── [ids, H]

Backward sends gradients the way back, after a header: so each rank has its columns' whole gradient.
"""

# n ids of this rank, N ids of all ranks, V ids of the table, H width of a row, C columns of a rank, W ranks
# ruff: noqa: N806 - shape suffixes, as the legend says

from __future__ import annotations

import math
from dataclasses import fields, replace
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn import functional
from xxhash import xxh3_64_intdigest

from paramstore.core.arguments import choice, instance, integer, whole_number, wrong
from paramstore.errors import ConfigError, StepMismatch
from paramstore_client.moe.exchange import Exchange
from paramstore_client.moe.header import DTYPES, TOLD_AT, Header, Phase
from paramstore_client.moe.table_call import Lookup, TableCall
from paramstore_client.nn.sharded import ShardedModule

DRAWN_ELEMENTS = 1 << 20
"""Elements of the whole table that are drawn at once, for a table's first values."""
SAMPLE_ELEMENTS = 4096
"""Elements of a rank's columns of which the other ranks are told a checksum."""


@runtime_checkable
class TableRanks(Protocol):
    """The ranks over which tables are spread, as `ExpertParallel` gives them. table_count: how many tables were made over them."""

    table_count: int

    @property
    def ranks(self) -> tuple[int, int]:
        """This rank's number, and how many there are."""
        ...

    def meet(self) -> Exchange | None:
        """What they exchange rows by; None where this one is alone. All of them call it."""
        ...

    def mesh(self, device_type: str) -> Any:
        """They as a mesh of torch's; None where they are none."""
        ...


class ColumnEmbedding(ShardedModule):
    """A `torch.nn.Embedding` of which each rank holds columns: 1 / ranks of the weight, its gradient and its optimizer's states.

    What a rank gets for its ids, and the gradient of its columns, are bit for bit those of one process with `torch.nn.Embedding`
    and the ids of all ranks, one rank's after the other's. MoESys (arXiv 2205.10034, section 4.3) splits by columns, [V, H/N],
    SE-MoE's text (section 4.3) by rows, [V/N, H]: by columns every rank looks up as much, whatever the ids are.

    num_embeddings, embedding_dim, padding_idx, device, dtype: as for `torch.nn.Embedding`; embedding_dim is of the whole table.
    parallel: the `ps.moe.ExpertParallel` of the model, or one of its own: its ranks hold the columns.
    reduce: "mean" divides the gradient, which is a sum over all ranks' ids, by the number of ranks, as DDP and FSDP2 do with
    theirs; with "sum" it stays the sum. `Experts.attach` wants the same word.
    mesh: under FSDP2 the one that `fully_shard` gets: `weight` is then a DTensor among DTensors, in clipping, in the optimizer's
    states and in torch's distributed checkpoints. None: it is a plain tensor, as DDP's are; then call `ps.moe.leave_out_of_ddp`.

    All ranks call it in one order, as many times, with ids or without. While an optimizer is attached (`Experts.attach`) to plain
    weights, their gradients are held from the end of a backward to the optimizer's step, and the sentinel's has their norm.
    `state_dict` has the columns as one DTensor over all ranks; `load_state_dict` takes that, or a whole table.
    """

    def __init__(
        self, num_embeddings: int, embedding_dim: int, padding_idx: int | None = None, *, parallel: TableRanks,
        reduce: Literal["mean", "sum"] = "mean", mesh: Any = None, device: Any = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        """Raises ConfigError, also where the ranks do not divide `embedding_dim`."""
        super().__init__()
        self.num_embeddings = whole_number("num_embeddings", num_embeddings, least=1)
        self.embedding_dim = whole_number("embedding_dim", embedding_dim, least=1)
        if not isinstance(parallel, TableRanks):
            raise wrong("parallel", parallel, "a ps.moe.ExpertParallel()")
        self._parallel = parallel
        choice("reduce", reduce, ("mean", "sum"))
        self.reduce = reduce
        self.padding_idx = None if padding_idx is None else _place("padding_idx", padding_idx, self.num_embeddings)
        rank, count = parallel.ranks
        if self.embedding_dim % count:
            raise ConfigError(
                f"embedding_dim={embedding_dim} is not divided by {count} ranks: take other ranks, or a torch.nn.Embedding"
            )
        width = self.embedding_dim // count
        self.columns = slice(rank * width, (rank + 1) * width)
        """Those of the whole table that this rank holds."""
        try:
            local = torch.empty(self.num_embeddings, width, device=device, dtype=dtype)
        except (TypeError, ValueError, RuntimeError, AssertionError) as error:  # the last where torch has no CUDA
            raise ConfigError(f"ColumnEmbedding: device={device!r}, dtype={dtype!r}: {error}") from error
        if local.dtype not in DTYPES:
            raise wrong("dtype", dtype, f"one of {', '.join(map(str, DTYPES))}")
        self._mesh = _checked_mesh(mesh, rank=rank, count=count)
        self.weight = nn.Parameter(local if mesh is None else self._spread(local, mesh))
        self.number = parallel.table_count
        """Which of the tables over these ranks it is."""
        parallel.table_count += 1
        self.reset_parameters()

    @classmethod
    def from_embedding(
        cls, embedding: nn.Embedding, *, parallel: TableRanks, reduce: Literal["mean", "sum"] = "mean", mesh: Any = None
    ) -> ColumnEmbedding:
        """Makes one with this rank's columns of `embedding`, which all ranks have alike. Raises ConfigError for one whose rows are
        renormalised, or whose gradient is sparse or scaled by frequency."""
        instance("embedding", embedding, nn.Embedding, "a torch.nn.Embedding")
        if embedding.max_norm is not None or embedding.scale_grad_by_freq or embedding.sparse:
            raise ConfigError("from_embedding: max_norm, scale_grad_by_freq and sparse are not served: leave them out")
        weight = embedding.weight
        made = cls(
            embedding.num_embeddings, embedding.embedding_dim, embedding.padding_idx, parallel=parallel, reduce=reduce, mesh=mesh,
            device=weight.device, dtype=weight.dtype,
        )  # fmt: skip
        with torch.no_grad():
            made._local().copy_(weight[:, made.columns])
        return made.requires_grad_(weight.requires_grad)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draws the table from N(0, 1), with zeros at padding_idx, as `torch.nn.Embedding` does; of each row that this rank draws
        it keeps its columns. So ranks with one seed hold columns of one table."""
        local = self._local()
        for rows in torch.split(local, max(1, DRAWN_ELEMENTS // self.embedding_dim)):
            rows.copy_(torch.randn(len(rows), self.embedding_dim, device=rows.device, dtype=rows.dtype)[:, self.columns])
        if self.padding_idx is not None:
            local[self.padding_idx].zero_()

    def forward(self, ids: Tensor) -> Tensor:
        """The rows of `ids`, [*ids.shape, embedding_dim].

        ids: of any shape, int64 or int32; ranks may have different numbers of them, or none. Raises ConfigError for ids that the
        table has not, StepMismatch where ranks differ in what must be alike or one does not come in time, RankLost, and what
        another rank raises.
        """
        exchange = self._parallel.meet()
        if exchange is None:
            self._check(ids)
            return functional.embedding(ids, self._local(), self.padding_idx)
        call, ids_n = self._agreed(exchange, ids)
        padding, divisor = -1 if self.padding_idx is None else self.padding_idx, call.world_size if self.reduce == "mean" else 1
        y_nH: Tensor = Lookup.apply(call, padding, divisor, ids_n, self._local())  # type: ignore[no-untyped-call]
        return y_nH.view(*ids.shape, self.embedding_dim)

    def gradient_norm(self) -> float:
        """The norm of the whole table's gradient, the same on all ranks, which all call it; 0 where there is none."""
        return self.norm_of(self.weight.grad)

    def norm_of(self, gradient: Tensor | None) -> float:
        square = 0.0 if gradient is None else _square(getattr(gradient, "_local_tensor", gradient))
        if (exchange := self._parallel.meet()) is None:
            return math.sqrt(square)
        told = self._begin(exchange, Phase.NORM).tell(torch.tensor([square], dtype=torch.float64).view(torch.int64))
        return math.sqrt(sum(told[:, TOLD_AT].contiguous().view(torch.float64).tolist()))

    @torch.no_grad()
    def gathered(self) -> Tensor:
        """The whole table, [num_embeddings, embedding_dim], on every rank; all call it."""
        exchange, local_VC = self._parallel.meet(), self._local().detach()
        if exchange is None:
            return local_VC.clone()
        call = self._begin(exchange, Phase.TABLE)
        with call.guard(Phase.TABLE):
            sent = local_VC.repeat(call.world_size, 1)
        told = call.tell(torch.tensor([self.num_embeddings]))
        self._check_alike("num_embeddings", told[:, TOLD_AT].tolist())
        return replace(call, counts=[len(local_VC)] * call.world_size).to_asking(sent)

    def extra_repr(self) -> str:
        padding = "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        return f"{self.num_embeddings}, {self.embedding_dim}{padding}, columns={self.columns.start}:{self.columns.stop}"

    def _local(self) -> Tensor:
        return self.weight.to_local() if hasattr(self.weight, "to_local") else self.weight

    def _check(self, ids: Tensor) -> None:
        if not isinstance(ids, Tensor) or ids.dtype not in (torch.int64, torch.int32):
            raise ConfigError(f"ids: {getattr(ids, 'dtype', type(ids))}: give a tensor of int64 or int32")
        if ids.device != self.weight.device:
            raise ConfigError(f"ids are on {ids.device}, the table is on {self.weight.device}")
        least, most = map(int, ids.aminmax()) if ids.numel() else (0, 0)
        if least < 0 or most >= self.num_embeddings:
            raise ConfigError(f"ids from {least} to {most}: the table has 0 to {self.num_embeddings - 1}")

    def _check_alike(self, what: str, values: list[int]) -> None:
        if len(set(values)) > 1:
            raise StepMismatch(f"{what} of table {self.number} differs, by rank: {', '.join(map(str, values))}. No id was sent")

    def _begin(self, exchange: Exchange, phase: Phase, *, records: bool = False) -> TableCall:
        if exchange.world_size * (self.columns.stop - self.columns.start) != self.embedding_dim:
            raise ConfigError(
                f"table {self.number} was made with columns {self.columns.start} to {self.columns.stop} of {self.embedding_dim}, "
                f"there are {exchange.world_size} ranks: make it after torch.distributed.init_process_group"
            )
        said: dict[str, Any] = dict.fromkeys((field.name for field in fields(Header)), 0) | {
            "phase": phase, "call": exchange.call_count, "layer": self.number, "dtype": DTYPES.index(self.weight.dtype),
            "width": self.embedding_dim, "records": int(records),
        }  # fmt: skip
        exchange.call_count += 1
        return TableCall(exchange, Header(**said), self.weight.device, [])

    def _agreed(self, exchange: Exchange, ids: Tensor) -> tuple[TableCall, Tensor]:
        """What all ranks agree on before ids are sent: a call, with how many each rank has."""
        records = torch.is_grad_enabled() and self.weight.requires_grad
        call = self._begin(exchange, Phase.IDS, records=records)
        with call.guard(Phase.IDS):
            self._check(ids)
            ids_n = ids.reshape(-1).to(torch.int64)
            padding = -1 if self.padding_idx is None else self.padding_idx
            said = torch.tensor([ids_n.numel(), self.num_embeddings, padding, _checksum(self._local()) if records else 0])
        counts, tables, paddings, checksums = call.tell(said)[:, TOLD_AT : TOLD_AT + 4].T.tolist()
        self._check_alike("num_embeddings", tables)
        self._check_alike("padding_idx", paddings)
        if checksums[0] and len(set(checksums)) == 1:
            raise ConfigError(
                f"all ranks hold the same columns of table {self.number}: DDP has copied rank 0's, or each has drawn the same. "
                "Call ps.moe.leave_out_of_ddp(model) before DDP; draw with reset_parameters(); load what was there again"
            )
        return replace(call, counts=counts), ids_n

    # --- state dicts

    @staticmethod
    def _spread(local: Tensor, mesh: Any) -> Tensor:
        """All ranks' columns as one tensor, of which `local` is this rank's part."""
        from torch.distributed.tensor import DTensor, Shard  # here, as importing it costs a second

        return DTensor.from_local(local, mesh, [Shard(1)] * mesh.ndim, run_check=False)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self._mesh is None:
            self._mesh = self._parallel.mesh(self.weight.device.type)
        if self._mesh is not None and not hasattr(self.weight, "to_local"):
            destination[f"{prefix}weight"] = self._spread(destination[f"{prefix}weight"], self._mesh)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *arguments: Any) -> None:
        name = f"{prefix}weight"
        if isinstance(value := state_dict.get(name), Tensor):
            if hasattr(value, "to_local"):
                value = value.to_local()
            elif value.shape == (self.num_embeddings, self.embedding_dim):
                value = value[:, self.columns]
            state_dict[name] = self._spread(value, self._mesh) if hasattr(self.weight, "to_local") else value
        super()._load_from_state_dict(state_dict, prefix, *arguments)


def _place(name: str, value: object, rows: int) -> int:
    """A row of the table, counted from its end where it is negative."""
    place = integer(value)
    if place is None or not -rows <= place < rows:
        raise wrong(name, value, f"a whole number from {-rows} to {rows - 1}")
    return place % rows


def _checked_mesh(mesh: Any, *, rank: int, count: int) -> Any:
    if mesh is None:
        return None
    from torch.distributed.device_mesh import DeviceMesh

    instance("mesh", mesh, DeviceMesh, "the DeviceMesh that fully_shard gets")
    if mesh.size() != count or (mesh.mesh.flatten() == torch.distributed.get_rank()).nonzero().flatten().tolist() != [rank]:
        raise wrong("mesh", mesh, f"one of the {count} ranks of parallel=, in their order")
    return mesh


def _square(gradient: Tensor) -> float:
    """The sum of squares, by rows in fp32, over rows in fp64."""
    by_row = torch.linalg.vector_norm(gradient, dim=1, dtype=torch.promote_types(gradient.dtype, torch.float32))
    return float(by_row.double().square().sum())


def _checksum(local: Tensor) -> int:
    """A number, of the first rows, that ranks with different columns do not share; 0 where one value fills them."""
    sample = local.detach()[: 1 + SAMPLE_ELEMENTS // local.shape[1]].contiguous().cpu()
    if bool((sample == sample[0, 0]).all()):
        return 0
    return xxh3_64_intdigest(sample.view(torch.uint8).numpy().data) >> 1 | 1
