from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import paramstore_client as ps
from paramstore.wire import messages as m
from paramstore_testkit.wire.fake_daemon import FakeDaemon

KEYS = [(0, 3), (1, 0)]


def permissions_at(address: int) -> str:
    """What /proc says this process may do with the memory at `address`."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, permissions, *_ = line.split()
        start, end = (int(bound, 16) for bound in span.split("-"))
        if start <= address < end:
            return permissions
    return "unmapped"


def test_leased_tensors_hold_the_values_of_their_keys(namespace: ps.Namespace) -> None:
    with namespace.acquire(KEYS) as lease:
        assert lease.keys() == KEYS
        assert lease[0, 3]["gate_up"].dtype == torch.bfloat16
        assert lease[0, 3]["gate_up"].shape == (8, 4)
        assert (lease[0, 3]["gate_up"] == 3).all()
        assert (lease[1, 0]["down"] == 16).all()
        assert set(lease[1, 0]) == {"gate_up", "down"}


def test_leased_tensors_are_made_once_and_not_copied(namespace: ps.Namespace) -> None:
    with namespace.acquire(KEYS) as lease, namespace.acquire(KEYS) as again:
        first = lease[0, 3]["gate_up"]
        assert lease[0, 3]["gate_up"] is first
        assert first.data_ptr() == again[0, 3]["gate_up"].data_ptr()


def test_leased_memory_is_mapped_without_the_right_to_write(namespace: ps.Namespace) -> None:
    with namespace.acquire(KEYS) as lease:
        address = lease[0, 3]["gate_up"].data_ptr()
        assert permissions_at(address) == "r--s"


def test_image_is_the_whole_part_at_its_offsets(namespace: ps.Namespace) -> None:
    with namespace.acquire(KEYS) as lease:
        image = lease.image((1, 0))
        field = lease.part.field("down")
        assert image.numel() == lease.part.image_bytes
        data = image[field.offset_bytes : field.offset_bytes + field.length_bytes].view(torch.bfloat16)
        assert (data == 16).all()


def test_identity_changes_with_every_update(
    namespace: ps.Namespace, gradient: Callable[[float], dict[str, torch.Tensor]]
) -> None:
    with namespace.acquire(KEYS) as lease:
        before = lease.identity((0, 3))
    namespace.push({(0, 3): gradient(1.0)})
    namespace.apply(ps.AdamW(lr=1.0)).wait()
    with namespace.acquire(KEYS) as lease:
        assert lease.identity((0, 3)) == (before.epoch, before.version + 1)
        assert lease.identity((1, 0)) == (before.epoch, 0)


def test_lease_ends_with_the_with_block(daemon: FakeDaemon, namespace: ps.Namespace) -> None:
    with namespace.acquire(KEYS) as lease:
        fields = lease[0, 3]
    daemon.wait_until(lambda: daemon.lease_count == 0)
    for use in (lambda: lease[0, 3], lambda: fields["down"], lease.clone, lambda: lease.image((0, 3)), lease.__enter__):
        with pytest.raises(ps.LeaseError, match="released"):
            use()


def test_release_twice_sends_once(daemon: FakeDaemon, namespace: ps.Namespace) -> None:
    lease = namespace.acquire(KEYS)
    lease.release()
    lease.release()
    namespace.steps()
    assert len(daemon.requests(m.Release)) == 1


def test_clone_outlives_the_lease(namespace: ps.Namespace) -> None:
    with namespace.acquire(KEYS) as lease:
        copies = lease.clone()
    assert (copies[1, 0]["gate_up"] == 16).all()
    copies[1, 0]["gate_up"].zero_()


def test_key_or_field_that_is_not_leased_is_named(namespace: ps.Namespace) -> None:
    with namespace.acquire(KEYS) as lease:
        with pytest.raises(ps.UnknownKey, match=r"\(0, 0\)"):
            lease[0, 0]
        with pytest.raises(ps.SchemaMismatch, match="up_gate"):
            lease[0, 3]["up_gate"]
        assert (0, 0) not in lease
        assert "up_gate" not in lease[0, 3]


USES: dict[str, Callable[[torch.Tensor], object]] = {
    "mean": lambda x: x.mean(), "sum": lambda x: x.sum(), "times": lambda x: x * 2, "clone": lambda x: x.clone(),
    "tolist": lambda x: x.tolist(), "numel": lambda x: x.numel(), "shape": lambda x: x.shape, "index": lambda x: x[0],
    "item": lambda x: x[0, 0].item(), "right operand": lambda x: torch.ones(4, 8, dtype=torch.bfloat16) @ x, "len": len,
    "a list": lambda x: torch.stack([torch.zeros(8, 4, dtype=torch.bfloat16), x]), "target": lambda x: torch.zeros(8, 4).copy_(x),
    "keyword": lambda x: torch.add(input=torch.zeros(8, 4), other=x), "iteration": list, "address": lambda x: x.data_ptr(),
    "numpy": lambda x: x.float().numpy(), "deepcopy": copy.deepcopy, "pickle": pickle.dumps, "comparison": lambda x: x == 3,
    "boolean": lambda x: bool(x.any()), "linear": lambda x: torch.nn.functional.linear(torch.ones(2, 4, dtype=x.dtype), x),
}  # fmt: skip
"""What programs do with a tensor."""


@pytest.fixture
def debug_lease(daemon: FakeDaemon, namespace: ps.Namespace) -> Iterator[ps.Lease]:
    with ps.connect(daemon.path, debug=True) as store:
        yield store.open_namespace("moe").acquire(KEYS)


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_debug_mode_makes_every_use_of_a_released_leases_tensor_raise(
    use: Callable[[torch.Tensor], object], debug_lease: ps.Lease
) -> None:
    weight, image = debug_lease[0, 3]["gate_up"], debug_lease.image((0, 3))
    use(weight)  # right as long as the lease is held
    view, transposed = weight[2:], weight.T
    debug_lease.release()
    for tensor in (weight, image, view, transposed):
        with pytest.raises(ps.LeaseError, match="was released: acquire again"):
            use(tensor)


def test_debug_mode_leaves_what_was_computed_or_copied_alone(debug_lease: ps.Lease) -> None:
    weight = debug_lease[0, 3]["gate_up"]
    copies, doubled, copied = debug_lease.clone(), weight * 2, copy.deepcopy(weight)
    loaded = pickle.loads(pickle.dumps(weight))
    debug_lease.release()
    assert {type(tensor) for tensor in (copies[0, 3]["gate_up"], doubled, copied, loaded)} == {torch.Tensor}
    assert (copies[0, 3]["gate_up"] == 3).all()
    assert (doubled == 6).all()
    assert (copied == loaded).all()
    assert repr(weight) == "<tensor of a released lease>"


def test_debug_mode_finds_a_backward_through_a_released_lease(debug_lease: ps.Lease) -> None:
    activations = torch.ones(2, 4, dtype=torch.bfloat16, requires_grad=True)
    held = torch.nn.functional.linear(activations, debug_lease[0, 3]["gate_up"])
    held.sum().backward()
    assert activations.grad is not None
    assert (activations.grad == 24).all()
    late = torch.nn.functional.linear(activations, debug_lease[0, 3]["gate_up"])
    debug_lease.release()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        late.sum().backward()


def test_without_debug_mode_leased_tensors_are_plain(namespace: ps.Namespace) -> None:
    with namespace.acquire(KEYS) as lease:
        assert type(lease[0, 3]["gate_up"]) is type(lease.image((0, 3))) is torch.Tensor


def test_debug_mode_can_be_set_by_the_environment(
    daemon: FakeDaemon, namespace: ps.Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PARAMSTORE_DEBUG", "1")
    with ps.connect(daemon.path) as store:
        with store.open_namespace("moe").acquire(KEYS) as lease:
            weight = lease[0, 3]["gate_up"]
        with pytest.raises(ps.LeaseError):
            weight.numel()


def test_dropped_lease_without_tensors_is_released(daemon: FakeDaemon, namespace: ps.Namespace) -> None:
    namespace.acquire(KEYS)
    daemon.wait_until(lambda: daemon.lease_count == 0)


@pytest.mark.slow
def test_dropped_lease_with_tensors_is_kept_and_logged(
    daemon: FakeDaemon, namespace: ps.Namespace, caplog: pytest.LogCaptureFixture
) -> None:
    weight = namespace.acquire(KEYS)[0, 3]["gate_up"]
    gc.collect()
    namespace.steps()
    assert daemon.lease_count == 1
    assert "without release()" in caplog.text
    assert (weight == 3).all()


def test_leased_tensors_stay_readable_when_the_daemon_dies(daemon: FakeDaemon, namespace: ps.Namespace) -> None:
    lease = namespace.acquire(KEYS)
    daemon.stop()
    with pytest.raises(ps.StoreUnavailable):
        namespace.steps()
    assert (lease[0, 3]["gate_up"] == 3).all()
    lease.release()


def test_lease_of_a_closed_store_says_so(store: ps.Store, namespace: ps.Namespace) -> None:
    lease = namespace.acquire(KEYS)
    store.close()
    with pytest.raises(ps.LeaseError, match="closed"):
        lease[0, 3]["gate_up"]
    lease.release()
