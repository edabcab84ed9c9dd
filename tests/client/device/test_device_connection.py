"""The device tier over a connection: hits that send nothing, rollbacks, segments that are asked back, reports."""

from collections.abc import Callable

import pytest
import torch

import paramstore_client as ps
from paramstore.wire import messages as m
from paramstore_client.device.tier import DeviceTier
from paramstore_testkit.training.small_tier import KEYS, WatchfulCopier
from paramstore_testkit.wire.fake_daemon import FakeDaemon


def test_a_hit_over_a_connection_sends_nothing_until_the_view_changes(
    daemon: FakeDaemon, namespace: ps.Namespace, gradient: Callable[[float], dict[str, torch.Tensor]]
) -> None:
    with DeviceTier(namespace, 4, device="cpu") as tier:
        tier.fetch(KEYS[:3]).release()
        received = len(daemon.requests(m.Acquire))
        with tier.fetch(KEYS[:3]) as held:
            assert held[0, 2]["down"].unique().tolist() == [2.0]
        namespace.steps()
        assert len(daemon.requests(m.Acquire)) == received
        namespace.push({(0, 2): gradient(1.0)})
        namespace.apply(ps.AdamW(lr=0.5))
        with tier.fetch(KEYS[:3]) as held:
            assert held[0, 2]["down"].unique().tolist() == [1.5]
            assert held[0, 1]["down"].unique().tolist() == [1.0]
        assert (tier.stats.refetches, tier.stats.hits) == (1, 5)


def test_copies_are_compared_again_after_a_rollback_over_a_connection(namespace: ps.Namespace) -> None:
    namespace.commit(1).wait()
    with DeviceTier(namespace, 4, device="cpu") as tier:
        tier.fetch(KEYS[:1]).release()
        namespace.rollback(1)
        with tier.fetch(KEYS[:1]) as held:
            assert held.identity(KEYS[0]).epoch == namespace.epoch == 2


def test_segments_asked_back_are_forgotten_before_they_are_acknowledged(
    daemon: FakeDaemon, namespace: ps.Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    copier = WatchfulCopier()
    monkeypatch.setattr("paramstore_client.device.tier.make_copier", lambda *arguments, **options: copier)
    with DeviceTier(namespace, 4, device="cpu") as tier:
        tier.fetch(KEYS[:4]).release()
        daemon.ask_back([daemon.namespaces["moe"].arena])
        namespace.steps()
        daemon.wait_for(m.Unmapped)
        assert [length_bytes for _, length_bytes in copier.forgotten] == [2 << 20]


def test_residency_is_reported_over_a_connection(daemon: FakeDaemon, namespace: ps.Namespace) -> None:
    with DeviceTier(namespace, 4, device="cpu") as tier:
        tier.fetch(KEYS[:2]).release()
        tier.report()
        (report,) = daemon.wait_for(m.DeviceReport)
        assert (report.resident, report.touched) == (KEYS[:2], KEYS[:2])
        assert report.bytes_resident == 2 * namespace.schema.part("param").image_bytes
