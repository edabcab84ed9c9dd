"""A table whose columns are spread over ranks looks up, and gets the gradients, of one process's table, bit for bit."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paramstore.errors import ConfigError, ParamStoreError, StepMismatch
from paramstore_client.moe.embedding import ColumnEmbedding
from paramstore_client.moe.exchange import FlatExchange
from paramstore_client.moe.expert_parallel import ExpertParallel
from paramstore_testkit.training.thread_ranks import ThreadParallel, of_all, run_ranks

pytestmark = pytest.mark.usefixtures("one_thread")

IDS, WIDTH = 13, 24


@dataclass(frozen=True, slots=True)
class Job:
    """Ids of a job's ranks. shapes: those of each rank's ids."""

    shapes: tuple[tuple[int, ...], ...] = ((3, 4), (0,), (7,))
    dtype: torch.dtype = torch.float32
    padding_idx: int | None = None
    id_dtype: torch.dtype = torch.int64

    def ids(self, rank: int) -> Tensor:
        drawn = torch.Generator().manual_seed(rank)
        return torch.randint(IDS, self.shapes[rank], generator=drawn).to(self.id_dtype)

    def whole(self) -> nn.Embedding:
        drawn = torch.Generator().manual_seed(9)
        weight = torch.randn(IDS, WIDTH, generator=drawn).to(self.dtype)
        return nn.Embedding.from_pretrained(weight, freeze=False, padding_idx=self.padding_idx)

    def grad(self, rank: int) -> Tensor:
        return torch.randn(*self.shapes[rank], WIDTH, generator=torch.Generator().manual_seed(50 + rank)).to(self.dtype)


def table(exchange: FlatExchange, whole: nn.Embedding, **options: Any) -> ColumnEmbedding:
    return ColumnEmbedding.from_embedding(whole, parallel=ThreadParallel(exchange), **{"reduce": "sum", **options})


def alone(job: Job) -> tuple[list[Tensor], Tensor]:
    """What one process computes: each rank's rows, and the weight's gradient."""
    whole, count = job.whole(), len(job.shapes)
    flat = [job.ids(rank).flatten() for rank in range(count)]
    y = whole(torch.cat(flat))
    y.backward(torch.cat([job.grad(rank).reshape(-1, WIDTH) for rank in range(count)]))
    assert whole.weight.grad is not None
    parts = y.detach().split([len(ids) for ids in flat])
    return [part.view(*shape, WIDTH) for part, shape in zip(parts, job.shapes, strict=True)], whole.weight.grad


JOBS = [
    Job(),
    Job(dtype=torch.bfloat16),
    Job(((5,), (2, 1))),
    Job(((0,), (4, 2)), dtype=torch.bfloat16, padding_idx=3),
    Job(((1, 2, 3), (9,), (0, 5), (2,)), padding_idx=-1),
    Job(((6,), (1,), (3,), (40,)), dtype=torch.bfloat16, id_dtype=torch.int32),
    Job(((0,), (0, 3), ())[:2]),
    Job(((), (3,))),
]


@pytest.mark.parametrize("job", JOBS, ids=lambda job: f"{job.shapes}-{job.dtype}-{job.padding_idx}")
def test_ranks_look_up_and_differentiate_as_one_process(job: Job) -> None:
    def rank(exchange: FlatExchange) -> tuple[Tensor, Tensor]:
        columns = table(exchange, job.whole())
        y = columns(job.ids(exchange.rank))
        y.backward(job.grad(exchange.rank))
        assert columns.weight.grad is not None
        return y.detach(), columns.weight.grad

    computed = of_all(run_ranks(len(job.shapes), rank))
    rows, grad = alone(job)
    for (y, _), wanted in zip(computed, rows, strict=True):
        assert y.shape == wanted.shape
        assert torch.equal(y, wanted)
    assert torch.equal(torch.cat([part for _, part in computed], dim=1), grad)


def test_backwards_add_up_and_a_mean_is_divided_by_the_ranks() -> None:
    job = Job(((4,), (6,)))

    def rank(exchange: FlatExchange) -> tuple[Tensor, Tensor]:
        found = []
        for reduce in ("sum", "mean"):
            columns = table(exchange, job.whole(), reduce=reduce)
            for _ in range(2):
                columns(job.ids(exchange.rank)).backward(job.grad(exchange.rank))
            assert columns.weight.grad is not None
            found.append(columns.weight.grad)
        return found[0], found[1]

    _, once = alone(job)
    for number, (summed, mean) in enumerate(of_all(run_ranks(2, rank))):
        half = slice(number * WIDTH // 2, (number + 1) * WIDTH // 2)
        assert torch.equal(summed, 2 * once[:, half])
        assert torch.equal(mean, once[:, half])  # two backwards, and two ranks


def test_a_gradient_that_is_one_number_over_and_over_travels_too() -> None:
    def rank(exchange: FlatExchange) -> Tensor | None:
        columns = table(exchange, Job().whole())
        good(columns, exchange).sum().backward()
        return columns.weight.grad

    for grad in of_all(run_ranks(2, rank)):
        assert grad is not None
        assert torch.equal(grad.sum(dim=1), torch.tensor([0.0, 2.0, 2.0] + [0.0] * (IDS - 3)) * WIDTH / 2)


def test_the_norm_counts_each_rank_s_columns_once_and_is_the_same_on_all() -> None:
    job = Job()

    def rank(exchange: FlatExchange) -> tuple[float, float, float]:
        columns = table(exchange, job.whole())
        before = columns.gradient_norm()
        columns(job.ids(exchange.rank)).backward(job.grad(exchange.rank))
        norm = columns.gradient_norm()
        assert columns.weight.grad is not None
        if exchange.rank == 1:
            columns.weight.grad[0, 0] = math.inf
        return before, norm, columns.gradient_norm()

    found = of_all(run_ranks(3, rank))
    assert len(set(found)) == 1
    assert found[0][0] == 0.0
    assert found[0][1] == pytest.approx(float(alone(job)[1].norm()), rel=1e-6)
    assert found[0][2] == math.inf


def test_a_table_is_gathered_whole_and_ranks_with_one_seed_draw_one() -> None:
    def rank(exchange: FlatExchange) -> tuple[Tensor, Tensor]:
        whole = Job().whole()
        made = ColumnEmbedding(
            IDS, WIDTH, padding_idx=2, parallel=ThreadParallel(exchange), dtype=torch.float32
        ).requires_grad_(False)  # fmt: skip
        with torch.no_grad():  # the threads share one generator: each gives the values that a seed of its own would
            made.weight.copy_(torch.randn(IDS, WIDTH, generator=torch.Generator().manual_seed(1))[:, made.columns])
        return table(exchange, whole).gathered(), made.gathered()

    for gathered, drawn in of_all(run_ranks(3, rank)):
        assert torch.equal(gathered, Job().whole().weight)
        assert torch.equal(drawn, torch.randn(IDS, WIDTH, generator=torch.Generator().manual_seed(1)))


def test_first_values_are_the_columns_of_one_table_with_zeros_at_padding() -> None:
    class Rank(ExpertParallel):
        number = 0

        @property
        def ranks(self) -> tuple[int, int]:
            return self.number, 3

    parts = []
    for Rank.number in range(3):
        torch.manual_seed(4)
        parts.append(ColumnEmbedding(IDS, WIDTH, padding_idx=-1, parallel=Rank()).weight)
    whole = torch.cat(list(parts), dim=1)
    assert not torch.equal(parts[0], parts[1])
    assert not whole[-1].any()
    assert 0.8 < whole[:-1].std() < 1.2


def test_a_whole_table_is_loaded_and_a_part_is_loaded_as_it_is() -> None:
    def rank(exchange: FlatExchange) -> tuple[Tensor, Tensor]:
        columns = ColumnEmbedding(IDS, WIDTH, parallel=ThreadParallel(exchange))
        columns.load_state_dict({"weight": Job().whole().weight})
        other = ColumnEmbedding(IDS, WIDTH, parallel=ThreadParallel(exchange))
        other.load_state_dict(columns.state_dict())
        return columns.gathered(), other.gathered()

    for gathered, again in of_all(run_ranks(2, rank)):
        assert torch.equal(gathered, Job().whole().weight)
        assert torch.equal(again, gathered)


def test_a_process_alone_has_the_whole_table() -> None:
    job = Job(((4,),))
    columns = ColumnEmbedding.from_embedding(job.whole(), parallel=ExpertParallel())
    columns(job.ids(0)).backward(job.grad(0))
    assert columns.weight.grad is not None
    assert torch.equal(columns.weight.grad, alone(job)[1])
    assert columns.gradient_norm() == pytest.approx(float(alone(job)[1].norm()), rel=1e-6)
    assert torch.equal(columns.gathered(), job.whole().weight)
    assert list(columns.state_dict()) == ["weight"]
    assert copy.deepcopy(columns)(job.ids(0)).shape == (4, WIDTH)
    with pytest.raises(ConfigError, match="ids from 0 to 13"):
        columns(torch.tensor([0, IDS]))


def test_what_looks_at_a_module_alone_sees_no_parameter_and_an_optimizer_sees_it() -> None:
    columns = ColumnEmbedding(IDS, WIDTH, parallel=ExpertParallel())
    assert list(columns.parameters(recurse=False)) == []
    assert [name for name, _ in columns.named_buffers(recurse=False)] == ["weight"]
    assert [name for name, _ in nn.Sequential(columns).named_parameters()] == ["0.weight"]


# --- what goes wrong, on all ranks alike

Wrong = Callable[[ColumnEmbedding, FlatExchange], object]


def forward(ids: Any) -> Wrong:
    return lambda columns, _: columns(ids)


def good(columns: ColumnEmbedding, _: FlatExchange) -> Tensor:
    return columns(torch.tensor([1, 2]))  # type: ignore[no-any-return]


def frozen(columns: ColumnEmbedding, exchange: FlatExchange) -> Tensor:
    return good(columns.requires_grad_(False), exchange)


def shorter(columns: ColumnEmbedding, exchange: FlatExchange) -> Tensor:
    other = ColumnEmbedding.from_embedding(nn.Embedding(IDS - 1, WIDTH), parallel=ThreadParallel(exchange))
    return good(other, exchange)


def padded(columns: ColumnEmbedding, exchange: FlatExchange) -> Tensor:
    return good(ColumnEmbedding.from_embedding(Job(padding_idx=1).whole(), parallel=ThreadParallel(exchange)), exchange)


def narrower(columns: ColumnEmbedding, exchange: FlatExchange) -> Tensor:
    return good(ColumnEmbedding.from_embedding(nn.Embedding(IDS, 6), parallel=ThreadParallel(exchange)), exchange)


def second_table(columns: ColumnEmbedding, exchange: FlatExchange) -> Tensor:
    parallel = ThreadParallel(exchange)
    parallel.table_count = 1
    return good(ColumnEmbedding.from_embedding(Job().whole(), parallel=parallel), exchange)


def norm(columns: ColumnEmbedding, _: FlatExchange) -> float:
    return columns.gradient_norm()


@pytest.mark.parametrize(
    ("wrong", "error", "text"),
    [
        (forward(torch.tensor([1, IDS])), ConfigError, "ids from 1 to 13: the table has 0 to 12"),
        (forward(torch.tensor([-1])), ConfigError, "ids from -1 to -1"),
        (forward(torch.tensor([1.0])), ConfigError, "int64 or int32"),
        (forward([1]), ConfigError, "int64 or int32"),
        (forward(torch.zeros(1, dtype=torch.int64, device="meta")), ConfigError, "ids are on meta"),
        (frozen, StepMismatch, "differ in records: 1 on rank 0; 0 on rank 1"),
        (shorter, StepMismatch, "num_embeddings of table 0 differs, by rank: 13, 12"),
        (padded, StepMismatch, "padding_idx of table 0 differs, by rank: -1, 1"),
        (narrower, StepMismatch, "differ in width: 24 on rank 0; 6 on rank 1"),
        (second_table, StepMismatch, "differ in layer"),
        (norm, StepMismatch, "ids on rank 0; norm on rank 1"),
    ],
)
def test_what_one_rank_does_otherwise_all_raise_and_are_in_step_after_it(
    wrong: Wrong, error: type[ParamStoreError], text: str
) -> None:
    def rank(exchange: FlatExchange) -> tuple[ParamStoreError, Tensor]:
        columns = table(exchange, Job().whole())
        with pytest.raises(error) as caught:
            (wrong if exchange.rank == 1 else good)(columns, exchange)
        return caught.value, good(columns.requires_grad_(), exchange).detach()

    results = of_all(run_ranks(2, rank))
    for number, (raised, rows) in enumerate(results):
        assert text in str(raised), number
        assert torch.equal(rows, Job().whole().weight[1:3])
    if error is ConfigError:
        assert str(results[0][0]).startswith("rank 1: ")


def test_a_backward_beside_a_forward_is_a_mismatch() -> None:
    def rank(exchange: FlatExchange) -> str:
        columns = table(exchange, Job().whole())
        y = good(columns, exchange)
        with pytest.raises(StepMismatch) as caught:
            y.sum().backward() if exchange.rank else good(columns, exchange)
        return str(caught.value)

    for text in of_all(run_ranks(2, rank)):
        assert "ids on rank 0; columns of backward on rank 1" in text


def test_a_rank_that_does_not_come_is_named() -> None:
    def rank(exchange: FlatExchange) -> str:
        columns = table(exchange, Job().whole())
        if exchange.rank == 1:
            return ""
        with pytest.raises(ParamStoreError) as caught:
            good(columns, exchange)
        return str(caught.value)

    assert "rank" in of_all(run_ranks(2, rank, timeout_s=0.3))[0]


def test_columns_that_are_the_same_on_all_ranks_are_refused_as_a_copy() -> None:
    def rank(exchange: FlatExchange) -> str:
        columns = table(exchange, Job().whole())
        with torch.no_grad():
            columns.weight.copy_(Job().whole().weight[:, : columns.weight.shape[1]])  # what DDP does without leave_out_of_ddp
        with pytest.raises(ConfigError) as caught:
            good(columns, exchange)
        with torch.no_grad():
            good(columns, exchange)
            columns.weight.zero_()  # one value everywhere tells nothing
        good(columns, exchange)
        return str(caught.value)

    for text in of_all(run_ranks(2, rank)):
        assert "leave_out_of_ddp" in text


def test_a_width_that_ranks_do_not_divide_is_refused() -> None:
    def rank(exchange: FlatExchange) -> str:
        with pytest.raises(ConfigError) as caught:
            ColumnEmbedding(IDS, 25, parallel=ThreadParallel(exchange))
        return str(caught.value)

    assert "25 is not divided by 3 ranks" in of_all(run_ranks(3, rank))[0]


@pytest.mark.parametrize("option", [{"max_norm": 1.0}, {"sparse": True}, {"scale_grad_by_freq": True}])
def test_tables_whose_rows_or_gradients_are_made_otherwise_are_refused(option: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="are not served"):
        ColumnEmbedding.from_embedding(nn.Embedding(4, 8, **option), parallel=ExpertParallel())


def test_tables_of_other_length_are_not_gathered() -> None:
    def rank(exchange: FlatExchange) -> None:
        table = ColumnEmbedding(5 + exchange.rank, 8, parallel=ThreadParallel(exchange))
        with pytest.raises(StepMismatch, match="num_embeddings of table 0 differs, by rank: 5, 6"):
            table.gathered()

    of_all(run_ranks(2, rank))


def test_a_table_that_was_made_before_the_ranks_met_is_refused() -> None:
    class Late(ThreadParallel):
        ranks = (0, 1)  # type: ignore[assignment]  # as before init_process_group

    def rank(exchange: FlatExchange) -> None:
        table = ColumnEmbedding(5, 8, parallel=Late(exchange))
        for call in (lambda: table(torch.tensor([1])), table.gathered, table.gradient_norm):
            with pytest.raises(ConfigError, match="columns 0 to 8 of 8, there are 2 ranks: make it after"):
                call()

    of_all(run_ranks(2, rank))
