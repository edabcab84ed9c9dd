"""A record that is read has the steps that it missed; where it is stored nothing changes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import pytest
import torch

from paramstore.core.key import ExpertKey
from paramstore.core.optimizers import SGD, Adagrad, AdamW, Options
from paramstore.core.schema import Schema
from paramstore.engine.store import Store
from paramstore.engine.tables.namespace import View
from paramstore.engine.transfers.arithmetic import update
from paramstore.errors import StepDropped, StepFailed, WriterFenced
from paramstore.optim.tensors import field_tensor
from paramstore.storage.format.structures import unpack_header
from paramstore_testkit.disks.machine import Machine, PlainSegment
from paramstore_testkit.stores.scrub_site import damage
from paramstore_testkit.stores.small_store import OPTIONS, SCHEMA, create, keys_of, push, run, train, turns

EXACT = replace(SCHEMA, updates="exact")
PART = EXACT.stored
Tensors = dict[str, torch.Tensor]


def dense(value: float, gradients: list[float]) -> Tensors:
    """Field `w` of a record that began at `value`, after a step with each of `gradients`."""
    parts = [torch.full((15,), value), torch.zeros(15), torch.zeros(15)]
    for number, gradient in enumerate(gradients, start=1):
        torch._fused_adamw_(
            [parts[0]], [torch.full((15,), gradient)], [parts[1]], [parts[2]], [], [torch.tensor(float(number))], lr=OPTIONS.lr,
            beta1=OPTIONS.betas[0], beta2=OPTIONS.betas[1], weight_decay=OPTIONS.weight_decay, eps=OPTIONS.eps, amsgrad=False,
            maximize=False,
        )  # fmt: skip
    return dict(zip(("master/w", "exp_avg/w", "exp_avg_sq/w"), parts, strict=True))


async def read(store: Store, view: View, key: ExpertKey) -> tuple[int, Tensors, int]:
    """The version that was read, field `w`, and the version that the header tells."""
    target = PlainSegment(EXACT.record_bytes).view(0, EXACT.record_bytes)
    identity = await store.reading.read(view, key, target)
    found = {name: field_tensor(target, PART.field(name)).clone() for name in ("master/w", "exp_avg/w", "exp_avg_sq/w")}
    return identity.version, found, unpack_header(target, PART).identity.version


def same(found: Tensors, expected: Tensors) -> bool:
    return all(torch.equal(found[name], value) for name, value in expected.items())


def on_store(scenario: Callable[[Store, View], Coroutine[Any, Any, None]]) -> None:
    """Two applies, of which the first has all gradients and the second none, committed as step 1."""

    async def prepared() -> None:
        store = Machine().start()
        view = await create(store, schema=EXACT)
        await train(store, view)
        await train(store, view, [])
        await store.committer.commit(view, 1, b"")
        await scenario(store, view)

    run(prepared())


@pytest.mark.parametrize("is_resident", [False, True])
def test_the_writer_reads_what_the_dense_optimizer_has(is_resident: bool) -> None:
    async def scenario(store: Store, view: View) -> None:
        key = keys_of(view)[3]
        if not is_resident:
            await store.evict(view, None, None)
        assert (view.namespace.residency.working[key].slot is not None) == is_resident
        version, found, stored = await read(store, view, key)
        assert (version, stored if not is_resident else 1) == (2, 1)
        assert same(found, dense(3.0, [1.0, 0.0]))
        assert view.namespace.stats.records_advanced == 1
        assert not view.namespace.steps.changed

    on_store(scenario)


def test_a_reader_reads_its_step_whatever_the_writer_has_done_since() -> None:
    async def scenario(store: Store, view: View) -> None:
        key = keys_of(view)[3]
        reader = await store.admission.open("moe", mode="read", at=None, host_bytes=None)
        await train(store, view, [key])
        await store.committer.commit(view, 2, b"")
        assert (await read(store, reader, key))[::2] == (2, 1)
        assert same((await read(store, reader, key))[1], dense(3.0, [1.0, 0.0]))
        store.refresh(reader)
        version, found, stored = await read(store, reader, key)
        assert (version, stored) == (3, 3)
        assert same(found, dense(3.0, [1.0, 0.0, 1.0]))

    on_store(scenario)


def test_a_read_called_before_an_apply_does_not_see_it() -> None:
    async def scenario(store: Store, view: View) -> None:
        key = keys_of(view)[2]
        push(store, view, [key])
        apply = asyncio.ensure_future(store.applies.apply(view, OPTIONS, 1.0))
        await asyncio.sleep(0)
        first = asyncio.ensure_future(read(store, view, key))
        await asyncio.sleep(0)
        later = asyncio.ensure_future(train(store, view, []))
        await asyncio.gather(apply, later)
        assert (await first)[0] == 3
        assert same((await first)[1], dense(2.0, [1.0, 0.0, 1.0]))
        assert same((await read(store, view, key))[1], dense(2.0, [1.0, 0.0, 1.0, 0.0]))

    on_store(scenario)


def test_a_dropped_step_is_read_no_more() -> None:
    async def scenario(store: Store, view: View) -> None:
        reader = await store.admission.open("moe", mode="read", at=1, host_bytes=None)
        await store.rollback(view, 0)
        with pytest.raises(StepDropped):
            await read(store, reader, keys_of(view)[0])

    on_store(scenario)


@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16", "int8_blockwise"])
@pytest.mark.parametrize("options", [AdamW(lr=0.1), SGD(lr=0.1, momentum=0.9, weight_decay=0.1), Adagrad(lr=0.1, weight_decay=0.1)])
def test_missed_steps_are_those_with_a_gradient_of_zeros_whatever_the_optimizer(options: Options, state_dtype: str) -> None:
    schema = Schema.trained(options.kind, {"w": (3, 700)}, param_dtype="float32", updates="exact", state_dtype=state_dtype)

    async def scenario() -> None:
        store = Machine().start()
        view = await create(store, schema=schema)
        key, count = keys_of(view)[1], schema.gradient_bytes
        push(store, view, [key])
        await store.applies.apply(view, options, 1.0)
        stepped, found = (PlainSegment(schema.record_bytes).view(0, schema.record_bytes) for _ in range(2))
        await store.reading.read(view, key, stepped)
        for number in range(3):
            await store.applies.apply(view, options, 1.0)
            zeros = PlainSegment(count).view(0, count)
            update(schema, stepped, [zeros], options=options, optimizer_step=2 + number, grad_scale=1.0, param=None, key=key)
        await store.reading.read(view, key, found)
        fields = schema.stored.header_bytes
        assert found[fields:] == stepped[fields:]
        assert (await store.reading.read(view, key, found)).version == 4

    run(scenario())


def test_a_gradient_that_a_broken_apply_never_took_is_no_gradient_of_zeros() -> None:
    async def scenario() -> None:
        machine = Machine(seed=1)
        store = machine.start()
        view = await create(store, schema=EXACT, experts=24)
        await store.evict(view, None, None)
        located = view.namespace.on_volume((0, 23))
        assert located is not None
        damage(machine, located, PART.header_bytes)
        with pytest.raises(StepFailed, match="apply on 'moe' failed"):
            await train(store, view, [(0, expert) for expert in range(1, 24)])
        with pytest.raises(StepFailed, match=r"\(0, 1\) of 'moe': an apply failed.*rollback\(\) is the way on"):
            await read(store, view, (0, 1))
        assert (await read(store, view, (0, 0)))[0] == 1, "it had none"

    run(scenario())


def test_an_open_apply_that_was_given_up_half_way_is_no_step_of_those_it_had_not_claimed() -> None:
    async def scenario(store: Store, view: View) -> None:
        claimed, other = keys_of(view)[:2]
        apply = asyncio.ensure_future(store.applies.begin(view, OPTIONS, 1.0))
        await turns()
        store.applies.push(view, [(claimed, PlainSegment(EXACT.gradient_bytes), 0)], is_last=True)
        await turns()
        with pytest.raises(StepFailed):
            store.applies.abort(view)
        with pytest.raises(StepFailed):
            await apply
        assert (await read(store, view, claimed))[0] == 3
        version, found, _ = await read(store, view, other)
        assert version == 2
        assert same(found, dense(1.0, [1.0, 0.0]))

    on_store(scenario)


def test_a_read_that_waited_while_another_writer_came_is_refused() -> None:
    async def scenario(store: Store, view: View) -> None:
        await view.namespace.writing.turn.acquire()
        late = asyncio.ensure_future(read(store, view, (0, 0)))
        await turns()
        opening = asyncio.ensure_future(store.admission.open("moe", mode="write", at=None, host_bytes=None))
        await turns()
        view.namespace.writing.turn.release()
        await opening
        with pytest.raises(WriterFenced):
            await late

    on_store(scenario)
