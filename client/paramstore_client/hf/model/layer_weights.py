"""The weights of one forward of a layer where they lie, in whatever order they come; what passes by is copied but for one field.

The kernel multiplies by one field of all experts after the other. An expert that passes by is there once, in its turn: the field
that is asked for first is used then, and the others are kept as copies. So a layer of any number of experts runs through few slots.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack

import torch
from torch import Tensor

from paramstore.core.key import ExpertKey
from paramstore.core.schema import Field
from paramstore.errors import LeaseError
from paramstore_client.hf.model.compact_buffers import CompactBuffers
from paramstore_client.hf.model.kernels import ExpertStack
from paramstore_client.source import ArrivingLease

CPU = torch.device("cpu")


class LayerWeights:
    """Owner of the order in which the experts of one forward came, and of the copies of those that passed by.

    lease: of `keys`. lent: ends the use of the copies' memory. device: where the weights are.
    """

    def __init__(
        self, lease: ArrivingLease, keys: Sequence[ExpertKey], buffers: CompactBuffers, lent: ExitStack, *,
        device: torch.device = CPU,
    ) -> None:  # fmt: skip
        self.device = device
        self._lease = lease
        self._keys = keys
        self._buffers = buffers
        self._lent = lent
        self._order: list[int] = []
        self._has_come = False
        self._copies: Mapping[str, Tensor] = {}
        self._row: dict[int, int] = {}
        """position -> its row in the copies, for those that passed by"""

    def stacks(self, fields: Iterable[Field], *, ends: Sequence[int] | None = None) -> dict[str, ExpertStack]:
        """What `grouped_mm` calls a weight, for each of the fields. ends: as for an `ExpertStack`."""
        return ExpertStack.of_fields(fields, self.device, self._in_turn, ends=ends)

    def _in_turn(self, name: str) -> Iterator[tuple[int, Tensor]]:
        """Each position with its tensor of the field, those that are there first. Raises what a load raises."""
        if self._has_come:
            yield from ((position, self._tensor(position, name)) for position in self._order)
            return
        for position, fields in self._arriving(without=name):
            yield position, fields[name]

    def _tensor(self, position: int, name: str) -> Tensor:
        """The tensor of an expert that has come. Raises LeaseError where it passed by and this field of it was not kept."""
        row = self._row.get(position)
        if row is None:
            return self._lease[self._keys[position]][name]
        if name not in self._copies:
            raise LeaseError(f"{self._keys[position]} has passed by: its {name} was used in its turn, and not kept")
        return self._copies[name][row]

    def _arriving(self, *, without: str) -> Iterator[tuple[int, Mapping[str, Tensor]]]:
        """Each position with its fields, as they come; what passes by is copied after its turn, but for one field."""
        position_of = {key: position for position, key in enumerate(self._keys)}
        lease = self._lease
        if count := lease.passing_count:
            self._copies = self._lent.enter_context(self._buffers.lent(count, self.device, without=without))
        for key in lease.in_turn():
            position, fields, passes = position_of[key], lease[key], lease.passes(key)
            self._order.append(position)
            yield position, fields
            if passes:
                row = self._row[position] = len(self._row)
                for name, copies in self._copies.items():
                    copies[row].copy_(fields[name])
        self._has_come = True
