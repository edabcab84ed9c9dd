"""Tensors of a simulated device: what torch does with CUDA tensors is queued on a stream, and its results are poison until then.

- A view touches no byte and is made at once. Every other operation is work for the current stream.
- An operation whose result the host needs (`item`, `nonzero`), and a blocking copy either way, waits for that stream, as on CUDA.
- A copy that does not block reads pinned host memory when it runs; other host operands are read when the operation is called.

Python sees a tensor on "cuda:0". torch's own code must take it for a meta tensor: a build for CPUs indexes no CUDA tensor, not even
a fake one. So name the device with its index, compute without gradients, and give a model attention "eager": torch chooses the
kernel of its fused attention by device. Memory is kept as long as the world: what an allocator does with a block that two streams
use is not simulated.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any  # torch calls a dispatch mode with whatever an operation takes

import torch
from torch import Tensor
from torch.cuda._sanitizer import zip_arguments
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map

from paramstore_testkit.streams.races import Granules, granules, granules_between
from paramstore_testkit.streams.world import StreamWorld

CUDA = torch.device("cuda", 0)
HOST = torch.device("cpu")
aten = torch.ops.aten
COPIES = (aten._to_copy.default, aten.copy_.default)
PICKS = {aten._grouped_mm.default: 1, aten.index.Tensor: 0}
UNINITIALIZED = (aten.empty.memory_format, aten.empty_strided.default, aten.new_empty.default, aten.empty_like.default)


class DeviceTensor(Tensor):
    """A tensor of the device. bytes_there: the host memory that stands for its own; it holds what has run so far."""

    bytes_there: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, bytes_there: Tensor) -> DeviceTensor:
        strides, offset, dtype = bytes_there.stride(), bytes_there.storage_offset(), bytes_there.dtype
        made: DeviceTensor = Tensor._make_wrapper_subclass(
            cls, bytes_there.shape, strides=strides, storage_offset=offset, dtype=dtype, device=torch.device("meta")
        )
        made.bytes_there = bytes_there
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, *_: Any) -> Any:
        raise RuntimeError(f"{func} on a simulated tensor outside of its world")

    def __repr__(self, **options: Any) -> str:  # type: ignore[override]
        return f"DeviceTensor({tuple(self.shape)}, {self.dtype})"

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return CUDA

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True

    def to(self, *args: Any, **kwargs: Any) -> Tensor:
        device, dtype, _, _ = torch._C._nn._parse_to(*args, **kwargs)
        is_same = (device is None or device.type == "cuda") and dtype in (None, self.dtype)
        return self if is_same else super().to(*args, **kwargs)

    def tolist(self) -> Any:
        return self.cpu().tolist()


@dataclass(slots=True, eq=False)
class Queued:
    """Work that a stream was given and that has not run. outputs: what it makes, or writes into where `makes` is false."""

    func: Any
    operands: Any
    outputs: list[Tensor]
    makes: bool


class Device(TorchDispatchMode):
    """Runs every operation inside its `with`: of host tensors at once, of device tensors in the world.

    Owner of the pinned ranges, start address -> length in bytes: host memory that copies read while they run.
    """

    def __init__(self, world: StreamWorld) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.world = world
        self.pinned: dict[int, int] = {}
        self._kept: list[Any] = []
        """Whatever the world has allocated: to the checker no address means two things."""
        self._writers: defaultdict[int, list[Queued]] = defaultdict(list)
        """Work that will write into memory, by the address where that begins."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        device = None if kwargs.get("device") is None else torch.device(kwargs["device"])
        if device in (None, HOST) and not any(isinstance(value, DeviceTensor) for value in tree_iter((args, kwargs))):
            return self._on_host(func, args, kwargs)
        if device is not None:
            kwargs["device"] = HOST
        written = _written(func, args, kwargs)
        if not written and _is_view(func):
            return tree_map(_there, func(*tree_map(_bytes, args), **tree_map(_bytes, kwargs)))
        if _needs_host(func, args):
            self._launch(func, (args, kwargs), [])
            self.world.current.synchronize()
            self._kept.append(func(*tree_map(_bytes, args), **tree_map(_bytes, kwargs)))
            return tree_map(_there, self._kept[-1])
        given = zip_arguments(func._schema, args, kwargs)
        may_return_early = any(argument.name == "non_blocking" and value for argument, value in given)
        made = self._queued(func, args, kwargs, written, reads_late=may_return_early)
        is_for_host = device == HOST or any(not isinstance(tensor, DeviceTensor) for tensor in written)
        comes_from_host = func in COPIES and any(not isinstance(tensor, DeviceTensor) for tensor in _tensors((args, kwargs)))
        if (is_for_host or comes_from_host) and not may_return_early:
            self.world.current.synchronize()
        return written[0] if written else made if is_for_host else tree_map(_there, made)

    def unpin(self, address: int) -> None:
        """Ends a range's pinning. To the checker this is a write: nothing may read the range any more."""
        memory = granules_between(address, self.pinned.pop(address))
        self.world.races.touch(reads=set(), writes=memory, operation="unpin")
        self.world.races.forget(memory)

    def _on_host(self, func: Any, args: Any, kwargs: Any) -> Any:
        is_pinned = kwargs.pop("pin_memory", None)
        written = self._pinned_granules(_written(func, args, kwargs))
        touched = written if _is_view(func) else written | self._pinned_granules(_tensors((args, kwargs)))
        if touched:
            self.world.races.touch(reads=touched, writes=written, operation=str(func))
        made = func(*args, **kwargs)
        if is_pinned:
            self._kept.append(made)
            self.pinned[made.data_ptr()] = made.nbytes
        return made

    def _pinned_granules(self, tensors: list[Tensor]) -> Granules:
        return granules([tensor for tensor in tensors if self._is_pinned(tensor)])

    def _is_pinned(self, tensor: Tensor) -> bool:
        first = tensor.data_ptr() if tensor.device == HOST else 0
        return any(start <= first and first + tensor.nbytes <= start + length for start, length in self.pinned.items())

    def _queued(self, func: Any, args: Any, kwargs: Any, written: list[Tensor], *, reads_late: bool) -> Any:
        """Queues the work. Returns what it will make, poisoned; None where it writes into tensors that there are."""

        def operand(value: Any) -> Any:
            is_host = isinstance(value, Tensor) and not isinstance(value, DeviceTensor)
            if not is_host or any(value is target for target in written) or (reads_late and self._is_pinned(value)):
                return _bytes(value)
            self._kept.append(value.clone())
            return self._kept[-1]

        operands, options = tree_map(operand, args), tree_map(operand, kwargs)
        made = None if written else tree_map(_poisoned, func(*tree_map(_shape, operands), **tree_map(_shape, options)))
        outputs = [_bytes(tensor) for tensor in written] or _tensors(made)
        self._kept += outputs
        self._launch(func, (operands, options), outputs)

        queued = Queued(func, (operands, options), outputs, makes=not written)

        def work() -> None:
            results = _tensors(_kernel(func)(*operands, **options))
            for output, result in zip(outputs, results, strict=True):
                if output is not result:
                    output.copy_(result)
                self._writers[_address(output)].remove(queued)

        if func not in UNINITIALIZED:
            for output in outputs:
                self._writers[_address(output)].append(queued)
            self.world.give(self.world.current, work)
        return made

    def _launch(self, func: Any, operands: Any, writes: list[Tensor]) -> None:
        picked = _picked_from(func, operands[0])
        reads = granules(_bytes(tensor) for tensor in _tensors(operands) if tensor is not picked)
        if picked is not None:
            reads |= granules(_bytes(picked)[row] for row in self._rows_picked(func, *operands) if row < len(picked))
        self.world.races.launch(self.world.current.number, reads=reads, writes=granules(writes), operation=str(func))

    def _rows_picked(self, func: Any, args: Any, kwargs: Any) -> Iterable[int]:
        """The rows that an operation will read; none where what tells them cannot be foreseen."""
        if func is aten.index.Tensor:
            rows = self._foreseen(_bytes(args[1][0])) if len(args[1]) == 1 and not _needs_host(func, args) else None
            return set() if rows is None else set(rows.flatten().tolist())
        ends = self._foreseen(_bytes(args[2] if len(args) > 2 else kwargs["offs"]))
        told = [] if ends is None else ends.tolist()
        return [row for row, (start, end) in enumerate(zip([0, *told], told, strict=False)) if end > start]

    def _foreseen(self, tensor: Tensor) -> Tensor | None:
        """The values of integers once all has run that was given so far; None where more than a chain of operations, each of which
        makes what the next one takes, has yet to run for them."""
        writers = self._writers.get(_address(tensor))
        if not writers:
            return tensor
        (args, kwargs), output = writers[0].operands, next(one for one in writers[0].outputs if _address(one) == _address(tensor))
        if len(writers) > 1 or not writers[0].makes or tensor.is_floating_point() or tensor.dtype != output.dtype:
            return None
        foreseen = tree_map(lambda value: self._foreseen(value) if isinstance(value, Tensor) else value, (args, kwargs))
        if len(_tensors(foreseen)) < len(_tensors((args, kwargs))):
            return None
        results = _tensors(_kernel(writers[0].func)(*foreseen[0], **foreseen[1]))
        made = torch.empty_strided(output.shape, output.stride(), dtype=output.dtype)
        made.copy_(results[[one is output for one in writers[0].outputs].index(True)])
        return made.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def peek(tensor: Tensor) -> Tensor:
    """What a tensor of a simulated device holds at this moment, as no program can look; one of another device is what it is."""
    return tensor.bytes_there if isinstance(tensor, DeviceTensor) else tensor


