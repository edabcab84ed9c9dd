"""Counts what a ring finds absent, and copies, visit by visit, and compares its counters with the bytes in the slots."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import torch

from paramstore.bench.report.rows import SUBJECT, Row, Target, judged
from paramstore.testing.memory_namespace import MemoryNamespace
from paramstore_bench.device.place import Place
from paramstore_bench.device.plan import Plan
from paramstore_client.device.ring import RingMemory
from paramstore_client.device.tier import DeviceTier

LAYERS, EXPERTS = 5, 4
COPIES_PER_USE_MAX = 1.06


def measure_ring(place: Place, plan: Plan, directory: Path) -> Iterator[Row]:
    """Measures rings of 2, 3 and 4 layers, each visit after all that was loaded ahead has come."""
    for slots in (2, 3, 4):
        namespace = MemoryNamespace.of_swiglu(layers=LAYERS, experts=EXPERTS, hidden=64, inner=64, is_trainable=False)
        wrong = 0
        with ExitStack() as stack:
            tier = DeviceTier(namespace, slots * EXPERTS, device=place.device, policy="ring", layers=range(LAYERS))
            ring = stack.enter_context(RingMemory(stack.enter_context(tier), slots))
            for visit in range(plan.ring_visits):
                place.finish()
                tier.settle()
                with ring.layer(visit % LAYERS) as experts:
                    values = [(fields, namespace.values((visit % LAYERS, expert))) for expert, fields in experts.items()]
                    wrong += sum(
                        not torch.equal(fields[name].cpu(), value) for fields, there in values for name, value in there.items()
                    )
            stats = tier.stats
        uses = plan.ring_visits * EXPERTS
        first = slots * EXPERTS  # of the first turns all is absent: the ring asks for it when it begins
        image_bytes = sum(field.length_bytes for field in namespace.schema.part("param").fields)
        copied = stats.bytes_copied / image_bytes
        case = f"{slots} of {LAYERS} layers, {plan.ring_visits} visits"
        parts = {
            "hits": stats.hits, "late": stats.late, "misses": stats.misses, "copies": copied, "wrong_fields": wrong,
            "counted_copies": stats.misses + stats.prefetched,
        }  # fmt: skip
        yield judged(
            Row(
                name="ring: experts absent", case=case, subject=SUBJECT, value=stats.misses + stats.late + wrong, unit=f"of {uses}",
                target=Target("value", "<=", 0.0), parts=parts,
            )
        )  # fmt: skip
        yield judged(
            Row(
                name="ring: copies a use", case=case, subject=SUBJECT, value=(copied - first) / uses, unit="copies",
                target=Target("value", "<=", COPIES_PER_USE_MAX), parts=parts,
            )
        )  # fmt: skip
