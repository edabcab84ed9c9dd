"""Makes an optimizer's step the experts' step too: acts at each forward, backward and `optimizer.step()` while attached.

After a backward the experts' norm, and that of `shards`, lies in the sentinel's gradient. Whoever clips or unscales the gradients
scales it with the others; at the step the quotient of the two is the experts' coefficient, and the shards'. What is pending goes
through three states:

- *empty*: no norm is reported.
- *reported*: pending gradients have their norm in the sentinel. A backward adds and reports anew; a step applies. If the
  sentinel's gradient was dropped or zeroed, so were the dense ones, and the pending ones are dropped before anything is added.
- *stepped*: a step consumed them. The sentinel's gradient must be dropped or zeroed before the next backward or step.
"""

from __future__ import annotations

import enum
import logging
import math
import warnings
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from paramstore.errors import StepFailed, StepMismatch
from paramstore_client.training.options import MainGroup, holds_any
from paramstore_client.training.sentinel import ExpertSentinel
from paramstore_client.training.shards import HeldShards, before_step
from paramstore_client.training.updates import ExpertUpdates
from paramstore_client.training.updates_in_backward import UpdatesInBackward

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_log = logging.getLogger(__name__)


class _State(enum.Enum):
    EMPTY = enum.auto()
    REPORTED = enum.auto()
    STEPPED = enum.auto()


