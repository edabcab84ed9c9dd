"""The device tier's CPU twin in front of the real daemon: current bytes, bounded slots, residency that the service knows."""

from collections.abc import Iterator

import pytest
import torch

import paramstore as ps

pytestmark = pytest.mark.slow

LAYERS, EXPERTS = 2, 8
FIELDS = {"gate_up": (64, 32), "down": (32, 32)}
KEYS = [(layer, expert) for layer in range(LAYERS) for expert in range(EXPERTS)]
HOST_BYTES = 12 << 20


@pytest.fixture
def store(autostarting: ps.ServeOptions) -> Iterator[ps.Store]:
    with ps.connect(autostart=autostarting, timeout_s=60.0) as store:
        yield store


@pytest.fixture
def writer(store: ps.Store, request: pytest.FixtureRequest) -> ps.Namespace:
    """Its own namespace for each test, with random experts, committed as step 1."""
    name = request.node.name[-64:]
    ns = store.create_namespace(name, ps.adamw_schema(FIELDS), layers=LAYERS, experts=EXPERTS, host_bytes=HOST_BYTES)
    generator = torch.Generator().manual_seed(0)
    ns.initialize(lambda key: {field: torch.randn(shape, generator=generator) for field, shape in FIELDS.items()})
    ns.commit(1).wait()
    return ns


def update(ns: ps.Namespace, keys: list[tuple[int, int]]) -> None:
    """Without waiting: what is acquired afterwards sees it."""
    ns.push({key: {name: torch.ones(shape, dtype=torch.bfloat16) for name, shape in FIELDS.items()} for key in keys})
    ns.apply(ps.AdamW(lr=0.1))


def values(ns: ps.Namespace) -> dict[tuple[int, int], dict[str, torch.Tensor]]:
    """What the namespace itself gives, past the tier."""
    found = {}
    for key in KEYS:
        with ns.acquire([key]) as lease:
            found |= lease.clone()
    return found


def assert_serves(tier: ps.DeviceTier, expected: dict[tuple[int, int], dict[str, torch.Tensor]]) -> None:
    """Every key in turn, a few at a time."""
    for start in range(0, len(KEYS), 3):
        keys = KEYS[start : start + 3]
        with tier.fetch(keys) as held:
            for key in keys:
                for name, value in expected[key].items():
                    assert torch.equal(held[key][name], value), f"{key} {name}"


def test_slots_hold_the_stores_bytes_and_are_evicted_for_others(writer: ps.Namespace) -> None:
    expected = values(writer)
    with ps.DeviceTier(writer, 4, device="cpu") as tier:
        for _ in range(2):
            assert_serves(tier, expected)
        assert tier.stats.evictions > 0
        assert len(tier.keys) == 4
        with pytest.raises(ps.CapacityError, match="5 keys asked of a device tier of 4 slots"):
            tier.fetch(KEYS[:5])


def test_only_updated_experts_are_fetched_again_after_an_apply(writer: ps.Namespace) -> None:
    with ps.DeviceTier(writer, len(KEYS), device="cpu") as tier:
        assert_serves(tier, values(writer))
        copied_bytes = tier.stats.bytes_copied
        update(writer, KEYS[3:7])
        assert_serves(tier, values(writer))
        assert tier.stats.refetches == 4
        assert tier.stats.bytes_copied == copied_bytes * (len(KEYS) + 4) // len(KEYS)
        before = tier.stats.hits
        assert_serves(tier, values(writer))
        assert tier.stats.hits == before + len(KEYS)


def test_a_rollback_brings_the_committed_bytes_back(writer: ps.Namespace) -> None:
    committed = values(writer)
    with ps.DeviceTier(writer, len(KEYS), device="cpu") as tier:
        update(writer, KEYS[:4])
        assert_serves(tier, values(writer))
        writer.rollback(1)
        assert_serves(tier, committed)


