"""Every public function with a table of wrong values in every parameter: the caller is told by name, and the session is as it was.

The functions are found by looking (`publics`), their parameters by their signatures. One that is new, and that the tables below
know no good value for, fails the walk.
"""

from __future__ import annotations

import collections.abc
import inspect
import math
import numbers
import os
import types
import typing
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch._subclasses import FakeTensorMode

import paramstore_client as ps
from paramstore.core.visits import Visit, VisitKind
from paramstore.testing.memory_namespace import MemoryNamespace
from paramstore_client.device.host_slots import HostSlots
from paramstore_client.handle.initialization import Initialization
from paramstore_client.source import LeaseKeeper
from paramstore_testkit.processes.daemon_process import DaemonProcess

pytestmark = pytest.mark.slow

SHAPE = (64, 64)
HELD, PENDING, NAME = (1, 3), (0, 0), "wrong"
GRADIENT = {"w": torch.ones(SHAPE)}
PACKAGES = ("paramstore_client", "paramstore.core")


class Odd:
    """An object that nothing expects."""

    def __repr__(self) -> str:
        return "<Odd>"


def spoilt(value: object) -> dict[tuple[int, int], dict[str, object]]:
    return {PENDING: {"w": value}}


@numbers.Integral.register
class OddNumber:
    """An integer by its type, which cannot say which."""

    def __index__(self) -> int:
        raise RuntimeError("no number after all")

    def __repr__(self) -> str:
        return "<OddNumber>"


with FakeTensorMode():
    FAKE, FAKE_WHOLE = torch.ones(SHAPE), torch.tensor(1)
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch says of nested tensors that they will change
    NESTED = torch.nested.nested_tensor([torch.ones(SHAPE[1])] * SHAPE[0])
    JAGGED = torch.nested.nested_tensor([torch.ones(SHAPE[1])] * SHAPE[0], layout=torch.jagged)
NO_WHOLES: dict[str, Any] = {
    "flag": True, "numpy flag": numpy.True_, "array of one": numpy.array(1), "tensor": torch.tensor(1),
    "flag tensor": torch.tensor(True), "meta tensor": torch.zeros((), device="meta", dtype=torch.int64),
    "fake tensor": FAKE_WHOLE, "odd number": OddNumber(),
}  # fmt: skip
"""What has an `__index__`, and is no whole number."""
KEEPER = HostSlots(MemoryNamespace.of_swiglu())
OPTIMIZER = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])
WRONG: dict[str, Any] = {
    "none": None, "flag": True, "negative": -1, "huge": 1 << 70, "minus huge": -(1 << 70), "half": 1.5, "nan": math.nan,
    "inf": math.inf, "number as text": "1", "text": "json", "empty text": "", "surrogate": "\ud800", "bytes": b"abc", "list": [],
    "numbers": [1, 2], "dict": {}, "options": {"lr": 1}, "words": ["a"], "pairs of text": [("a", "b")], "one of a pair": [(0,)],
    "three of a pair": [(0, 0, 0)], "half a key": [(0, 0.5)], "a huge key": [(1 << 70, 0)], "none for a key": [None],
    "object": Odd(), "class": Odd, "function": len, "complex": 1j, "tensor": torch.tensor(1.0), "tensors": torch.ones(3),
    "meta tensor": torch.ones(SHAPE, device="meta"), "numpy number": numpy.float32(1.5), "numpy whole": numpy.int64(1),
    "array": numpy.ones(3), "path": Path("a"), "optimizer": OPTIMIZER, "nested tensor": NESTED, "jagged tensor": JAGGED,
    "fake tensor": FAKE, "mkldnn tensor": torch.ones(SHAPE).to_mkldnn(),
    **{f"{what} as a number": value for what, value in NO_WHOLES.items()},
    **{f"{what} in a list": [value] for what, value in NO_WHOLES.items()},
    **{f"{what} in a key": (value, 0) for what, value in NO_WHOLES.items()},
    **{f"{what} in a visit": [(value, "routed")] for what, value in NO_WHOLES.items()},
    **{f"{what} in one of keys": [(0, value)] for what, value in NO_WHOLES.items()},
}  # fmt: skip
TENSORS: dict[str, Any] = {
    "meta": spoilt(torch.ones(SHAPE, device="meta")), "sparse": spoilt(torch.ones(SHAPE).to_sparse()),
    "shape": spoilt(torch.ones(3)), "complex": spoilt(torch.ones(SHAPE, dtype=torch.complex64)),
    "array": spoilt(numpy.ones(SHAPE)), "none": spoilt(None), "no fields": {PENDING: None},
    "field": {PENDING: {3: torch.ones(SHAPE)}}, "a key of text": {"a": GRADIENT}, "half": {(0, 0.5): GRADIENT},
    "unknown": {(9, 9): GRADIENT}, "list of fields": {PENDING: [torch.ones(SHAPE)]}, "nested": spoilt(NESTED),
    "jagged": spoilt(JAGGED), "fake": spoilt(FAKE), "mkldnn": spoilt(torch.ones(SHAPE).to_mkldnn()),
    **{f"{what} in a key": {(0, value): GRADIENT} for what, value in NO_WHOLES.items() if what != "array of one"},
}  # fmt: skip
"""Wrong values of `gradients`; of `values` what is inside them."""


