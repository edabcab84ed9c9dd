"""Gives the layers of a model of transformers their experts: one object for a model, one for each layer.

All layers share one schedule, which is told what each layer's gate chose and predicts the next layers by decayed counts, and one
owner of what the next layer's router guesses.
"""

# T tokens, H hidden, K experts per token
# ruff: noqa: N803, N806 - shape suffixes, as the legend says

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from paramstore.core.key import ExpertKey
from paramstore.errors import LeaseError, SchemaMismatch, StepMismatch
from paramstore_client.device.tier import DeviceTier
from paramstore_client.hf.model import module_list
from paramstore_client.hf.model.compact_buffers import CompactBuffers
from paramstore_client.hf.model.device_supply import DeviceSupply, may_supply
from paramstore_client.hf.model.dispatch import Dispatch, look_up
from paramstore_client.hf.model.early_loads import EarlyLoads
from paramstore_client.hf.model.kernels import ExpertIndex, Kernel, ModuleView
from paramstore_client.hf.model.layer_call import (
    BackwardPasses,
    ForwardSupply,
    GuardedSupply,
    LayerCall,
    LayersUnderWay,
    Supply,
    WeightsOf,
)  # fmt: skip
from paramstore_client.hf.model.lease_window import Hint
from paramstore_client.hf.model.recording import Counts, RecordedSupply, Recording
from paramstore_client.hf.model.stripping import Unpicklable
from paramstore_client.hf.model.weight_sources import CompactSupply, FieldSupply, HeldSupply, StreamedSupply, recorded_stacks
from paramstore_client.moe.kernel_order import ParallelKernel
from paramstore_client.nn.parallel import Anchor, Guard, Parallel
from paramstore_client.nn.routing import Block
from paramstore_client.nn.schedule import ExpertSchedule
from paramstore_client.nn.weight_views import in_dtype_of
from paramstore_client.source import ExpertSource

APART_BYTES = 1 << 20
"""Smaller experts are copied side by side under a graph: a copy of one costs less than its own nodes."""
WHOLE_LAYER = 0.95
"""The part of a layer's experts whose use says that the next layer will use all of its: so at most 1.06 experts are loaded for each
that is used."""