def test_a_readers_copies_stand_on_its_step_until_it_refreshes(autostarting: ps.ServeOptions, writer: ps.Namespace) -> None:
    first = values(writer)
    with (
        ps.connect(autostart=autostarting) as other,
        other.open_namespace(writer.name) as reader,
        ps.DeviceTier(reader, len(KEYS), device="cpu") as tier,
    ):
        assert_serves(tier, first)
        update(writer, KEYS)
        writer.commit(2).wait()
        assert_serves(tier, first)
        assert reader.refresh() == 2
        assert_serves(tier, values(writer))
        assert tier.stats.refetches == len(KEYS)


def test_the_service_knows_what_is_on_the_device(store: ps.Store, writer: ps.Namespace) -> None:
    param_bytes = writer.schema.part("param").image_bytes
    with ps.DeviceTier(writer, 4, device="cpu") as tier:
        tier.fetch(KEYS[2:5]).release()
        tier.report()
        assert [key for key, is_here in zip(KEYS, writer.residency()["hbm"], strict=True) if is_here] == KEYS[2:5]
        assert store.stats()["namespaces"][writer.name]["hbm_bytes"] == 3 * param_bytes
    assert not any(writer.residency()["hbm"])
    assert store.stats()["namespaces"][writer.name]["hbm_bytes"] == 0


def test_a_prefetch_reaches_the_slots(writer: ps.Namespace) -> None:
    expected = values(writer)
    writer.evict(part="param").wait()
    with ps.DeviceTier(writer, len(KEYS), device="cpu") as tier:
        ticket = tier.prefetch(KEYS)
        while not ticket.done():
            writer.steps()  # a round trip, in which the ticket's answer may come
        prefetched = tier.stats.prefetched
        assert prefetched > 0
        assert_serves(tier, expected)
        assert tier.stats.hits >= prefetched


def test_a_model_trains_through_the_tier_as_if_its_experts_were_resident(writer: ps.Namespace) -> None:
    generator = torch.Generator().manual_seed(1)
    x, gate = torch.randn(12, 32, generator=generator).bfloat16(), torch.rand(12, 2, generator=generator)
    ids = torch.rand(12, EXPERTS, generator=generator).topk(2).indices
    with ps.DeviceTier(writer, 3, device="cpu") as tier:
        for _ in range(2):
            expected = values(writer)
            resident = ps.nn.ResidentExperts([expected[1, expert] for expert in range(EXPERTS)])
            x_stored, x_resident = x.clone().requires_grad_(), x.clone().requires_grad_()
            ps.nn.StoredExperts(tier, 1)(x_stored, ids, gate).square().sum().backward()
            resident(x_resident, ids, gate).square().sum().backward()
            assert torch.equal(x_stored.grad, x_resident.grad)
            writer.apply(ps.AdamW(lr=1e-2)).wait()


def test_what_was_evicted_from_the_host_before_it_was_copied_ahead_costs_the_others_nothing(
    writer: ps.Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefetch, expected = writer.prefetch, values(writer)

    def evict_one_after(keys: list[tuple[int, int]], part: str = "param") -> ps.Ticket[dict[str, int]]:
        ticket = prefetch(keys, part=part)
        ticket.wait()
        assert writer.evict(KEYS[1:2], part="param").wait()["evicted"] == 1
        return ticket

    monkeypatch.setattr(writer, "prefetch", evict_one_after)
    others = [KEYS[0], *KEYS[2:5]]
    with ps.DeviceTier(writer, 5, device="cpu") as tier:
        assert tier.prefetch(KEYS[:5]).done()
        assert set(tier.keys) >= set(others)
        copied = tier.stats.bytes_copied
        with tier.fetch(others) as held:
            assert all(torch.equal(held[key][name], value) for key in others for name, value in expected[key].items())
        assert (tier.stats.hits, tier.stats.bytes_copied) == (4, copied)
        with tier.fetch(KEYS[1:2]) as held:
            assert all(torch.equal(held[KEYS[1]][name], value) for name, value in expected[KEYS[1]].items())
