"""A trainer that does what its plan says and checks every answer against the model: tests kill it, or a daemon beside it.

Whatever it finds wrong is an AssertionError; a daemon that died is StoreUnavailable, as for any client.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

import paramstore_client as ps
from paramstore.core.key import ExpertKey
from paramstore_client.connection.answers import Result
from paramstore_testkit.oracles.experts import Expert, State, Tensors, check_expert
from paramstore_testkit.oracles.step_chain import StepChain
from paramstore_testkit.processes.life_plan import Operation, values_of

NAME = "moe"
SCHEMA = ps.adamw_schema({"w": (64, 64), "b": (7,)}, param_dtype="float32")
LAYERS, EXPERTS = 2, 4
LEARNING_RATE = 0.125
OPTIONS = ps.AdamW(lr=LEARNING_RATE)
FIRST_SEED = 7
FIRST_STEP = 1


def plain_rule(expert: Expert, gradients: Tensors) -> Expert:
    """Updates an expert as `plain_arithmetic.update` promises to."""
    fields: dict[str, torch.Tensor] = {}
    for name, gradient in gradients.items():
        fields[f"master/{name}"] = expert.fields[f"master/{name}"] - LEARNING_RATE * gradient
        fields[f"exp_avg/{name}"] = expert.fields[f"exp_avg/{name}"] + gradient
        fields[f"exp_avg_sq/{name}"] = torch.full_like(gradient, expert.updates + 1)
    return Expert(fields, expert.updates + 1)


def adamw_rule(expert: Expert, gradients: Tensors) -> Expert:
    """Updates an expert with torch's own AdamW."""
    return expert.after(gradients, OPTIONS)


def check_reopened(store: ps.Store, chain: StepChain, counts: Counter[str]) -> None:
    """Checks that the store came back at a step at which it may, and that every record of every step that can be opened is as it
    must be."""
    found: int | None = next((entry["committed_step"] for entry in store.namespaces() if entry["name"] == NAME), None)
    counts["reopened beyond the last acknowledged step"] += found in chain.started
    counts["reopened at the last acknowledged step, a later one started"] += bool(chain.started) and found == chain.acknowledged
    chain.reopen(found)
    if found is None:
        return
    steps = open_steps(store)
    chain.check_steps(steps)
    for step in steps:
        with store.open_namespace(NAME, at=step) as reader:
            check_records(reader, chain.states[step], step=step)
            assert reader.extra(step) == chain.extras[step], step
        counts["steps checked"] += 1
        counts["records checked"] += len(chain.states[step])


def check_records(namespace: ps.Namespace, state: State, *, step: object) -> None:
    """Checks that every record that the handle sees is as `state` has it, its `param` too."""
    for key in namespace.space:
        check_record(namespace, key, state[key], step=step)


def check_record(namespace: ps.Namespace, key: ExpertKey, expert: Expert, *, step: object) -> None:
    check_expert(namespace.read(key), expert, key=key, step=step)


def begin(chain: StepChain, operation: Operation) -> None:
    """Tells the model what a trainer is about to ask for."""
    if operation.kind == "train":
        chain.apply({key: values_of(SCHEMA, operation.seed, key) for key in operation.keys})
    elif operation.kind in ("commit", "commit_later"):
        chain.start(operation.step, operation.extra)
    elif operation.kind == "rollback":
        chain.start_rollback(operation.step)


def end(chain: StepChain, operation: Operation) -> None:
    """Tells the model what was answered."""
    if operation.kind in ("commit", "settle") and chain.started:
        chain.acknowledge(chain.started[-1])
    elif operation.kind == "rollback":
        chain.acknowledge_rollback()


def adopt(store: ps.Store, chain: StepChain) -> None:
    """Takes what the store holds for right: for a trainer that was not there before."""
    for step in open_steps(store):
        with store.open_namespace(NAME, at=step) as reader:
            chain.working = {key: _as_found(reader, key) for key in reader.space}
            chain.start(step, reader.extra(step))
        chain.acknowledge(step)


def _as_found(reader: ps.Namespace, key: ExpertKey) -> Expert:
    found = {name: tensor for name, tensor in reader.read(key).items() if "/" in name}
    return Expert(found, int(found["exp_avg_sq/w"].flatten()[0]))


def open_steps(store: ps.Store) -> list[int]:
    with store.open_namespace(NAME) as reader:
        return reader.steps()


