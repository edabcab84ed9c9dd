"""Measures grouped_mm on slots, most of them without rows, beside the model's own number of groups: bits and time; what fp8 gives;
and the sums with which a device could check what it has been given."""

# S slots, E experts, T tokens, N rows, H hidden, I inner
# ruff: noqa: N803, N806 - shape suffixes, as the legend says

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

import paramstore as ps
from paramstore.bench.report.rows import SUBJECT, Row
from paramstore.core.checksums import device_sums as on_host
from paramstore.core.checksums import pack_sums
from paramstore_bench.device.place import Place
from paramstore_bench.device.plan import MIB, Plan, absent
from paramstore_client.device.copier import make_copier
from paramstore_client.device.slots import DeviceSlots
from paramstore_client.extents.sums import device_sums, multipliers_on
from paramstore_client.extents.volume_reads import bytes_of
from paramstore_client.hf.model.kernels import ExpertStack, StackedField

TOP_K = 4


def measure_groups(place: Place, plan: Plan, directory: Path) -> Iterator[Row]:
    """Compares grouped_mm with S groups, of a tier's slots, with E groups side by side: prompts of T tokens each."""
    generator = torch.Generator().manual_seed(0)
    E = plan.own_groups
    weight_EIH = (torch.randn(E, plan.inner, plan.hidden, generator=generator) / plan.hidden**0.5).bfloat16().to(place.device)
    schema = ps.param_schema({"w": ((plan.inner, plan.hidden), torch.bfloat16)})
    for T in plan.group_tokens:
        ids_N = torch.stack([torch.randperm(E, generator=generator)[:TOP_K] for _ in range(T)]).flatten().sort().values
        counts_E = ids_N.bincount(minlength=E)
        x_NH = torch.randn(len(ids_N), plan.hidden, generator=generator).bfloat16().to(place.device)
        own = _grouped(x_NH, weight_EIH, counts_E)
        own_s, expected = _median_s(place, plan, own), own()
        active = counts_E.nonzero().flatten()
        views = partial(enumerate, [weight_EIH[e] for e in active.tolist()])
        field = StackedField(weight_EIH.dtype, tuple(weight_EIH.shape[1:]), place.device, views)
        stack = ExpertStack(field, ends=counts_E[active].cumsum(0).tolist())
        runs: dict[str, Callable[[], Tensor]] = {
            f"{len(active)} groups side by side": _grouped(x_NH, weight_EIH[active.to(place.device)], counts_E[active]),
            f"{len(active)} views, one mm a group": lambda x=x_NH, stack=stack: stack.transpose(-2, -1).grouped_mm(x, None),  # type: ignore[misc]  # a default in a lambda
        }
        for S in plan.group_slots:
            if len(active) <= S:
                runs[f"{S} slots"] = _on_slots(place, schema, x_NH, weight_EIH, counts_E, S)
        for case, run in runs.items():
            y = run()
            yield Row(
                name=f"grouped_mm of {T} tokens", case=case, subject=SUBJECT, unit="ms",
                value=(seconds := _median_s(place, plan, run)) * 1e3, against=f"{E} groups, as the model's own",
                limit=own_s * 1e3, ratio=own_s / seconds, ratio_min=own_s / seconds, ratio_max=own_s / seconds,
                note=f"bits equal: {torch.equal(y, expected)}",
                parts={"bits_equal": float(torch.equal(y, expected)), "largest_difference": float((y - expected).abs().max())},
            )  # fmt: skip
            del y
        runs.clear()


def _on_slots(
    place: Place, schema: ps.Schema, x_NH: Tensor, weight_EIH: Tensor, counts_E: Tensor, count: int
) -> Callable[[], Tensor]:  # fmt: skip
    """grouped_mm on a tier's slots, the active experts spread over them in their order."""
    active = counts_E.nonzero().flatten()
    copier = make_copier(place.device, bounce_bytes=schema.part("param").image_bytes)
    weight_SIH = DeviceSlots(schema.part("param"), count, device=place.device, copier=copier).fields["w"]
    at = torch.linspace(0, count - 1, len(active)).round().long()
    weight_SIH[at.to(place.device)] = weight_EIH[active.to(place.device)]
    counts_S = torch.zeros(count, dtype=torch.int64)
    counts_S[at] = counts_E[active]
    return _grouped(x_NH, weight_SIH, counts_S)


