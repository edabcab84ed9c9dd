"""Decoding while volumes fail, the daemon dies or Ctrl-C comes: the right tokens, or a typed error in time, and none after it."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import paramstore as ps
from paramstore_client.hf.compat import modeling
from paramstore_client.hf.model.layout import experts_modules
from paramstore_testkit.interrupts import Interrupt, InterruptAtPoint
from paramstore_testkit.processes.killable_serve import MIB, KillableDaemons
from paramstore_testkit.training.moe_families import tiny_config
from paramstore_testkit.training.moe_models import tokens
from paramstore_testkit.trials.faulty_os import OS_SITES

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread", "in_time")]

GREEDY: dict[str, Any] = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
FLAGS = {"host_budget": 64 * MIB, "gradient_budget": 8 * MIB, "wait_timeout_s": 10.0}
LIMIT_S = 30.0
"""Longer than any deadline in these tests: what takes longer hangs."""
INTERRUPTED = (
    "device/host_slots.py", "device/standing_lease.py", "device/visit_lease.py", "device/loads_ahead.py",
    "hf/model/layer_weights.py", "hf/model/layer_experts.py", "hf/model/weight_sources.py", "policy/slot_plan.py",
)  # fmt: skip
"""Code in which Ctrl-C comes."""
CONNECTION = (
    "connection/shared_socket.py", "connection/inbox.py", "connection/outbox.py", "connection/open_tickets.py",
    "connection/reader_role.py", "connection/segments.py", "connection/ticket.py",
)  # fmt: skip
"""Code in which what is asked of the daemon is sent, and its answers are read."""
SPARED = ("__exit__", "release")
"""Where the release of a lease begins: whether its tensors are used on then nobody can say."""
INTERRUPTS = 12
NAME = "served"


@pytest.fixture
def in_time() -> Iterator[None]:
    started_s = time.monotonic()
    yield
    assert time.monotonic() - started_s < LIMIT_S


class Failing:
    """A daemon over two volumes, whose files fail as they are told to."""

    def __init__(self, daemons: KillableDaemons, directory: Path) -> None:
        self._daemons = daemons
        self._directory = directory
        self._switches = directory / "switches"
        self._switches.mkdir()
        self.address = self.start()

    def start(self) -> str:
        address = self._daemons.start(self._directory / "store", flags=FLAGS, switches=self._switches)
        assert address is not None
        return address

    def kill(self) -> None:
        self._daemons.kill()

    @contextmanager
    def failing(self, site: str) -> Iterator[None]:
        """A block in which every call of `site`, one of OS_SITES, fails."""
        assert site in OS_SITES
        (self._switches / site).touch()
        try:
            yield
        finally:
            (self._switches / site).unlink()


@pytest.fixture(scope="module")
def daemons(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KillableDaemons]:
    with KillableDaemons(tmp_path_factory.mktemp("daemons") / "log") as daemons:
        yield daemons


@pytest.fixture
def daemon(daemons: KillableDaemons, tmp_path: Path) -> Iterator[Failing]:
    yield Failing(daemons, tmp_path)
    daemons.kill()


def model_of(store: ps.Store, **options: Any) -> Any:
    """A new model with stored experts, whose weights are those of the `stock` one."""
    torch.manual_seed(0)
    given = {"mode": "infer", "experts_implementation": "grouped_mm", **options}
    auto = modeling.transformers().AutoModelForCausalLM
    return ps.hf.from_config(auto, tiny_config("qwen3_moe"), store=store, name=NAME, **given).eval()


@pytest.fixture(scope="module")
def expected() -> Tensor:
    """The tokens of the unmodified model."""
    torch.manual_seed(0)
    auto = modeling.transformers().AutoModelForCausalLM
    stock = auto.from_config(tiny_config("qwen3_moe"), experts_implementation="grouped_mm").eval()
    made: Tensor = stock.generate(tokens(), **GREEDY)
    return made


def at_token(model: Any, number: int, act: Callable[[], object]) -> Any:
    """Has `act` called within the forward of that token, before its last layer's experts."""
    count = itertools.count()
    *_, last = experts_modules(model).values()

    def look(*_: Any) -> None:
        if next(count) == number:
            act()

    return last.register_forward_pre_hook(look)


def forget(model: Any) -> None:
    """Has the daemon drop every copy that does not stand: what is used next is read from the volume."""
    ps.hf.namespace(model).evict().wait()


def bytes_read(store: ps.Store) -> int:
    return sum(int(volume["bytes_read"]) for volume in store.stats()["volumes"].values())