class Trainer:
    """The writer of one life. Opening it proves that the life before counts up to its committed step and no further."""

    def __init__(self, store: ps.Store, chain: StepChain, counts: Counter[str]) -> None:
        self._store = store
        self._chain = chain
        self._counts = counts
        self._flying: list[ps.Ticket[Result]] = []
        self.namespace = self._open()

    def run(self, operation: Operation) -> None:
        """Does the operation, and tells the model before and after. Raises AssertionError, StoreUnavailable."""
        begin(self._chain, operation)
        getattr(self, f"_{operation.kind}")(operation)
        end(self._chain, operation)
        self._counts[operation.kind] += 1

    def close(self) -> None:
        """Abandons what is under way: nobody waits for it any more."""
        for ticket in self._flying:
            ticket.abandon()

    def _open(self) -> ps.Namespace:
        if self._chain.committed:
            namespace = self._store.open_namespace(NAME, mode="write")
            self._chain.reopen(namespace.committed_step)
        else:
            namespace = self._store.create_namespace(NAME, SCHEMA, layers=LAYERS, experts=EXPERTS)
            self._initialize(namespace)
        assert namespace.gradient_norm() == 0.0
        self._check_params(namespace, namespace.keys())
        return namespace

    def _initialize(self, namespace: ps.Namespace) -> None:
        values = {key: values_of(SCHEMA, FIRST_SEED, key) for key in namespace.space}
        namespace.initialize(lambda key: values[key])
        self._chain.initialize(values)
        self._chain.start(FIRST_STEP, b"")
        namespace.commit(FIRST_STEP).wait()
        self._chain.acknowledge(FIRST_STEP)

    def _check_params(self, namespace: ps.Namespace, keys: Sequence[ExpertKey]) -> None:
        """Checks that a lease of `keys`, in parts, shows the model's masters."""
        room = namespace.lease_slots
        for part in (keys[start : start + room] for start in range(0, len(keys), room)):
            with namespace.acquire(part) as lease:
                for key in part:
                    check_expert(lease[key], Expert(self._chain.working[key].masters), key=key, step="working")

    # --- what plans are made of

    def _train(self, operation: Operation) -> None:
        self.namespace.push({key: values_of(SCHEMA, operation.seed, key) for key in operation.keys})
        self._flying.append(self.namespace.apply(OPTIONS))

    def _abort(self, operation: Operation) -> None:
        gradients = {key: values_of(SCHEMA, operation.seed, key) for key in operation.keys}
        self.namespace.push(gradients)
        assert self.namespace.abort() == len(gradients)

    def _commit_later(self, operation: Operation) -> None:
        self._flying.append(self.namespace.commit(operation.step, operation.extra))

    def _settle(self, _: Operation) -> None:
        while self._flying:
            self._flying[0].wait()
            del self._flying[0]

    def _commit(self, operation: Operation) -> None:
        self._commit_later(operation)
        self._settle(operation)

    def _rollback(self, operation: Operation) -> None:
        self._settle(operation)
        self.namespace.rollback(operation.step)

    def _evict(self, operation: Operation) -> None:
        self._flying.append(self.namespace.evict(operation.keys))

    def _write_back(self, operation: Operation) -> None:
        self._flying.append(self.namespace.write_back(operation.keys))

    def _prefetch(self, operation: Operation) -> None:
        self._flying.append(self.namespace.prefetch(operation.keys))

    def _lease(self, operation: Operation) -> None:
        with self._unless_refused(operation):
            self._check_params(self.namespace, operation.keys)

    def _read(self, operation: Operation) -> None:
        key = operation.keys[0]
        with self._unless_refused(operation):
            check_record(self.namespace, key, self._chain.working[key], step="working")

    @contextmanager
    def _unless_refused(self, operation: Operation) -> Iterator[None]:
        """A context in which records must be as the model has them, unless an apply under way was refused, which it raises: a
        namespace may break between a push and its apply."""
        try:
            yield
        except AssertionError:
            self._settle(operation)
            raise

    def _reader(self, operation: Operation) -> None:
        """Reads beside the writer, in another view: it sees a committed step, never the working state."""
        with self._store.open_namespace(NAME) as reader:
            step = reader.view_step
            assert step is not None
            assert step in (self._chain.acknowledged, *self._chain.started)
            key = operation.keys[0]
            check_record(reader, key, self._chain.states[step][key], step=step)