class ModelExperts:
    """Gives a model's layers their experts. Owner of the schedule and of the compact buffers.

    anchor: (layer) -> the leaf that the layer's node takes as an input; None where the experts get no gradients.
    is_poisoned: freed buffers are filled with NaN. speculates: whether routers are asked for guesses of the next layer's experts.
    is_ring: whether experts stand by turns, so that a prompt which uses a layer whole has the next one loaded whole, as ring memory
    does (SE-MoE, arXiv 2205.10034, section 3.3.2). parallel: spreads the experts over ranks; then no router is asked, as it would
    guess experts of others.
    """

    def __init__(
        self, source: ExpertSource, *, anchor: Callable[[int], Tensor | None] | None, is_poisoned: bool = False,
        speculates: bool = True, is_ring: bool = False, parallel: Parallel | None = None,
    ) -> None:  # fmt: skip
        if anchor is not None and not source.schema.is_trainable:
            raise SchemaMismatch("a param schema takes no gradients: bind the model without an anchor")
        self.source = source
        self.anchor = anchor
        self.schedule = ExpertSchedule()
        self.passes = BackwardPasses()
        self.under_way = LayersUnderWay()
        self.buffers = CompactBuffers(source.schema.part("param").fields, is_poisoned=is_poisoned)
        self.early = EarlyLoads(source)
        self.speculates = speculates and parallel is None
        self.parallel = parallel
        self.recording: Recording | None = None
        """What takes the routers' decisions down, while it is on."""
        self.is_between_steps = False
        """Whether dense weights and experts may be of two steps: nothing is computed with them then."""
        self.is_shared = False
        """Whether the model was copied: the copy has dense weights of its own, which stay where these move."""
        self._is_ring = is_ring
        self._turn = threading.RLock()
        """Whose thread computes a layer in slots: a device tier is used by one at a time."""

    @contextmanager
    def alone(self) -> Iterator[None]:
        """A block that one thread at a time goes through, where the experts are in slots. Raises what the handle's calls raise in a
        forked child, where another thread's turn would never end."""
        if not isinstance(self.source, DeviceTier):
            yield
            return
        self.source.namespace.check_usable()
        with self._turn:
            yield

    def after_forward(
        self, layer: int, dispatch: Dispatch, hidden_TH: Tensor, room: int, *, records: bool = False
    ) -> list[ExpertKey]:  # fmt: skip
        """Loads ahead, while `layer` computes its last part forward, what the next layer's router guesses, where no lease stands.
        Gives keys to fetch besides, by their use so far; without a graph only where at least half of the experts are used: such
        guesses are right as often then, and hardly ever in decoding. records: whether there is a graph, as buffers are filled
        without one."""
        by_use = self.schedule.begin_forward(layer, dispatch.experts, room=room, is_cyclic=not records)
        if not records and (whole := self._whole_layer(dispatch)):
            return whole[:room]
        by_use = by_use if records or 2 * len(dispatch.experts) >= self.source.experts else []
        following = self.schedule.following(layer)
        if following is None or following != self.schedule.expected:
            return by_use
        guessed = self.early.load(following, dispatch.guesses, hidden_TH, room=room)
        asked = set(guessed)
        return [*(key for key in by_use if key not in asked)][: max(0, room - len(guessed))]

    def ahead(
        self, layer: int, dispatch: Dispatch, hidden_TH: Tensor, found: tuple[int, int], slots: int
    ) -> list[ExpertKey]:  # fmt: skip
        """Keys to load ahead while `layer` computes, without a graph. found: what became of those that were loaded ahead of it."""
        by_use = self.after_forward(layer, dispatch, hidden_TH, max(0, slots - len(dispatch.experts)))
        whole = self._whole_layer(dispatch)  # what finds no slot now waits for those that the visit lets go
        guessed = self.early.standing(layer, None if whole else self.schedule.following(layer), hidden_TH, found)
        return whole or (by_use if guessed is None else guessed)

    def _whole_layer(self, dispatch: Dispatch) -> list[ExpertKey]:
        """All keys of the layer that comes around next in a ring, the first one after the last, where this dispatch says that it
        will be used whole; else none."""
        following, experts = self.schedule.expected, self.source.experts
        if not self._is_ring or following is None or len(dispatch.experts) < WHOLE_LAYER * experts:
            return []
        return [(following, expert) for expert in range(experts)]

    def after_backward(self, layer: int, room: int) -> list[ExpertKey]:
        """Keys to fetch while `layer` differentiates its last part."""
        return self.schedule.begin_backward(layer, room=room)