def test_a_volume_that_cannot_be_read_ends_a_decode_with_its_error_and_not_the_next(
    daemon: Failing, expected: Tensor
) -> None:
    with ps.connect(daemon.address) as store:
        model = model_of(store, expert_memory=4)
        for number in (0, 1, 5):
            with daemon.failing("preadv"):
                hook = at_token(model, number, lambda: forget(model))
                with pytest.raises(ps.VolumeError, match=r"volume \d .*: Input/output error"):
                    model.generate(tokens(), **GREEDY)
                hook.remove()
            assert torch.equal(model.generate(tokens(), **GREEDY), expected)
        assert slots_lost(store) == 0
        ps.hf.namespace(model).close()


@pytest.mark.parametrize("slots", [16, 2], ids=["standing", "in the daemon's memory"])
def test_what_has_a_copy_in_memory_is_decoded_with_while_the_volume_fails(
    slots: int, daemon: Failing, expected: Tensor
) -> None:
    with ps.connect(daemon.address) as store:
        model = model_of(store, expert_memory=slots)
        assert torch.equal(model.generate(tokens(), **GREEDY), expected)
        before = bytes_read(store)
        with daemon.failing("preadv"):
            assert torch.equal(model.generate(tokens(), **GREEDY), expected)
        assert bytes_read(store) == before
        ps.hf.namespace(model).close()


@pytest.mark.parametrize("site", ["fdatasync", "pwritev"])
def test_a_volume_that_is_fenced_under_a_decode_is_read_on(site: str, daemon: Failing, expected: Tensor) -> None:
    """A trainer's commits fail beside it, until the volume takes no more; the reader's step stays."""
    with ps.connect(daemon.address) as trainer, ps.connect(daemon.address) as store:
        trained = model_of(trainer, mode="train", updates="touched")
        served = model_of(store, expert_memory=2)
        experts = ps.hf.experts(trained)

        def commit() -> None:
            for step in (1, 2):
                trained(input_ids=tokens(seed=step), labels=tokens(seed=step)).loss.backward()
                experts.step(lr=0.1)
                with daemon.failing(site), pytest.raises(ps.ParamStoreError):
                    experts.commit(step).wait()
                experts.rollback()
            assert any(volume["fenced"] for volume in trainer.stats()["volumes"].values())
            forget(served)

        hook = at_token(served, 3, torch.enable_grad()(commit))
        before = bytes_read(store)
        assert torch.equal(served.generate(tokens(), **GREEDY), expected)
        hook.remove()
        assert bytes_read(store) > before
        assert ps.hf.namespace(served).view_step == 0
        assert torch.equal(served.generate(tokens(), **GREEDY), expected)


def test_a_daemon_that_dies_under_a_decode_is_said_to_be_gone_and_its_store_served_again(
    daemon: Failing, expected: Tensor
) -> None:
    with ps.connect(daemon.address) as store:
        model = model_of(store, expert_memory=2)
        at_token(model, 3, daemon.kill)
        with pytest.raises(ps.StoreUnavailable):
            model.generate(tokens(), **GREEDY)
        daemon.start()
        store.reconnect()
        assert torch.equal(model_of(store, expert_memory=2).generate(tokens(), **GREEDY), expected)


def slots_lost(store: ps.Store) -> int:
    """Slots that stay leased when all that stands was given back. Asked before the namespace is closed, which would end leases that
    were lost, too."""
    for keeper in store._connection.segments.keepers():
        keeper.give_back()
    leased: int = store.stats()["namespaces"][NAME]["leased_slots"]
    return leased


def at_a_line(numbers: random.Random) -> Interrupt:
    return Interrupt(numbers.randrange(1, 2500), INTERRUPTED)


def at_a_point_of_the_connection(numbers: random.Random) -> InterruptAtPoint:
    return InterruptAtPoint(numbers.randrange(1, 2500), CONNECTION, spared=SPARED)


@pytest.mark.parametrize("interrupted", [at_a_line, at_a_point_of_the_connection])
@pytest.mark.parametrize("slots", [16, 4, 1])
def test_after_ctrl_c_anywhere_in_generate_the_next_has_the_right_tokens(
    slots: int, interrupted: Callable[[random.Random], Interrupt | InterruptAtPoint], daemon: Failing, expected: Tensor
) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")  # noqa: T201 - shown when it fails
    numbers = random.Random(seed)
    with ps.connect(daemon.address) as store:
        model = model_of(store, expert_memory=slots)
        raised = 0
        for _ in range(INTERRUPTS):
            if slots == 16:
                ps.hf.namespace(model).refresh()  # what stood is given back: loads are interrupted too
            with interrupted(numbers) as interrupt:
                model.generate(tokens(), **GREEDY)
            raised += interrupt.is_raised
            assert torch.equal(model.generate(tokens(), **GREEDY), expected)
        assert raised > 0
        assert slots_lost(store) == 0
        ps.hf.namespace(model).close()