class Scene:
    """A writer with a held lease and a pending gradient in a live daemon, and one of everything else that is public."""

    def __init__(self, daemon: DaemonProcess, directory: Path) -> None:
        self.address = daemon.address
        self.directory = directory
        self.number = 0
        self.unfinished: ps.Namespace | None = None
        self.store = ps.connect(self.address)
        self.spare = ps.connect(self.address)
        """One that `reconnect` may end."""
        schema = ps.adamw_schema({"w": SHAPE}, param_dtype="float32")
        with self.store.create_namespace(NAME, schema, layers=2, experts=4) as made:
            made.initialize(lambda key: {"w": torch.full(SHAPE, float(key[1]))})
            made.commit(1).wait()
        self.open()

    def open(self) -> None:
        self.ns = self.store.open_namespace(NAME, mode="write", at=1)
        self.ns.push({PENDING: GRADIENT})
        self.lease = self.ns.acquire([HELD])

    def check(self) -> None:
        """The session lives, and has what it had."""
        assert self.store.stats()["namespaces"][NAME]["broken"] is None
        assert self.lease[HELD]["w"][0, 0] == HELD[1]
        assert self.ns.pending_count == 1
        assert self.ns.gradient_norm() == 64.0

    def ring(self) -> ps.RingMemory:
        return ps.RingMemory(self.ns, 2).__enter__()

    def tier(self) -> ps.DeviceTier:
        return ps.DeviceTier(self.ns, 2, device="cpu")

    def schedule(self) -> ps.nn.ExpertSchedule:
        schedule = ps.nn.ExpertSchedule()
        schedule.join(0)
        return schedule

    def experts(self) -> ps.training.Experts:
        return ps.training.bind(torch.nn.Linear(1, 1), self.ns)

    def initialization(self) -> Initialization:
        if self.unfinished is None:
            schema = ps.adamw_schema({"w": SHAPE}, param_dtype="float32")
            self.unfinished = self.store.create_namespace("unfinished", schema, layers=2, experts=4)
        return self.unfinished.begin_initialize(resume=False)

    def other(self, kind: str) -> ps.Namespace:
        """A reader's handle of the same namespace, or a writer's of one that has no gradients."""
        if kind == "reader":
            return self.store.open_namespace(NAME)
        return self.store.create_namespace("inference", ps.param_schema({"w": (SHAPE, "float32")}), layers=2, experts=4)

    def restore(self, result: object) -> None:
        """After a call that did something: as it was."""
        if isinstance(result, ps.Ticket):
            result = settled(result)
        if inspect.isroutine(result):
            result()  # what ends a registration
        for each in result if isinstance(result, list) else [result]:
            for name in ("release", "close"):
                if hasattr(each, name) and not isinstance(each, type):
                    getattr(each, name)()
        try:
            self.check()
        except (AssertionError, ps.ParamStoreError):
            self.ns.close()
            self.open()
            self.check()

    def parameters(self) -> dict[str, Any]:
        """A good value for each parameter, by its name; where two functions mean different things, by `function.parameter`."""
        self.number += 1
        fields = {"w": SHAPE}
        return {
            "address": self.address, "autostart": False, "timeout_s": 1.0, "debug": False, "name": f"new{self.number}",
            "layers": 1, "schema": ps.param_schema({"w": ((2,), "float32")}), "experts": 1, "host_bytes": None, "rank": 0,
            "world_size": 1, "group": "", "mode": "read", "at": None, "namespace": None, "keys": [(0, 1)], "bytes_per_s": None,
            "part": "param", "deadline_s": 1.0, "key": (0, 1), "step": 1, "extra": b"", "fn": lambda *_: None, "resume": True,
            "values_in_flight": 1, "gradients": {(0, 0): GRADIENT}, "options": ps.AdamW(), "grad_scale": 1.0,
            "param_visits": (Visit(0, VisitKind.ROUTED),), "optim_visits": None, "micro_batches": 1, "resident": [(0, 0)],
            "touched": [(0, 0)], "bytes_resident": 1, "fields": fields, "param_dtype": "float32", "gradient_dtype": None,
            "updates": "touched", "state_dtype": "float32", "lr": 1e-3, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.0,
            "momentum": 0.0, "dampening": 0.0, "nesterov": False, "lr_decay": 0.0, "initial_accumulator_value": 0.0, "slots": 2,
            "device": "cpu", "experts_ahead": 1, "clock": None, "policy": "lru", "layer": 0, "expert_fn": None,
            "min_lease_slots": 0, "expert_memory": None, "residency": "auto", "dense": None, "directory": None, "cache_shape": None,
            "speculation": True, "parallel": None, "expert_parallel": None, "ExpertParallel.group": None, "placement": {},
            "ranks": ((0,),), "batches": [4, 2], "pipeline": None, "parts": 2, "split": "experts", "reuse": "S4",
            "exchange": "auto", "Pipeline.host_bytes": 1 << 20, "splits": ("experts",), "reuses": ("keep",), "most_parts": 2,
            "PipelineSearch.host_bytes": None,
            "num_embeddings": 4, "embedding_dim": 8, "padding_idx": None, "mesh": None, "embedding": torch.nn.Embedding(4, 8),
            "ColumnEmbedding.parallel": ps.moe.ExpertParallel(), "from_embedding.parallel": ps.moe.ExpertParallel(),
            "max_lease_slots": None, "heat": None, "reads": "host", "device_report.namespace": self.ns,
            "param_schema.fields": {"w": ((2,), "float32")}, "Schema.param.fields": {"w": ((2,), "float32")},
            "Schema.check_options.options": ps.AdamW(), "RingMemory.layers": None, "RingMemory.experts": [1],
            "DeviceTier.layers": None, "dtype": torch.bfloat16,
            "RingMemory.namespace": self.ns, "ExpertBuffer.namespace": self.ns, "DeviceTier.namespace": self.ns,
            "StoredExperts.namespace": self.ns,
            "StoredExperts.group": None, "bind.namespace": self.ns, "model": torch.nn.Linear(1, 1), "kind": "adamw",
            "description": ps.adamw_schema(fields).describe(), "settled_within.timeout_s": 0.0, "dir": self.directory / "new",
            "host_budget": None, "volumes": (), "add_volumes": (), "volume_size": None, "gradient_budget": None, "socket": None,
            "config": None, "settings": {}, "socket_path": self.directory / "new.sock",
            "Initialization.values": {"w": torch.ones(SHAPE)}, "end_layers.layers": [0],
            "left": 0, "beta": 0.5, "ResidentExperts.weights": [{"w": torch.ones(2)}], "room": 1, "begin_forward.experts": [0],
            "is_cyclic": False, "environment": {}, "dense_ahead": 1, "Timeline.store": self.store,
            "after": 0, "Timeline.path": self.directory / "trace.json", "optimizer": OPTIMIZER, "reduce": "mean",
            "weight_decay_of_experts": None, "Experts.group": None, "updates_in_backward": False, "clip_coef": 1.0,
            "from_config.config": SimpleNamespace(model_type="toy"), "model_class": SimpleNamespace(from_pretrained=None),
            "hf.path": self.directory, "hf.mode": "train", "hf.updates": "exact", "hf.optimizer": "adamw", "schema_options": None,
            "file": None, "how": "", "store": self.store, "experts_kernel": "auto", "progress": None, "state_dict": {},
            "keeper": KEEPER, "swiglu.weights": {"gate_up": torch.ones(4, 2), "down": torch.ones(2, 2)}, "x_tD": torch.ones(1, 2),
        }  # fmt: skip