def poison(tensor: Tensor) -> Tensor:
    """Fills a tensor with what no computation survives: NaN, or the largest integer."""
    if tensor.is_floating_point():
        return tensor.fill_(torch.nan)
    return tensor.fill_(True if tensor.dtype is torch.bool else torch.iinfo(tensor.dtype).max)


def _address(tensor: Tensor) -> int:
    """Where the memory begins that a tensor of the host lies in."""
    return tensor.untyped_storage().data_ptr()


def _bytes(value: Any) -> Any:
    return value.bytes_there if isinstance(value, DeviceTensor) else value


def _there(value: Any) -> Any:
    return DeviceTensor(value) if isinstance(value, Tensor) else value


def _tensors(tree: Any) -> list[Tensor]:
    return [value for value in tree_iter(tree) if isinstance(value, Tensor)]


def _written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """The operands that an operation writes into."""
    given = zip_arguments(func._schema, args, kwargs)
    return _tensors([value for argument, value in given if argument.alias_info is not None and argument.alias_info.is_write])


def _is_view(func: Any) -> bool:
    return any(result.alias_info is not None and not result.alias_info.is_write for result in func._schema.returns)


def _needs_host(func: Any, args: Any) -> bool:
    """Whether the result of an operation, or its shape, depends on values: that of `index` does where an index is a mask."""
    if func in (aten.index.Tensor, aten.index_put_.default):
        return any(tensor.dtype in (torch.bool, torch.uint8) for tensor in _tensors(args[1]))
    return torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags


def _shape(value: Any) -> Any:
    """An operand without its values, for the shapes of results."""
    if isinstance(value, torch.device):
        return torch.device("meta")
    return value.to("meta") if isinstance(value, Tensor) else value


def _poisoned(value: Any) -> Any:
    return poison(torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)) if isinstance(value, Tensor) else value


def _picked_from(func: Any, args: Any) -> Tensor | None:
    """The operand of which an operation reads rows that only values tell: that of slots which lie apart, some of them under a copy
    meanwhile."""
    operand = args[PICKS[func]] if func in PICKS else None
    return None if operand is None or operand.is_contiguous() else operand


def _kernel(func: Any) -> Any:
    """What computes an operation here: `histc` of integers, which CUDA has and the CPU has not, goes by way of floats."""
    if func is not aten.histc.default:
        return func
    return lambda tensor, *args, **kwargs: func(tensor.float(), *args, **kwargs).to(tensor.dtype)