def _grouped(x_NH: Tensor, weight_GIH: Tensor, counts_G: Tensor) -> Callable[[], Tensor]:
    offsets_G = counts_G.cumsum(0).to(torch.int32).to(x_NH.device)
    return lambda: functional.grouped_mm(x_NH, weight_GIH.transpose(-2, -1), offs=offsets_G)


def measure_fp8(place: Place, plan: Plan, directory: Path) -> Iterator[Row]:
    """Compares torch's fp8 grouped_mm on weights that lie apart, as slots do, with that on weights side by side."""
    name, E, T = "fp8 grouped_mm on slots", plan.own_groups, plan.group_tokens[-1]
    if not hasattr(torch, "_scaled_grouped_mm"):
        yield absent(name, f"torch {torch.__version__} has no _scaled_grouped_mm")
        return
    generator = torch.Generator().manual_seed(0)

    def fp8(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(torch.float8_e4m3fn).to(place.device)

    x_NH, side_EIH = fp8(T, plan.hidden), fp8(E, plan.inner, plan.hidden)
    apart_EIH = torch.zeros(E, plan.inner * plan.hidden + 4096, dtype=torch.uint8, device=place.device)[:, 4096:]
    apart_EIH = apart_EIH.view(torch.float8_e4m3fn).view(E, plan.inner, plan.hidden)
    apart_EIH.view(torch.uint8).copy_(side_EIH.view(torch.uint8))
    offsets_E = torch.linspace(0, T, E + 1).long()[1:].to(torch.int32).to(place.device)
    scale_N, scale_EI = torch.ones(T, device=place.device), torch.ones(E, plan.inner, device=place.device)

    def multiply(weight_EIH: Tensor) -> Callable[[], Tensor]:
        return lambda: torch._scaled_grouped_mm(
            x_NH, weight_EIH.transpose(-2, -1), scale_N, scale_EI, offs=offsets_E, out_dtype=torch.bfloat16
        )

    try:
        is_equal = torch.equal(multiply(side_EIH)(), multiply(apart_EIH)())
    except (RuntimeError, NotImplementedError) as error:
        yield absent(name, f"{type(error).__name__}: {str(error).splitlines()[0]}")
        return
    seconds, side_s = _median_s(place, plan, multiply(apart_EIH)), _median_s(place, plan, multiply(side_EIH))
    yield Row(
        name=name, case=f"{T} tokens, {E} groups", subject="torch", value=seconds * 1e3, unit="ms", against="side by side",
        limit=side_s * 1e3, ratio=side_s / seconds, ratio_min=side_s / seconds, ratio_max=side_s / seconds,
        note=f"bits equal: {is_equal}",
    )  # fmt: skip


def measure_sums(place: Place, plan: Plan, directory: Path) -> Iterator[Row]:
    """Measures device sums, by which records are proven that were read past the daemon, of one record, a chunk of 1 MiB each."""
    part = ps.param_schema({"w": ((plan.copy_bytes // MIB * MIB,), torch.uint8)}).stored
    image_B = torch.randint(0, 256, (part.image_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    there_B, odd_there_C = image_B.to(place.device), multipliers_on(place.device)

    def sums() -> Tensor:
        return device_sums(there_B, part, odd_there_C)

    expected = on_host(bytes_of(image_B), part.chunks())
    is_equal = pack_sums([one % (1 << 64) for one in sums().tolist()]) == pack_sums(expected)
    seconds = _median_s(place, plan, sums)
    yield Row(
        name="sums of what the device holds", case="plain torch", subject="torch", value=plan.copy_bytes / seconds / 1e9,
        unit="GB/s", note=f"equal to those of the host: {is_equal}",
    )  # fmt: skip


def _median_s(place: Place, plan: Plan, launch: Callable[[], object]) -> float:
    launch()
    return statistics.median(place.timed(1.0, launch).seconds for _ in range(plan.rounds))