def settled(ticket: ps.Ticket[Any]) -> object:
    """The ticket's result; None where the daemon had a reason of its own."""
    assert ticket.settled_within(5.0)
    assert not isinstance(ticket.error, ps.ProtocolError | ps.StoreUnavailable), ticket.error
    return None if ticket.error is not None else ticket.wait()


# --- what is public

MADE_BY_US = {
    "Lease", "Namespace", "Store", "Ticket", "Experts", "ExpertSentinel", "Launch", "PrefetchPlan", "ExpertLayout", "ExpertTensor",
    "Schema", "Followed", "Following", "SpeculationFigures", "Recording", "TaskRows",
}  # fmt: skip
"""Classes whose values the client gives out: nobody calls them. (A schema is made by the schema functions.)"""
FOR_US = {
    "ExpertSchedule.begin_forward", "ExpertSchedule.begin_backward", "Experts.expect_micro_batches", "Lease.make_view",
    "RingMemory.end_visit", "ServeOptions.arguments", "Ticket.settle", "Ticket.settle_error", "ServeOptions.environment",
    "DeviceTier.end_visit", "DeviceTier.skip", "ExpertBuffer.skip", "ExpertSchedule.following", "Namespace.begin_await_step",
    "Namespace.acquire_arriving", "RingMemory.acquire_arriving", "RingMemory.waiting", "ExpertBuffer.acquire_arriving",
    "ExpertBuffer.lacking", "DeviceTier.acquire_arriving", "DeviceTier.lacking", "DeviceTier.let_in", "DeviceTier.let_out",
    "ExpertParallel.layer", "ExpertParallel.mesh", "ColumnEmbedding.named_parameters", "ColumnEmbedding.named_buffers",
    "ColumnEmbedding.norm_of",
}  # fmt: skip
"""Methods that only other parts of the client call."""
NOT_LOOKED_AT = {("RingMemory", "clock"), ("launched", "environment")} | {
    (name, later) for name in ("from_pretrained", "from_config") for later in ("progress", "experts_kernel", "heat")
}
"""A test's own clock; variables, of which two are read; what is looked at once the model is known, or used for the import alone."""
VARIABLE = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
TORCHS = {"forward", "swiglu"}
"""What computes: a wrong tensor there is torch's to refuse, in torch's way."""
SUBJECTS: dict[str, Callable[[Scene], Any]] = {
    "ps": lambda scene: ps, "hf": lambda scene: ps.hf, "moe": lambda scene: ps.moe, "nn": lambda scene: ps.nn,
    "training": lambda scene: ps.training, "Store": lambda scene: scene.store,
    "ExpertParallel": lambda scene: ps.moe.ExpertParallel(), "Pipeline": lambda scene: ps.moe.Pipeline(),
    "PipelineSearch": lambda scene: ps.moe.PipelineSearch(),
    "Placement": lambda scene: ps.moe.Placement.in_order(1, 1),
    "ColumnEmbedding": lambda scene: ps.moe.ColumnEmbedding(4, 8, parallel=ps.moe.ExpertParallel()),
    "Namespace": lambda scene: scene.ns, "Lease": lambda scene: scene.lease, "Ticket": lambda scene: scene.ns.prefetch([(0, 1)]),
    "Schema": lambda scene: scene.ns.schema, "ServeOptions": lambda scene: ps.ServeOptions(),
    "RingMemory": lambda scene: scene.ring(), "DeviceTier": lambda scene: scene.tier(),
    "ExpertBuffer": lambda scene: ps.ExpertBuffer(scene.ns, 1),
    "StoredExperts": lambda scene: ps.StoredExperts(scene.ns, 0), "ExpertSchedule": lambda scene: scene.schedule(),
    "ResidentExperts": lambda scene: ps.nn.ResidentExperts([{"w": torch.ones(2)}]), "Experts": lambda scene: scene.experts(),
    "Initialization": lambda scene: scene.initialization(),
    "Timeline": lambda scene: ps.training.Timeline(scene.store, scene.directory / "t.json"),
}  # fmt: skip
"""One object of every public class, by its name, whose methods are walked."""
VALUES = {"AdamW", "SGD", "Adagrad", *MADE_BY_US} - set(SUBJECTS)
"""Classes without methods of their own that take anything."""


