"""A window over the experts that one pass of a layer needs: some are leased, the next ones are being fetched.

- It holds one lease, of consecutive experts, until `release` or the end of its `with`; asking for another expert moves it there.
- Keys are given in expert order. A pass visits them upwards (forward) or downwards (backward); another order is slower.
- At most half of what may be leased at once is held, so that the next part can load beside it: any number of experts runs
  through any number of slots. Where others (another thread's forward) hold too many of them, parts get smaller.
- Identities are compared with those of the first pass: backward sees the bytes that forward saw, else StepMismatch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import TracebackType

import torch
from torch import Tensor

from paramstore.core.key import ExpertKey
from paramstore.errors import LeaseError
from paramstore_client.nn.weight_views import Identities
from paramstore_client.source import ExpertSource, WeightLease, load_ahead

Hint = Callable[[int], list[ExpertKey]]
"""(slots left beside what is leased) -> keys worth prefetching; called when the last part is leased."""


class Window:
    """One pass over `keys`. A context manager; owner of the pass's lease.

    device: where the weights are needed; those leased elsewhere are copied there, expert by expert.
    part_size: experts leased together; None for half of what may be leased.
    """

    def __init__(
        self,
        source: ExpertSource,
        keys: Sequence[ExpertKey],
        identities: Identities,
        *,
        device: torch.device,
        is_upward: bool,
        hint: Hint,
        part_size: int | None = None,
    ) -> None:
        self._source = source
        self._keys = keys
        self._identities = identities
        self._device = device
        self._is_upward = is_upward
        self._hint = hint
        self._part_size = max(1, source.lease_slots // 2) if part_size is None else part_size
        self._part: range = range(0)
        self._lease: WeightLease | None = None
        self._made: dict[int, Mapping[str, Tensor]] = {}

    def weights(self, position: int) -> Mapping[str, Tensor]:
        """The tensors of `keys[position]` by field, valid until the window moves. Raises what `acquire` raises, StepMismatch."""
        if position not in self._part:
            self._move_to(position)
        made = self._made.get(position)
        if made is None:
            assert self._lease is not None, "the window has moved to the position"
            fields = self._lease[self._keys[position]]
            made = {name: fields[name].to(self._device) for name in fields}
            self._made[position] = made
        return made

    def __enter__(self) -> Window:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            if kind is None:
                self._check_used()
        finally:
            self.release()

    def release(self) -> None:
        """Gives the lease back; asking for weights takes one again."""
        self._made = {}
        self._part = range(0)
        if self._lease is not None:
            self._lease.release()  # a second call, after an interrupt, does nothing
            self._lease = None

    def _check_used(self) -> None:
        """Raises LeaseError where weights that were given out were released meanwhile, by a close on another thread."""
        for position in self._made:
            assert self._lease is not None, "weights were made of it"
            self._lease[self._keys[position]]

    def _move_to(self, position: int) -> None:
        self._check_used()
        self.release()
        while True:
            start = position - position % self._part_size
            part = range(start, min(start + self._part_size, len(self._keys)))
            keys = [self._keys[index] for index in part]
            try:
                self._lease = self._source.acquire(keys)
                break
            except LeaseError:
                if self._part_size == 1:
                    raise
                self._part_size //= 2
        self._part = part
        self._identities.check(keys, self._lease)
        self._prefetch_beside(part)

    def _prefetch_beside(self, part: range) -> None:
        """Prefetches what comes after `part`: this pass's next part, else what the hint says."""
        room = self._source.lease_slots - len(part)
        start = part.stop if self._is_upward else part.start - self._part_size
        following = range(max(start, 0), min(start + self._part_size, len(self._keys)))
        keys = [self._keys[index] for index in following][: max(room, 0)]
        load_ahead(self._source, keys or self._hint(room))
