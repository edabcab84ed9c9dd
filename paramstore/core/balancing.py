"""How load is spread over ranks: a layer's experts by the tokens that they had, an expert's tokens over its replicas, and tasks of
different batch sizes. Every decision is a function of its arguments alone, computed in whole numbers or in sums that are rounded
once: ranks that know the same counts decide alike, whatever their processors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import fsum, lcm, sqrt
from operator import mul

from paramstore.core.placement import Placement
from paramstore.core.trace import TraceEvent, TraceEventKind
from paramstore.errors import ConfigError

History = Sequence[Sequence[int]]
"""The tokens that went to each expert of a layer, of all ranks together: a row for each batch, a column for each expert."""

AS_IT_IS = "as it is"
GREEDY = "greedy"
ANTI_CORRELATION = "anti-correlation"


@dataclass(frozen=True, slots=True)
class Choice:
    """The placement that was chosen for a layer, and why.

    name: which of `placements` was chosen: `AS_IT_IS`, `GREEDY` or `ANTI_CORRELATION`. shares: the busiest rank's share with each
    on the held-out batches; empty where there were none to judge on, and so only `AS_IT_IS` to choose.
    """

    name: str
    placements: dict[str, Placement]
    shares: dict[str, float]

    @property
    def placement(self) -> Placement:
        return self.placements[self.name]


def read_history(events: Iterable[TraceEvent], *, layer: int, experts: int) -> list[list[int]]:
    """Reads a layer's history out of a routing trace, a batch for each acquire. Where nobody counted tokens, an expert that was
    active has 1."""
    history = []
    for event in events:
        if event.kind is TraceEventKind.ACQUIRE and event.layer == layer:
            found = dict(zip(event.experts, event.tokens or [1] * len(event.experts), strict=True))
            history.append([found.get(expert, 0) for expert in range(experts)])
    return history


def busiest_share(history: History, placement: Placement) -> float:
    """The share of a batch's tokens that the busiest rank computes, as the mean over the batches that have tokens; replicas take
    equal shares, as `route_tokens` gives them. Raises ConfigError where there is no such batch."""
    whole = lcm(*map(len, placement.ranks))
    shares = []
    for batch in _with_tokens(history):
        loads = [0] * placement.world_size
        for tokens, ranks in zip(batch, placement.ranks, strict=True):
            for rank in ranks:
                loads[rank] += tokens * (whole // len(ranks))
        shares.append(max(loads) / (whole * sum(batch)))
    return fsum(shares) / len(shares)


def place_greedily(history: History, world_size: int) -> Placement:
    """Gives each expert, the most loaded first, to the rank with the least load so far that has room: each rank has as many experts
    as the others or one more.

    "Towards MoE Deployment" (arXiv 2303.06182), section VII, greedy: longest processing time first on the mean load. An expert's
    load is its share of a batch, so that a large batch counts no more than a small one. Raises ConfigError where no batch has
    tokens.
    """
    means, _ = _loads(history)
    return _place(means, world_size, lambda _, members: fsum(means[member] for member in members))


def place_anti_correlated(history: History, world_size: int) -> Placement:
    """Gives each expert, the most loaded first, to the rank whose experts have the least load and are the least active together
    with it, with room as in `place_greedily`.

    "Towards MoE Deployment" (arXiv 2303.06182), section VII, anti-correlation, whose printed weight of a rank is the sum of its
    experts' mean load + 0.5 S, S being their correlation with the new one. S is of order 1 and a load of order 1 / experts, so as
    printed the loads hardly count and the placement is no better than in order. Here S is scaled to the mean load of an expert.
    Raises ConfigError where no batch has tokens.
    """
    means, columns = _loads(history)
    units = [_unit(column, mean) for column, mean in zip(columns, means, strict=True)]
    scale = 0.5 * fsum(means) / len(means)

    def weigh(expert: int, members: list[int]) -> float:
        return fsum(means[member] + scale * fsum(map(mul, units[member], units[expert])) for member in members)

    return _place(means, world_size, weigh)


def choose_placement(history: History, current: Placement) -> Choice:
    """Chooses among `current` and the placements of `place_greedily` and `place_anti_correlated` the one whose busiest rank has
    the smallest share: both are fitted to the first half of the batches, all three are judged on the second.

    `current` stays where no other is better on the held-out half, and where fewer than two batches have tokens. The paper
    has no such choice, and its balancing can lose where the load moves on.
    """
    batches = [batch for batch in history if sum(batch)]
    if len(batches) < 2:
        return Choice(AS_IT_IS, {AS_IT_IS: current}, {})  # nothing to fit to and to judge on
    fitted, held_out = batches[: len(batches) // 2], batches[len(batches) // 2 :]
    placements = {
        AS_IT_IS: current,
        GREEDY: place_greedily(fitted, current.world_size),
        ANTI_CORRELATION: place_anti_correlated(fitted, current.world_size),
    }
    shares = {name: busiest_share(held_out, placement) for name, placement in placements.items()}
    return Choice(min(shares, key=lambda name: shares[name]), placements, shares)  # of equals the first


def route_tokens(counts: Sequence[Sequence[int]], placement: Placement) -> list[list[dict[int, int]]]:
    """Says, for each source rank and each expert, how many of the source's tokens for it go to which of the expert's ranks.

    counts: for each source rank the tokens that it has for each expert. Every token goes to one rank that has the expert. Each
    replica computes an equal share of the expert's tokens, or one token more; a source's own replica takes what it can of the
    source's tokens first. Ranks that get none are left out. Raises ConfigError.

    FlexMoE (arXiv 2304.03946), Algorithm 3, with these differences. Its line 9 as printed gives no positive number: free capacity
    is cap * n - min(cap * n, I), of a rank with n vExperts and I tokens of its own; here n is 0 or 1. cap, the mean, is rounded to
    whole tokens, up first at replicas whose own tokens fill it; so are the shares in which the rest goes to free capacity.
    """
    if len(counts) != placement.world_size or any(len(row) != placement.experts or min(row, default=0) < 0 for row in counts):
        raise ConfigError(f"counts: 0 or more of each of {placement.experts} experts from each of {placement.world_size} ranks")
    routes: list[list[dict[int, int]]] = [[] for _ in counts]
    for expert, ranks in enumerate(placement.ranks):
        for source, route in enumerate(_route_expert([row[expert] for row in counts], ranks)):
            routes[source].append(route)
    return routes


def plan_tasks(batches: Sequence[int], world_size: int) -> list[dict[int, int]]:
    """Plans how many rows of each task's batch each of its ranks takes: a heavy task has several ranks, light ones share one.

    The busiest rank has as few rows as can be, the mean rounded up; a task is cut only where it does not fit whole into what a rank
    has left, so there are fewer cuts than ranks. With few rows the last ranks may have none. Raises ConfigError.

    MoESys (arXiv 2205.10034), section 4.1, gives whole nodes to tasks; here a rank may also take the end of one task beside others
    (McNaughton's rule for machines that run parts of jobs), without which the least is not always reached.
    """
    if world_size < 1 or min(batches, default=1) < 1:
        raise ConfigError(f"tasks of {list(batches)} rows on {world_size} ranks: all of them 1 or more")
    room = -(-sum(batches) // world_size)
    plan: list[dict[int, int]] = [{} for _ in batches]
    left = list(batches)
    waiting = sorted(range(len(batches)), key=lambda task: -batches[task])
    cut: int | None = None
    for rank in range(min(world_size, sum(batches))):  # the others have none
        free = room
        while free and waiting:
            fits = (task for task in waiting if left[task] <= free or free == room)  # an empty rank takes the heaviest
            task = next(fits, waiting[0]) if cut is None else cut
            rows = plan[task][rank] = min(left[task], free)
            free -= rows
            left[task] -= rows
            cut = task if left[task] else None
            if cut is None:
                waiting.remove(task)
    return plan


def _with_tokens(history: History) -> list[Sequence[int]]:
    batches = [batch for batch in history if sum(batch)]
    if not batches:
        raise ConfigError(f"history of {len(history)} batches: none has a token, so there is no load to judge by")
    return batches


def _loads(history: History) -> tuple[list[float], list[tuple[float, ...]]]:
    """The mean share of each expert, and its share of each batch."""
    totals = [(batch, sum(batch)) for batch in _with_tokens(history)]
    columns = list(zip(*([tokens / total for tokens in batch] for batch, total in totals), strict=True))
    return [fsum(column) / len(column) for column in columns], columns


def _unit(column: Sequence[float], mean: float) -> list[float]:
    """What is left of a column without its mean, of length 1: the product of two is their correlation. 0 where all is one value."""
    if min(column) == max(column):
        return [0.0] * len(column)
    rest = [share - mean for share in column]
    length = sqrt(fsum(each * each for each in rest))
    return [each / length for each in rest]


def _place(means: Sequence[float], world_size: int, weigh: Callable[[int, list[int]], float]) -> Placement:
    """Gives the experts away, the most loaded first, each to the rank with room for which `weigh(expert, its experts)` is least."""
    size, larger = divmod(len(means), world_size)
    members: list[list[int]] = [[] for _ in range(world_size)]
    ranks = [0] * len(means)
    for expert in sorted(range(len(means)), key=lambda expert: -means[expert]):
        room = size + (sum(len(each) > size for each in members) < larger)
        chosen = min((each for each in members if len(each) < room), key=lambda each: weigh(expert, each))
        ranks[expert] = members.index(chosen)
        chosen.append(expert)
    return Placement(tuple((rank,) for rank in ranks), world_size)


def _route_expert(tokens: Sequence[int], ranks: tuple[int, ...]) -> list[dict[int, int]]:
    """Routes one expert's tokens, those of each source, to its ranks."""
    capacity, more = divmod(sum(tokens), len(ranks))
    by_need = sorted(ranks, key=lambda rank: tokens[rank] <= capacity)
    caps = {rank: capacity + (rank in by_need[:more]) for rank in ranks}
    local = {rank: min(caps[rank], tokens[rank]) for rank in ranks}
    free = {rank: caps[rank] - local[rank] for rank in ranks}
    routes = [{source: local[source]} if local.get(source) else {} for source in range(len(tokens))]
    for source, route in enumerate(routes):
        rest = tokens[source] - local.get(source, 0)
        for rank, share in _shares(rest, free).items():
            free[rank] -= share
            if share:
                route[rank] = share
    return routes


def _shares(tokens: int, free: dict[int, int]) -> dict[int, int]:
    """Shares tokens out in proportion to free capacity, which is as much in all: no rank gets more whole tokens than it has."""
    until = [0]
    for room in free.values():
        until.append(until[-1] + room)
    total = until[-1] or 1
    return {rank: tokens * end // total - tokens * start // total for rank, (start, end) in zip(free, pairwise(until), strict=True)}
