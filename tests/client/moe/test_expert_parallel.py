"""The argument `ExpertParallel`: where it changes nothing, and what it refuses."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from paramstore.core.placement import Placement
from paramstore.errors import ConfigError, LeaseError, ParamStoreError, RankLost, UnsupportedModel
from paramstore.testing.memory_namespace import MemoryNamespace
from paramstore_client.hf.model.module_list import check_parallel
from paramstore_client.moe.expert_parallel import ExpertParallel, _loss_of, _step_of
from paramstore_client.moe.hops.nodes import Nodes
from paramstore_testkit.training.moe_families import small_config


class Group(dist.ProcessGroup):
    """A group of ranks that never meet."""

    def __init__(self, size: int) -> None:
        super().__init__(0, size)


@pytest.fixture
def in_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: True)


def test_a_process_without_torch_distributed_computes_all_itself() -> None:
    assert ExpertParallel().layer(MemoryNamespace.of_swiglu(), 0) is None


@pytest.mark.usefixtures("in_a_job")
def test_a_rank_that_is_alone_computes_all_itself() -> None:
    assert ExpertParallel(Group(1), timeout_s=1.0).layer(MemoryNamespace.of_swiglu(), 0) is None


@pytest.mark.usefixtures("in_a_job")
def test_a_namespace_that_was_opened_for_other_ranks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Group, "group_name", "some")
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: dist.HashStore())  # type: ignore[attr-defined]
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: [0, 1, 2])
    monkeypatch.setattr(dist, "new_group", lambda ranks, **options: Group(len(ranks)))
    monkeypatch.setattr("paramstore_client.moe.expert_parallel.meet_nodes", lambda *_, **__: Nodes.named("aaa"))
    source: Any = SimpleNamespace(mode="write", world_size=2, wait_timeout_s=1.0, experts=8)
    with pytest.raises(ConfigError, match=r"its group has 3 ranks, the namespace was opened for 2: .*launched"):
        ExpertParallel(Group(3)).layer(source, 0)


@pytest.mark.usefixtures("in_a_job")
def test_which_exchange_was_chosen_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Group, "group_name", "some")
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: dist.HashStore())  # type: ignore[attr-defined]
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: list(range(group.size())))
    monkeypatch.setattr(dist, "new_group", lambda ranks, **options: Group(len(ranks)))
    source: Any = SimpleNamespace(mode="read", wait_timeout_s=1.0, experts=8)
    told = []
    for way, stand in (("auto", "aa"), ("two_hops", "ab"), ("auto", "ab")):
        monkeypatch.setattr("paramstore_client.moe.expert_parallel.meet_nodes", lambda *_, at=stand, **__: Nodes.named(at))
        parallel = ExpertParallel(Group(2), exchange=way)
        assert parallel.chosen is None
        parallel.layer(source, 0)
        told.append(parallel.chosen and (parallel.chosen.ways, parallel.chosen.why))
    assert told == [((), "all ranks are on one node"), (("two_hops",), "as told"), None]


def test_an_exchange_that_there_is_not_is_refused() -> None:
    with pytest.raises(ConfigError, match="exchange='fast': give 'auto' or 'flat' or 'two_hops' or 'row_per_node'"):
        ExpertParallel(exchange="fast")


@pytest.mark.parametrize("group", [3, "gloo", object()])
def test_what_is_no_group_is_refused(group: Any) -> None:
    with pytest.raises(ConfigError, match=r"group.*dist\.new_group"):
        ExpertParallel(group)


@pytest.mark.usefixtures("in_a_job")
def test_layers_lie_as_was_said_and_the_others_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Group, "group_name", "some")
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: dist.HashStore())  # type: ignore[attr-defined]
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: [0, 1])
    monkeypatch.setattr(dist, "new_group", lambda ranks, **options: Group(len(ranks)))
    monkeypatch.setattr("paramstore_client.moe.expert_parallel.meet_nodes", lambda *_, **__: Nodes.named("aa"))
    source: Any = SimpleNamespace(mode="read", wait_timeout_s=1.0, experts=4)
    said = Placement(((1,), (0,), (1,), (0,)), 2)

    def lies(placement: Any, layer: int) -> Placement:
        made = ExpertParallel(Group(2), placement=placement).layer(source, layer)
        assert made is not None
        return made.placement

    assert lies(said, 0) == lies(said, 5) == lies({5: said}, 5) == said
    assert lies({5: said}, 0) == lies(None, 0) == Placement.in_order(4, 2)
    with pytest.raises(ConfigError, match="placement of layer 0: it is of 4 experts on 3 ranks, the layer has 4, the job 2"):
        lies(Placement.in_order(4, 3), 0)


@pytest.mark.parametrize("placement", [3, "in order", [0, 1], {0: (0, 1)}, {"first": Placement.in_order(4, 2)}])
def test_what_is_no_placement_is_refused(placement: Any) -> None:
    with pytest.raises(ConfigError, match="placement"):
        ExpertParallel(placement=placement)
    with pytest.raises(ConfigError, match="placement"):
        ExpertParallel().place(placement)


def test_a_process_that_is_alone_moves_nothing() -> None:
    parallel = ExpertParallel(placement=Placement.in_order(4, 2))
    assert parallel.layer(MemoryNamespace.of_swiglu(), 0) is None
    parallel.place({0: Placement.in_order(4, 2)})
    assert parallel.rebalance() == {}


def test_ranks_see_one_step_by_a_number() -> None:
    assert _step_of(SimpleNamespace(view_step=7, epoch=2)) == 7
    assert _step_of(SimpleNamespace(view_step=None, epoch=2)) == 2


@pytest.mark.parametrize(
    ("error", "known"), [(RankLost("rank 1 is gone"), True), (LeaseError("was closed"), False), (None, False)]
)
def test_the_daemon_is_asked_which_rank_is_gone(error: ParamStoreError | None, known: bool) -> None:
    def end_layers(layers: list[int]) -> None:
        assert layers == []
        if error is not None:
            raise error

    handle = SimpleNamespace(mode="write", world_size=2, end_layers=end_layers)
    assert _loss_of(handle) is (error if known else None)
    assert _loss_of(SimpleNamespace(mode="read", world_size=1)) is None


@pytest.mark.slow
def test_containers_that_dispatch_by_themselves_are_refused() -> None:
    import transformers

    model = transformers.AutoModelForSeq2SeqLM.from_config(small_config(transformers.SwitchTransformersConfig))
    (path,) = [name for name, module in model.named_modules() if type(module).__name__ == "SwitchTransformersExperts"][:1]
    with pytest.raises(UnsupportedModel, match="SwitchTransformersExperts keeps a module for each expert"):
        check_parallel(model, [path])
    check_parallel(model, ["shared"])


@pytest.mark.usefixtures("in_a_job")
def test_nothing_is_placed_before_there_is_a_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_rank", lambda group: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda group: 2)
    parallel = ExpertParallel(Group(2))
    for call in (lambda: parallel.place(Placement.in_order(4, 2)), parallel.rebalance):
        with pytest.raises(ConfigError, match="no layer has this ExpertParallel yet"):
            call()