class Attachment:
    """One optimizer that leads the experts. Owner of the state, and of the sentinel's gradient and place in the optimizer."""

    def __init__(
        self, experts: ExpertUpdates, sentinel: ExpertSentinel, optimizer: torch.optim.Optimizer, main: MainGroup,
        early: UpdatesInBackward | None = None, shards: HeldShards | None = None,
    ) -> None:  # fmt: skip
        """early: None unless updates begin in backward. shards: those whose gradients are held; None holds none."""
        self._experts = experts
        self._module = sentinel
        self._optimizer = optimizer
        self._main = main
        self.early = early
        self._shards = shards or HeldShards(())
        self._state = _State.EMPTY
        self._norm = 0.0
        self._backwards = 0
        """Number of backwards since the last step."""
        self._report: tuple[Tensor, int] | None = None
        """The gradient as reported, and its version: clipping and zeroing in place count it up. (Unscaling does not.)"""
        self._has_another_stepped = False
        """Whether another optimizer has stepped parameters of the attached one since the last commit."""
        self._join()
        sentinel.listener = self
        noted = weakref.WeakMethod(self._note_step)
        self._removals: list[Callable[[], object]] = [
            experts.namespace.before_push(self._before_push),
            optimizer.register_step_pre_hook(self._before_step).remove,
            optimizer.register_step_post_hook(self._after_step).remove,
            optimizer.register_load_state_dict_pre_hook(self._before_load).remove,
            register_optimizer_step_post_hook(lambda stepped, *_: (note := noted()) and note(stepped)).remove,
        ]

    def remove(self) -> None:
        """Ends the attachment: the optimizer steps alone again. The sentinel stays where it is, at 0, with nothing to do."""
        if self.early is not None:
            self.early.remove()
        for removal in self._removals:
            removal()
        self._shards.give_back()
        self._module.listener = None
        self._module.sentinel.grad = None

    # --- forward and backward

    def before_forward(self) -> None:
        """Drops pending gradients whose dense siblings were dropped, or that an interrupted backward left. It is done here, where
        every rank comes by, and not before the first push, as a rank without tokens pushes nothing."""
        self._drop_if_zeroed()
        if self._state is _State.EMPTY and self._module.sentinel.grad is None and self._experts.namespace.pending_count:
            self._drop("a backward did not end, or ran in torch.autograd.grad")
        if self.early is not None:
            self.early.before_forward()

    def _before_push(self) -> None:
        self._drop_if_zeroed()
        if self.early is not None:
            self.early.before_push()

    def after_layer(self, layer: int) -> None:
        """Tells the other ranks, where updates begin in backward, that this one pushes no more gradients of `layer`."""
        if self.early is not None:
            self.early.after_layers([layer])

    def after_backward(self) -> None:
        """Reports the norm of what is pending. Raises StepMismatch where the dense gradients are of other backwards or scales."""
        self._drop_if_zeroed()
        if self._state is _State.STEPPED:
            raise StepMismatch(
                "backward after optimizer.step() without zero_grad(): the dense gradients of that step would count twice, the "
                "experts' were consumed by it; call optimizer.zero_grad() between them"
            )
        if self._state is _State.REPORTED and (coefficient := self._coefficient()) != 1.0:
            raise StepMismatch(
                f"backward after the gradients were scaled by {coefficient:g}: the experts' pending gradients were not; clip or "
                "unscale once, after the last backward before optimizer.step()"
            )
        self._norm = self._pending_norm() if self.early is None else self.early.after_backward()
        self._match_mesh()
        sentinel = self._module.sentinel.requires_grad_()  # only from now on: DDP, which was made before, must not wait for it
        gradient = _like(sentinel, self._norm)
        sentinel.grad = gradient
        self._report = gradient, _version(gradient)
        self._state = _State.REPORTED
        self._backwards += 1

    def _pending_norm(self) -> float:
        """The norm of the experts' gradients and the held ones, of all ranks."""
        held, norm = self._shards.take(), self._experts.gradient_norm()
        return math.sqrt(norm * norm + held * held) if held else norm

    # --- the optimizer

    def _before_step(self, optimizer: torch.optim.Optimizer, arguments: Any, named: dict[str, Any]) -> Any:
        return before_step(self._give_shards, arguments, named)

    def _give_shards(self) -> None:
        if self._state is _State.REPORTED and self._module.sentinel.grad is not None:
            self._shards.give(self._coefficient())

    def _after_step(self, optimizer: torch.optim.Optimizer, arguments: Any, named_arguments: Any) -> None:
        with torch.no_grad():
            self._module.sentinel.zero_()  # whatever the update made of it
        gradient = self._module.sentinel.grad
        if self._state is _State.REPORTED and gradient is None:
            self._drop("zero_grad came before optimizer.step()")
        elif self._state is _State.STEPPED and not self._is_zeroed():
            raise StepMismatch(
                "optimizer.step() twice with the same gradients: the experts' were consumed by the first; run a backward between"
            )
        elif self._state is _State.REPORTED:
            self._step(optimizer)

    def _step(self, optimizer: torch.optim.Optimizer) -> None:
        self._state = _State.STEPPED
        self._experts.expect_micro_batches(self._backwards)
        self._backwards = 0
        if self.early is not None:
            self.early.step(optimizer, is_scaled=self._coefficient() != 1.0 or self._is_scaled_in_place())
            return
        # Fused optimizers step under a GradScaler that found inf or nan, and skip inside the kernel.
        found_inf = getattr(optimizer, "found_inf", None)
        if found_inf is not None and found_inf.item() > 0:
            self._experts.abort()
            _log.info("step skipped by the GradScaler: the experts' gradients are dropped too")
            return
        coefficient = self._coefficient()
        if not math.isfinite(coefficient):
            self._experts.abort()
            raise StepFailed(
                f"the gradients were clipped by {coefficient} (the experts' norm is {self._norm:g}): one of them is not finite. "
                "The experts stay as they were, the dense weights are spoilt: load a checkpoint"
            )
        self._experts.apply(self._main.options(), clip_coef=coefficient)

    def _note_step(self, optimizer: torch.optim.Optimizer) -> None:
        if optimizer is not self._optimizer and not self._has_another_stepped:
            led = (parameter for group in self._optimizer.param_groups for parameter in group["params"])
            self._has_another_stepped = holds_any(optimizer, led)

    def before_commit(self, step: int) -> None:
        """Warns where another optimizer was stepped in place of the attached one: the experts have not trained."""
        namespace, was_stepped, self._has_another_stepped = self._experts.namespace, self._has_another_stepped, False
        if was_stepped and not namespace.uncommitted_applies:
            warnings.warn(
                f"namespace {namespace.name!r}: commit({step}) stores no update: the optimizer that made the steps is not the one "
                "that is attached. Call experts.detach(), and attach the one that steps",
                stacklevel=3,
            )

    def _before_load(self, optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any] | None:
        """Makes a place for the sentinel in a state dict that was saved without it."""
        sentinel = self._module.sentinel
        groups, saved = optimizer.param_groups, state_dict["param_groups"]
        for index, (group, saved_group) in enumerate(zip(groups, saved, strict=False)):
            position = next((place for place, param in enumerate(group["params"]) if param is sentinel), None)
            if position is not None and len(saved_group["params"]) == len(group["params"]) - 1:
                names = [name for other in saved for name in other["params"]]
                unused = max((name for name in names if isinstance(name, int)), default=-1) + 1
                params = [*saved_group["params"][:position], unused, *saved_group["params"][position:]]
                return {**state_dict, "param_groups": [*saved[:index], {**saved_group, "params": params}, *saved[index + 1 :]]}
        return None

    # --- what is pending

    def _drop_if_zeroed(self) -> None:
        if self._state is not _State.EMPTY and self._is_zeroed():
            if self._state is _State.REPORTED:
                self._drop("no optimizer.step() applied them before zero_grad")
            self._state = _State.EMPTY

    def _drop(self, reason: str) -> None:
        dropped = self._experts.abort()
        self._shards.drop()
        self._state, self._backwards = _State.EMPTY, 0
        _log.info("gradients of %d experts dropped: %s", dropped, reason)

    def _is_zeroed(self) -> bool:
        gradient = self._module.sentinel.grad
        if gradient is None:
            return True
        return self._is_touched(gradient) and self._norm != 0.0 and _value(gradient) == 0.0

    def _is_touched(self, gradient: Tensor) -> bool:
        return self._report is None or gradient is not self._report[0] or _version(gradient) != self._report[1]

    def _is_scaled_in_place(self) -> bool:
        gradient = self._module.sentinel.grad
        return gradient is not None and self._is_touched(gradient)

    def _coefficient(self) -> float:
        """The factor by which the gradients were multiplied since the report."""
        gradient, reported = self._module.sentinel.grad, _rounded(self._norm)
        if gradient is None or reported == 0.0:
            return 1.0  # a norm of 0 tells nothing, and zeros stay zeros
        if not math.isfinite(reported) and not self._is_touched(gradient):
            return 1.0  # nobody clipped: what is not finite stays where it is
        return _value(gradient) / reported

    # --- the sentinel's place

    def _join(self) -> None:
        """Puts the sentinel at the end of the optimizer's last group, unless its maker has put it in. It gets no group of its own:
        a scheduler that exists already zips the groups with the rates of those that it knows."""
        self._match_mesh()
        sentinel, groups = self._module.sentinel, self._optimizer.param_groups
        if not any(param is sentinel for group in groups for param in group["params"]):
            groups[-1]["params"].append(sentinel)
            self._begin_state(sentinel)

    def _match_mesh(self) -> None:
        """Makes the sentinel a replicated DTensor among DTensors: torch mixes them with no others. Sharding may follow `attach`."""
        mesh, sentinel = self._mesh(), self._module.sentinel
        if mesh is None or hasattr(sentinel, "device_mesh"):
            return
        from torch.distributed.tensor import DTensor, Replicate

        local = sentinel.detach().to(mesh.device_type)
        whole = DTensor.from_local(local, mesh, [Replicate()] * mesh.ndim, run_check=False)
        replicated = nn.Parameter(whole, requires_grad=sentinel.requires_grad)
        self._module.sentinel = replicated
        for group in self._optimizer.param_groups:
            group["params"] = [replicated if param is sentinel else param for param in group["params"]]
        self._optimizer.state.pop(sentinel, None)
        self._begin_state(replicated)

    def _begin_state(self, sentinel: nn.Parameter) -> None:
        """Makes the sentinel's state for Adagrad, which makes states only at its own construction and needs them at each step."""
        if isinstance(self._optimizer, torch.optim.Adagrad):
            self._optimizer.state[sentinel] = {"step": torch.tensor(0.0), "sum": torch.zeros_like(sentinel, requires_grad=False)}

    def _mesh(self) -> DeviceMesh | None:
        """The mesh of the optimizer's DTensors, if there are any; told by the attribute, as importing DTensor costs a second."""
        for group in self._optimizer.param_groups:
            for param in group["params"]:
                if param is not self._module.sentinel and (mesh := getattr(param, "device_mesh", None)) is not None:
                    return mesh  # type: ignore[no-any-return]
        return None


def _like(sentinel: Tensor, value: float) -> Tensor:
    """A gradient for the sentinel."""
    gradient = torch.zeros_like(sentinel, requires_grad=False)
    return gradient.fill_(value)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _value(gradient: Tensor) -> float:
    return float(_local(gradient).item())


def _version(gradient: Tensor) -> int:
    return int(_local(gradient)._version)


def _rounded(norm: float) -> float:
    """`norm` in fp32, as the sentinel's gradient holds it."""
    return torch.tensor(norm, dtype=torch.float32).item()
