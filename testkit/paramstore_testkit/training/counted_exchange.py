"""A flat exchange that counts what leaves its node: the bytes that a link between nodes has to carry."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from paramstore_client.moe.exchange import Arriving, FlatExchange
from paramstore_client.moe.hops.nodes import Nodes


class CountedExchange(FlatExchange):
    """nodes: set before rows are sent. crossing_bytes: of rows that were sent to ranks of other nodes."""

    nodes: Nodes
    crossing_bytes = 0

    @classmethod
    def of(cls, flat: FlatExchange, nodes: Nodes) -> CountedExchange:
        """Makes one that takes the place of `flat`."""
        made = cls.__new__(cls)
        vars(made).update(vars(flat))
        made.nodes = nodes
        return made

    def start_rows(self, sent: Tensor, *, to_each: Sequence[int], from_each: Sequence[int]) -> Arriving:
        mates = self.nodes.ranks[self.nodes.place(self.rank)[0]]
        self.crossing_bytes += (len(sent) - sum(to_each[mate] for mate in mates)) * sent[:1].nbytes
        return super().start_rows(sent, to_each=to_each, from_each=from_each)
