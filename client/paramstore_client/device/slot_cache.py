"""Makes the slots in front of a namespace: leases that stand on the CPU, memory on a device. `RingMemory` and `ExpertBuffer` are
faces of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paramstore.core.arguments import wrong
from paramstore_client.device.host_slots import HostSlots
from paramstore_client.device.loans import slots_within
from paramstore_client.device.tier import DeviceTier
from paramstore_client.source import ExpertSource, HostSource


def open_slots(
    namespace: ExpertSource, slots: int, *, device: torch.device, policy: str, layers: Sequence[int] | None = None
) -> HostSlots | DeviceTier:
    """Makes `slots` slots, on the CPU at most as many as may stand within what the namespace was promised, and for a reader more,
    up to `slots`, while the daemon lends them. Where no lease may stand (in debug mode, and with daemons that promise nothing) each
    ends with its visit. The caller closes them. Raises ConfigError."""
    if not isinstance(namespace, HostSource):
        raise wrong("namespace", namespace, "an open namespace")
    if device.type != "cpu":
        return DeviceTier(namespace, slots, device=device, policy=policy, layers=layers)
    cache = HostSlots(namespace, slots=min(slots, slots_within(namespace)), policy=policy, layers=layers)
    cache.loans.most = slots - cache.lease_slots
    cache.may_stand = cache.loans.lend_by(namespace.let_stand(cache))
    return cache