class LayerExperts(Unpicklable):
    """The experts of one layer of one model, for the module that computes with them."""

    def __init__(self, model: ModelExperts, layer: int, kernel: Kernel | None, fields: tuple[str, ...]) -> None:
        self.model = model
        self.layer = layer
        self._anchor = None if model.anchor is None else partial(model.anchor, layer)
        self._kernel = kernel
        self._fields = fields
        self._parallel: ParallelKernel | None = None
        if kernel is not None and model.parallel is not None and (rows := model.parallel.layer(model.source, layer)) is not None:
            self._parallel = ParallelKernel(rows, experts=model.source.experts, kernel=kernel.name)
        model.schedule.join(layer)

    @property
    def source(self) -> ExpertSource:
        """The source of the model's experts."""
        return self.model.source

    @property
    def early(self) -> EarlyLoads:
        """What is loaded ahead for the model, by its routers' guesses."""
        return self.model.early

    def _check_step(self) -> None:
        if self.model.is_between_steps:
            followed = "ps.hf.follow(model) takes it to the newest one, whole"
            way_on = "it was copied, so load it again" if self.model.is_shared else followed
            raise StepMismatch(
                "this model was cut off on its way to another step, so that its dense weights and its experts may be of two: "
                f"{way_on}"
            )

    def run(self, module: nn.Module, hidden_TH: Tensor, ids_TK: Tensor, gate_TK: Tensor) -> Tensor:
        """Runs the module's kernel on the tokens; returns [T, H]: transformers' contract of an experts function."""
        self._check_step()
        run = partial(self._run_here, module)
        if self._parallel is None:
            return run(hidden_TH, ids_TK, gate_TK, anchor=self._anchor)
        return self._parallel.run(hidden_TH, ids_TK, gate_TK, run, anchor=self._anchor)

    def _run_here(
        self, module: nn.Module, hidden_TH: Tensor, ids_TK: Tensor, gate_TK: Tensor, *, anchor: Anchor, guard: Guard | None = None,
        blocks: tuple[Block, ...] = (),
    ) -> Tensor:  # fmt: skip
        self.early.begin_layer(self.layer, len(hidden_TH))
        with self.model.alone():
            y_TH = self.model.under_way.compute(lambda: self._run(module, hidden_TH, ids_TK, gate_TK, anchor, guard, blocks))
        self.early.end_layer()
        return y_TH

    def _run(
        self, module: nn.Module, hidden_TH: Tensor, ids_TK: Tensor, gate_TK: Tensor, anchor: Anchor, guard: Guard | None,
        blocks: tuple[Block, ...],
    ) -> Tensor:  # fmt: skip
        early = self.model.early
        guesses_G = early.votes_on_device(self.model.schedule.following(self.layer), hidden_TH)
        dispatch = look_up(ids_TK, experts=self.model.source.experts, guesses_G=guesses_G)
        experts = dispatch.experts
        if not experts:  # no token: nothing to compute
            y_TH = hidden_TH.clone()
            # A rank without tokens takes part in what ranks do together after backward.
            leaf = anchor() if anchor is not None and torch.is_grad_enabled() else None
            return y_TH if leaf is None else y_TH + leaf
        early.judge(self.layer, experts)
        counts = [block.sources for block in blocks] or dispatch.counts
        y_TH = self._computed(module, dispatch, hidden_TH, gate_TK, anchor, guard, counts)
        if self.model.recording is not None:
            self.model.recording.keep_dispatch(self.layer, experts, counts)
        return y_TH

    def _computed(
        self, module: nn.Module, dispatch: Dispatch, hidden_TH: Tensor, gate_TK: Tensor, anchor: Anchor, guard: Guard | None,
        counts: Counts,
    ) -> Tensor:  # fmt: skip
        assert self._kernel is not None, "a registry module has a kernel"
        keys = [(self.layer, expert) for expert in dispatch.experts]
        kernel, device = self._kernel, hidden_TH.device
        is_recorded = self._may_record(kernel, device, len(keys))

        def compute(weights_of: WeightsOf) -> Tensor:
            if kernel.is_streamed:
                weights: dict[str, Any] = {field: ExpertIndex(field, weights_of) for field in self._fields}
            elif is_recorded:
                weights = self._recorded_stacks(weights_of, hidden_TH, len(keys))
            else:
                weights = dict(weights_of(None))
            placed_TK, count = on_device.placed() if on_device is not None else (dispatch.positions_TK, len(keys))
            return kernel.function(ModuleView(module, weights, count=count), hidden_TH, placed_TK, gate_TK)

        def call(supply: ForwardSupply) -> LayerCall:
            guarded = GuardedSupply(supply, guard) if guard is not None and isinstance(supply, Supply) else supply
            return LayerCall(guarded, self.model.passes, compute, anchor=anchor)

        with suppress(LeaseError):  # where others hold too much, or a loop has an order of its own, they come in parts
            while (on_device := self._on_device(dispatch, hidden_TH)) is not None:
                with suppress(torch.OutOfMemoryError):
                    return call(on_device).run((hidden_TH, gate_TK))
                on_device.shrink()  # outside of the block: the error keeps its frames' tensors
        on_device = None
        if self._may_hold(kernel, device):
            ahead = partial(self.model.ahead, self.layer, dispatch, hidden_TH)
            held = HeldSupply(
                self.model.source, keys, is_streamed=kernel.is_streamed, buffers=self.model.buffers, ahead=ahead
            )  # fmt: skip
            with suppress(LeaseError):
                return call(held).run((hidden_TH, gate_TK))
        compact = partial(CompactSupply, buffers=self.model.buffers)
        make = FieldSupply if is_recorded else StreamedSupply if kernel.is_streamed else compact
        supply = make(
            self.model.source, keys, device, forward_hint=self._forward_hint(dispatch, hidden_TH),
            backward_hint=partial(self.model.after_backward, self.layer),
        )  # fmt: skip
        return call(self._recorded(supply, dispatch.experts, counts)).run((hidden_TH, gate_TK))

    def _recorded(self, supply: Supply, experts: Iterable[int], counts: Counts) -> Supply:
        """`supply`, and while a recording is on, one that tells it of its backward. experts, counts: looked at then."""
        recording = self.model.recording
        return supply if recording is None else RecordedSupply(supply, recording, self.layer, experts, counts)

    def _on_device(self, dispatch: Dispatch, hidden_TH: Tensor) -> DeviceSupply | None:
        """The supply of a forward that can compute in the slots of a device tier."""
        tier, kernel = self.model.source, self._kernel
        assert kernel is not None, "a registry module has a kernel"
        if not isinstance(tier, DeviceTier) or not may_supply(tier, kernel, hidden_TH):
            return None
        return DeviceSupply(
            tier, self.layer, dispatch, hidden_TH, kernel=kernel, buffers=self.model.buffers,
            forward_hint=self._forward_hint(dispatch, hidden_TH),
        )  # fmt: skip

    def _may_hold(self, kernel: Kernel, device: torch.device) -> bool:
        """Whether the kernel can use the weights where they lie, in host memory."""
        is_plain = kernel.takes_apart and device.type == "cpu" and not torch.is_grad_enabled()
        return is_plain and not isinstance(self.model.source, DeviceTier)

    def _may_record(self, kernel: Kernel, device: torch.device, count: int) -> bool:
        """Whether the kernel is to use weights where they lie, in host memory, under a graph: as long as all are leased at once,
        beside as many of the next layer. Else each expert would be leased twice in a pass, for one field after the other."""
        source = self.model.source
        if not kernel.is_grouped or device.type != "cpu" or not torch.is_grad_enabled() or isinstance(source, DeviceTier):
            return False
        part = source.schema.part("param")
        is_uniform = len({field.dtype for field in part.fields}) == 1  # of several dtypes the shortest decides what is cast
        return is_uniform and part.image_bytes >= APART_BYTES and count <= source.lease_slots // 2

    def _recorded_stacks(self, weights_of: WeightsOf, x: Tensor, count: int) -> dict[str, Any]:
        stacks: Any = recorded_stacks(self.model.source.schema.part("param").fields, weights_of, count)
        return dict(in_dtype_of(x, stacks))

    def _forward_hint(self, dispatch: Dispatch, hidden_TH: Tensor) -> Hint:
        return partial(self.model.after_forward, self.layer, dispatch, hidden_TH, records=torch.is_grad_enabled())

    def run_container(self, container: nn.Module, forward: Callable[..., Tensor], arguments: Sequence[Any]) -> Tensor:
        """Runs a container's own forward on its arguments. Experts are leased one at a time, as it asks for them."""
        self._check_step()
        with self.model.alone():
            return self.model.under_way.compute(lambda: self._run_container(container, forward, arguments))

    def _run_container(self, container: nn.Module, forward: Callable[..., Tensor], arguments: Sequence[Any]) -> Tensor:
        keys: list[ExpertKey] = []  # those that forward asks for, in its order
        position_of: dict[int, int] = {}
        rows: Counter[int] = Counter()
        device = next(argument.device for argument in arguments if isinstance(argument, Tensor))
        supply = StreamedSupply(
            self.model.source, keys, device, forward_hint=_no_hint, backward_hint=_no_hint, part_size=1
        )

        def compute(weights_of: WeightsOf) -> Tensor:
            def weights_of_expert(expert: int) -> Mapping[str, Tensor]:
                if expert not in position_of:
                    position_of[expert] = len(keys)
                    keys.append((self.layer, expert))
                return weights_of(position_of[expert])

            return forward(module_list.ContainerView(container, weights_of_expert, rows), *arguments)

        inputs = [argument for argument in arguments if isinstance(argument, Tensor)]
        recorded = self._recorded(supply, rows.keys(), rows.values())
        y = LayerCall(recorded, self.model.passes, compute, anchor=self._anchor).run(inputs)
        if self.model.recording is not None and rows:
            self.model.recording.keep_dispatch(self.layer, rows.keys(), rows.values())
        return y

    def __deepcopy__(self, memo: dict[int, Any]) -> LayerExperts:
        """Returns itself: a copy of a model shares the experts."""
        self.model.is_shared = True
        return self


def _no_hint(room: int) -> list[ExpertKey]:
    return []
