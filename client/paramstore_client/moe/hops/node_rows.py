"""The exchange that sends each token to each node at most once, and there to the ranks that have rows of it, as `plan.SharedTokens`
and `plan.SharedRows` plan it.

Copies are made where they are needed, so rows are those of the flat exchange, bit for bit. What experts give back is not summed on
its way, as a sum elsewhere would round otherwise: it travels row by row.
"""

# T tokens, N rows of this rank's tokens, M rows that come to it, U tokens that came to it once, P local ranks, D model
# ruff: noqa: N803, N806 - shape suffixes, as the legend says

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from paramstore_client.moe.exchange import Arriving
from paramstore_client.moe.hops.choice import Crossing, ExchangeChoice
from paramstore_client.moe.hops.plan import SharedRows, SharedTokens, spread
from paramstore_client.moe.hops.two_hops import TwoHopExchange, row_bytes


class NodeRowExchange(TwoHopExchange):
    """Tokens once to each node where a choice says so; rows as `TwoHopExchange` sends them."""

    def start_tokens(
        self, x_TD: Tensor, token_N: Tensor, *, to_each: Sequence[int], from_each: Sequence[int]
    ) -> Arriving:  # fmt: skip
        choice = self.choice(x_TD.device)
        if "row_per_node" not in choice.ways:
            return super().start_tokens(x_TD, token_N, to_each=to_each, from_each=from_each)
        return self.in_turn(partial(self._sent_tokens, choice, x_TD, token_N, to_each, from_each))

    def _sent_tokens(
        self, choice: ExchangeChoice, x_TD: Tensor, token_N: Tensor, to_each: Sequence[int], from_each: Sequence[int]
    ) -> Tensor:  # fmt: skip
        shared = SharedTokens.of(self.nodes, self.rank, token_N, tokens=len(x_TD), to_each=to_each)
        told = self.told(self._telling(shared, to_each, row_bytes(x_TD)).to(x_TD.device)).cpu()
        if not choice.sends_once(Crossing(*told[:, 1:].amax(0).tolist())):
            return self.sent_rows(choice, x_TD.index_select(0, token_N), to_each, from_each)
        came_from = told[:, 0].tolist()
        place_M, is_wanted_UP = self._tables(shared, came_from, to_each=to_each, from_each=from_each)
        came_UD = self.flat.rows(x_TD.index_select(0, shared.token_U), to_each=shared.to_each, from_each=came_from)
        which, to_mates = spread(self.nodes, self.rank, is_wanted_UP)
        made = SharedRows.of(self.nodes, self.rank, place_M, from_each=from_each)
        given = self.flat.rows(came_UD.index_select(0, which), to_each=to_mates, from_each=made.from_each)
        return given.index_select(0, made.place_M)

    def _telling(self, shared: SharedTokens, to_each: Sequence[int], bytes_of_row: int) -> Tensor:
        """To each rank how many tokens it is sent once, and what `Crossing` asks of this rank."""
        mates = self.nodes.ranks[self.nodes.place(self.rank)[0]]
        rows, tokens = (sum(counts) - sum(counts[mate] for mate in mates) for counts in (to_each, shared.to_each))
        crossing = [rows * bytes_of_row, tokens * bytes_of_row, sum(to_each) * bytes_of_row]
        return torch.tensor([[count, *crossing] for count in shared.to_each])

    def _tables(
        self, shared: SharedTokens, came_from: Sequence[int], *, to_each: Sequence[int], from_each: Sequence[int]
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """The places of this rank's rows, and which ranks of this node want each token that comes to it. Each rank sends 4 bytes a
        row, and for each token a byte for each local rank."""
        width = self.nodes.width
        places = torch.split(shared.place_N.to(torch.int32).view(torch.uint8), [4 * count for count in to_each])
        flags = torch.split(shared.is_wanted_UP.flatten(), [width * count for count in shared.to_each])
        sent = torch.cat([part for parts in zip(places, flags, strict=True) for part in parts])
        told, telling = (
            [[4 * count, width * other] for count, other in zip(rows, tokens, strict=True)]
            for rows, tokens in ((from_each, came_from), (to_each, shared.to_each))
        )
        came = self.flat.rows(sent, to_each=[sum(sizes) for sizes in telling], from_each=[sum(sizes) for sizes in told])
        parts = torch.split(came, [size for sizes in told for size in sizes])
        return torch.cat(parts[::2]).view(torch.int32).long(), torch.cat(parts[1::2]).view(-1, width)