MODULES = {"ps": ps, "hf": ps.hf, "moe": ps.moe, "nn": ps.nn, "training": ps.training}


def owner_of(subject: str) -> Any:
    """The module or class whose functions are the subject's."""
    if subject == "Initialization":
        return Initialization
    return MODULES.get(subject) or next(getattr(module, subject) for module in MODULES.values() if hasattr(module, subject))


def is_ours(found: object) -> bool:
    return str(getattr(found, "__module__", "")).startswith(PACKAGES)


def publics() -> Iterator[tuple[str, str]]:
    """(subject, function) of every public function that takes something."""
    for subject, module in MODULES.items():
        for name in module.__all__:
            found = getattr(module, name)
            if inspect.isclass(found) and not issubclass(found, Exception):
                assert name in SUBJECTS or name in VALUES, f"say in SUBJECTS how a {name} is had"
            elif not inspect.isroutine(found):
                continue  # a module, an error, an alias
            if name not in MADE_BY_US:
                yield subject, name
    for subject in set(SUBJECTS) - set(MODULES):
        cls = owner_of(subject)
        for name in dir(cls):
            is_public = inspect.isroutine(getattr(cls, name)) and is_ours(getattr(cls, name)) and not name.startswith("_")
            if is_public and f"{subject}.{name}" not in FOR_US:
                yield subject, name


