"""The device tier on a CUDA device: the same promises as its twin, with streams under it."""

import mmap
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import paramstore as ps
from paramstore.core.optimizers import AdamW
from paramstore.testing.memory_namespace import MemoryNamespace
from paramstore_client.device.copier import REACHED, CudaCopier
from paramstore_client.device.ring import RingMemory
from paramstore_client.device.tier import DeviceTier
from paramstore_client.nn import ResidentExperts, StoredExperts
from paramstore_testkit.processes.daemon_process import DaemonProcess

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: torch.cuda.is_available() is False"),
]

KEYS = [(0, expert) for expert in range(6)]
DEVICE = torch.device("cuda", 0)


def make_namespace(**arguments: object) -> MemoryNamespace:
    return MemoryNamespace.of_swiglu(hidden=512, inner=1024, **arguments)


def test_slots_hold_the_experts_bytes_while_they_are_held() -> None:
    ns = make_namespace(lease_slots=2)
    with DeviceTier(ns, 3, device=DEVICE) as tier:
        for start in range(4):
            with tier.fetch(KEYS[start : start + 3]) as held:
                for key in KEYS[start : start + 3]:
                    for name, value in ns.values(key).items():
                        assert torch.equal(held[key][name].cpu(), value), f"{key} {name}"
        assert str(tier.describe()["host_memory"]).startswith(("registered", "bounce"))
    assert ns.leased == []


def test_a_slot_is_not_overwritten_before_the_kernels_that_use_it_have_run() -> None:
    ns = make_namespace()
    with DeviceTier(ns, 1, device=DEVICE) as tier:
        sums = []
        for key in KEYS:
            with tier.fetch([key]) as held:
                torch.cuda._sleep(20_000_000)  # a kernel of some 10 ms, before the one that reads the slot
                sums.append(held[key]["down"].double().sum())
        for key, total in zip(KEYS, sums, strict=True):
            torch.testing.assert_close(total.cpu(), ns.values(key)["down"].double().sum())


@pytest.mark.parametrize("slots", [12, 3])
def test_training_equals_resident_experts_on_the_device(slots: int) -> None:
    ns = make_namespace(lease_slots=4)
    ids, gate = torch.rand(64, 6, device=DEVICE).topk(2).indices, torch.rand(64, 2, device=DEVICE)
    with DeviceTier(ns, slots, device=DEVICE) as tier:
        for _ in range(2):
            resident = ResidentExperts([ns.values((1, expert)) for expert in range(6)]).to(DEVICE)
            x = torch.randn(64, 512, device=DEVICE, requires_grad=True)
            x_expected = x.detach().clone().requires_grad_()
            loss, expected = StoredExperts(tier, 1)(x, ids, gate).square().sum(), resident(x_expected, ids, gate).square().sum()
            loss.backward()
            expected.backward()
            assert torch.equal(loss, expected)
            assert torch.equal(x.grad, x_expected.grad)
            for expert, fields in enumerate(resident.weights):
                for name, parameter in fields.items():
                    if parameter.grad is not None:
                        assert torch.equal(ns.pending[1, expert][name], parameter.grad.cpu())
            ns.apply(AdamW(lr=1e-2))
    assert ns.leased == []


def test_the_ring_computes_on_the_device() -> None:
    ns = make_namespace(layers=5)
    with RingMemory(ns, 2, device=DEVICE) as ring:
        for _ in range(2):
            for layer in range(5):
                with ring.layer(layer) as experts:
                    for expert, fields in experts.items():
                        assert torch.equal(fields["down"].cpu(), ns.values((layer, expert))["down"])


@pytest.fixture
def mapping() -> Iterator[mmap.mmap]:
    with mmap.mmap(-1, 1 << 20) as memory:
        yield memory


@pytest.mark.parametrize("may_register", [True, False])
def test_registered_memory_is_copied_from_and_unregistered_before_it_goes(mapping: mmap.mmap, may_register: bool) -> None:
    source = torch.frombuffer(mapping, dtype=torch.float32)
    source.copy_(torch.arange(len(source)))
    target = torch.zeros(len(source), device=DEVICE)
    copier = CudaCopier(DEVICE, bounce_bytes=source.nbytes, may_register=may_register)
    copier.copy([(target, source)], after=REACHED).wait_on_host()
    assert torch.equal(target.cpu(), source)
    assert copier.describe().startswith(("registered", "bounce"))
    copier.forget_memory(source.data_ptr(), source.nbytes)
    copier.close()
    assert torch.equal(target * 2, target + target), "a refused registration leaves no error behind"
    del source


@pytest.mark.parametrize("may_register", [True, False])
def test_a_tier_made_in_inference_mode_serves_outside_of_it(may_register: bool) -> None:
    ns = make_namespace()
    with torch.inference_mode():
        tier = DeviceTier(ns, 1, device="cuda")
        tier._copier._may_register = may_register  # else through buffers that the first copies make
        for key in KEYS[:3]:
            tier.fetch([key]).release()
    with tier, tier.fetch(KEYS[3:4]) as held:
        for name, value in ns.values(KEYS[3]).items():
            assert torch.equal(held[KEYS[3]][name].cpu(), value)


FIELDS = {"gate_up": (2 * 512, 256), "down": (256, 512)}


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ps.Store]:
    with DaemonProcess(tmp_path / "store", "--host-budget", "256MiB") as daemon, ps.connect(daemon.address) as store:
        yield store


@pytest.fixture
def namespace(store: ps.Store) -> ps.Namespace:
    ns = store.create_namespace("moe", ps.adamw_schema(FIELDS), layers=1, experts=6)
    ns.initialize(lambda key: {name: torch.randn(shape) for name, shape in FIELDS.items()})
    return ns


def assert_serves(ns: ps.Namespace, tier: DeviceTier) -> None:
    for start in range(0, 6, 3):
        keys = KEYS[start : start + 3]
        with tier.fetch(keys) as held, ns.acquire(keys) as lease:
            for key in keys:
                for name, value in lease[key].items():
                    assert torch.equal(held[key][name].cpu(), value), f"{key} {name}"


@pytest.mark.slow
def test_the_daemons_memory_reaches_the_device_and_stale_copies_are_fetched_again(namespace: ps.Namespace) -> None:
    with DeviceTier(namespace, 4, device=DEVICE) as tier:
        assert_serves(namespace, tier)
        gradient = {name: torch.ones(shape, dtype=torch.bfloat16, device=DEVICE) for name, shape in FIELDS.items()}
        namespace.push(dict.fromkeys(KEYS, gradient))
        namespace.apply(AdamW(lr=0.1))
        assert_serves(namespace, tier)
        assert str(tier.describe()["host_memory"]).startswith(("registered", "bounce"))


@pytest.mark.slow
def test_a_store_closed_under_the_tier_leaves_no_registered_memory_and_no_error(store: ps.Store, namespace: ps.Namespace) -> None:
    with DeviceTier(namespace, 4, device=DEVICE) as tier:
        assert_serves(namespace, tier)
        store.close()
        with tier.fetch(KEYS[3:6]) as held:
            assert held[KEYS[3]]["down"].isfinite().all(), "what is on the device stays usable"