def walks() -> list[tuple[str, str, inspect.Parameter]]:
    """Every parameter of every public function."""
    found = []
    for subject, name in sorted(set(publics())):
        owner = owner_of(subject)
        function = getattr(owner, name)
        signature = inspect.signature(function)
        is_method = inspect.isfunction(function) and inspect.isclass(owner)
        for parameter in list(signature.parameters.values())[1 if is_method else 0 :]:
            if parameter.kind not in VARIABLE and (name, parameter.name) not in NOT_LOOKED_AT:
                found.append((subject, name, parameter))
    return found


WALKS = walks()


# --- whether a value is one


def fits(hint: Any, value: Any) -> bool:
    """Whether a value is of an annotated type; as far as we promise it, numbers of numpy are numbers and flags are none."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint in (Any, object) or isinstance(hint, typing.TypeVar):
        return True
    if origin in (typing.Union, types.UnionType):
        return any(fits(one, value) for one in arguments)
    if origin is typing.Literal:
        return isinstance(value, str) and value in arguments
    if hint in (None, types.NoneType):
        return value is None
    if hint is int:
        return isinstance(value, numbers.Integral) and not isinstance(value, bool | OddNumber)
    if hint is float:
        return isinstance(value, numbers.Real) and not isinstance(value, bool)
    if hint is bytes:
        return isinstance(value, bytes | bytearray | memoryview)
    if origin is collections.abc.Callable:
        return callable(value)
    if origin is tuple:
        are_alike = len(arguments) == 2 and arguments[1] is Ellipsis
        return isinstance(value, tuple | list) and all(
            fits(one, item) for one, item in zip(arguments[:1] * len(value) if are_alike else arguments, value, strict=False)
        ) and (are_alike or len(value) == len(arguments))  # fmt: skip
    if isinstance(origin, type) and issubclass(origin, collections.abc.Mapping):
        return isinstance(value, collections.abc.Mapping) and all(
            fits(arguments[0], key) and fits(arguments[1], item) for key, item in value.items()
        )
    if isinstance(origin, type) and issubclass(origin, collections.abc.Iterable):
        return is_list(value) and not isinstance(value, str | bytes) and all(
            fits(arguments[0], item) for item in value
        )  # fmt: skip
    if origin is os.PathLike:
        return isinstance(value, os.PathLike)
    return isinstance(value, hint)


def is_list(value: Any) -> bool:
    try:
        list(value)
    except (TypeError, RuntimeError):  # the latter of some tensors
        return False
    return True


def hint_of(function: Callable[..., Any], parameter: inspect.Parameter) -> Any:
    """The annotation, evaluated where it was written."""
    function = function.__init__ if inspect.isclass(function) else function  # type: ignore[misc]
    names = {**vars(inspect.getmodule(function)), "Tensor": torch.Tensor, "LeaseKeeper": LeaseKeeper}
    return eval(parameter.annotation, names) if isinstance(parameter.annotation, str) else parameter.annotation


# --- the walk


@pytest.fixture(scope="module")
def scene(daemon: DaemonProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    scene = Scene(daemon, tmp_path_factory.mktemp("walk"))
    yield scene
    scene.store.close()
    scene.spare.close()


def call(scene: Scene, subject: str, name: str, parameter: inspect.Parameter, value: object) -> object:
    """The function, with good arguments and one wrong one."""
    owner = scene.spare if name == "reconnect" else SUBJECTS[subject](scene)
    result = call_with(scene, subject, owner, name, {parameter.name: value})
    if name == "layer":
        with result:
            pass
    if name == "parts":
        list(result)
    if isinstance(result, ps.ServeOptions):
        result.socket_path()  # they are looked at where they are used
    return result


def call_with(scene: Scene, subject: str, owner: Any, name: str, special: dict[str, object]) -> Any:
    """The function of `owner`, with good arguments where there is no special one."""
    function = getattr(owner, name)
    good = scene.parameters()
    arguments: dict[str, Any] = {}
    positional = []
    for one in inspect.signature(function).parameters.values():
        if one.kind in VARIABLE:
            continue
        keys = (f"{subject}.{name}.{one.name}", f"{name}.{one.name}", f"{subject}.{one.name}", one.name)
        known = next((key for key in keys if key in good), None)
        assert known is not None, f"give Scene.parameters a good value of {one.name!r} for {subject}.{name}"
        given = special.get(one.name, good[known])
        if one.kind is one.POSITIONAL_ONLY:
            positional.append(given)
        else:
            arguments[one.name] = given
    if name in ("from_pretrained", "from_config"):
        arguments["trust_remote_code"] = True  # refused as soon as all else is right: no model is loaded
    return function(*positional, **arguments)


def is_told(error: Exception, name: str, parameter: inspect.Parameter) -> bool:
    """Whether it is an error that a caller of `name` may get, before anything was sent."""
    if name in TORCHS:
        return True
    if isinstance(error, ps.StoreUnavailable):
        return name == "connect"  # to what nobody serves
    if isinstance(error, ps.ParamStoreError):
        return not isinstance(error, ps.ProtocolError)
    return isinstance(error, TypeError | ValueError) and parameter.name in str(error)


@pytest.mark.filterwarnings("ignore:.*stores no update:UserWarning")  # a gradient is pending here on purpose
@pytest.mark.parametrize(("subject", "name", "parameter"), WALKS, ids=[f"{s}.{n}-{p.name}" for s, n, p in WALKS])
def test_a_wrong_value_is_its_callers_error_and_the_session_lives(
    subject: str, name: str, parameter: inspect.Parameter, scene: Scene
) -> None:
    hint = hint_of(getattr(SUBJECTS[subject](scene), name), parameter)
    table = {**WRONG, **(TENSORS if parameter.name == "gradients" else {})}
    if parameter.name == "values":
        table |= {what: next(iter(value.values())) for what, value in TENSORS.items()}
    complaints = []
    for what, value in table.items():
        try:
            result = call(scene, subject, name, parameter, value)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is judged
            complaints += [f"{what}: {error!r}"] if not is_told(error, name, parameter) else []
            assert scene.ns.pending_count == 1, what
        else:
            scene.restore(result)
            complaints += [] if fits(hint, value) else [f"{what}: {value!r} was taken"]
    scene.check()
    if complaints:
        pytest.fail("\n".join(complaints), pytrace=False)


WRITERS_CALLS = {
    "abort", "apply", "begin_apply", "begin_initialize", "commit", "end_layers", "finalize", "gradient_norm", "initialize",
    "prepare", "push", "reserve_room", "rollback",
}  # fmt: skip


@pytest.mark.parametrize("kind", ["reader", "inference"])
@pytest.mark.parametrize("name", sorted({name for subject, name in publics() if subject == "Namespace"}))
def test_a_call_that_a_namespace_is_not_for_is_refused_and_the_session_lives(kind: str, name: str, scene: Scene) -> None:
    refusal = None
    with scene.other(kind) as handle:
        try:
            result = call_with(scene, "Namespace", handle, name, {})
            if isinstance(result, ps.Ticket):
                settled(result)
        except ps.ParamStoreError as error:
            refusal = error
    assert not isinstance(refusal, ps.ProtocolError | ps.StoreUnavailable), refusal
    if kind == "reader":
        is_for_writers = isinstance(refusal, ps.SchemaMismatch) and "is open for reading" in str(refusal)
        assert is_for_writers == (name in WRITERS_CALLS), refusal
    scene.check()
