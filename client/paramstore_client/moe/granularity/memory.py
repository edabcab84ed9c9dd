"""A formula for the memory that one expert-parallel layer takes for a forward and its backward, from its sizes.

MPMoE has one, section III-C, eq. (5), which leaves out the gradients of weights and of gates. This one counts them, and what this
implementation makes beside them, so that it says what torch's allocator gives: `bench_moe.py --only memory` measures both. It is
for `StoredExperts` with `swiglu`, all in one dtype, and leaves out

- what is there before a forward: tokens, weights, the gradient of the output;
- what an allocator adds to what it is asked for, and copies that are made of gradients when they are pushed;
- leases: with fewer slots than twice a part's experts, fewer gradients of weights are there at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paramstore_client.moe.host_arena import buffer_bytes
from paramstore_client.moe.pipeline_plan import Pipeline

NUMBER_BYTES = 8
RANDOM_BYTES = 5056
"""Bytes of the state of torch's random numbers, of which each part that is computed again keeps one."""


@dataclass(frozen=True, slots=True)
class LayerSizes:
    """Sizes of one layer on one rank.

    rows_out: rows of its tokens, one for each expert of a token. expert_rows: rows of each expert of this rank, of all ranks'
    tokens. reads_host: experts read what waits on the host where it lies, as on the CPU; elsewhere it is copied back, part by part
    (never run on a GPU).
    """

    tokens: int
    rows_out: int
    expert_rows: tuple[int, ...]
    width: int
    inner: int
    element_bytes: int = 4
    reads_host: bool = False

    @property
    def rows_in(self) -> int:
        return sum(self.expert_rows)

    @property
    def row_bytes(self) -> int:
        """Bytes of a row as it travels."""
        return self.width * self.element_bytes

    @property
    def inner_bytes(self) -> int:
        """Bytes of a row within an expert."""
        return self.inner * self.element_bytes

    @property
    def activation_bytes(self) -> int:
        """Bytes that autograd saves of a row beside it: `gate_up` gives two inner rows, `silu` and the product one each."""
        return 4 * self.inner_bytes

    @property
    def matrix_bytes(self) -> int:
        """Bytes of the gradient of `down`; that of `gate_up` has twice as many."""
        return self.inner * self.row_bytes


@dataclass(frozen=True, slots=True)
class _Part:
    """The rows of one part. expert_rows: of each of its experts."""

    rows_out: int
    expert_rows: tuple[int, ...]

    @property
    def rows_in(self) -> int:
        return sum(self.expert_rows)

    @property
    def moved_rows(self) -> int:
        """Rows that are there while it travels, either way: as sent, and as received."""
        return self.rows_out + self.rows_in


def held_bytes(sizes: LayerSizes, pipeline: Pipeline) -> int:
    """Bytes between forward and backward: the output, the rows that came back (the gates' gradients are made of them), and what is
    kept."""
    return (sizes.tokens + sizes.rows_out) * sizes.row_bytes + _kept_bytes(sizes, pipeline)


def peak_bytes(sizes: LayerSizes, pipeline: Pipeline) -> int:
    """Most bytes at any time of a forward and its backward: the output, what is kept, and what is made in passing."""
    parts = _parts(sizes, pipeline)
    passing = [_whole_bytes(sizes)]
    for number in range(len(parts)):
        passing.append(_forward_bytes(sizes, pipeline, parts, number))
        passing.append(_backward_bytes(sizes, pipeline, parts, number))
    return sizes.tokens * sizes.row_bytes + _kept_bytes(sizes, pipeline) + max(passing)


def host_bytes(sizes: LayerSizes, pipeline: Pipeline) -> int:
    """Bytes of `HostArena`: a buffer for the rows of each part, and three for the activations of each of its experts."""
    total = 0
    for part in _parts(sizes, pipeline):
        if pipeline.copies_rows and part.rows_in:
            total += buffer_bytes(part.rows_in * sizes.row_bytes)
        if pipeline.copies_activations:
            inner = [rows * sizes.inner_bytes for rows in part.expert_rows if rows]
            total += sum(buffer_bytes(2 * each) + 2 * buffer_bytes(each) for each in inner)
    return total


def _parts(sizes: LayerSizes, pipeline: Pipeline) -> list[_Part]:
    """The parts, of experts as `Groups` cuts them, of tokens as if each had an equal share of every expert's rows."""
    count, experts = pipeline.parts, len(sizes.expert_rows)
    if pipeline.split == "tokens":
        shares = [tuple(_share(rows, part, count) for rows in sizes.expert_rows) for part in range(count)]
        return [_Part(_share(sizes.rows_out, part, count), share) for part, share in enumerate(shares)]
    cut = [sizes.expert_rows[experts * part // count : experts * (part + 1) // count] for part in range(count)]
    return [_Part(sizes.rows_out * len(held) // max(1, experts), held) for held in cut]


def _share(rows: int, part: int, parts: int) -> int:
    return rows * (part + 1) // parts - rows * part // parts


def _kept_bytes(sizes: LayerSizes, pipeline: Pipeline) -> int:
    """Bytes that are kept: the numbers of rows, in the orders in which they go and come; the gates; random numbers; and rows and
    activations, unless they are copied or had again."""
    orders = 4 if pipeline.parts == 1 else 5
    numbers = NUMBER_BYTES * (orders * sizes.rows_out + 2 * sizes.rows_in)
    gates = sizes.rows_out * sizes.element_bytes
    computed = sum(part.rows_in > 0 for part in _parts(sizes, pipeline))
    random = RANDOM_BYTES * computed if pipeline.computes_again else 0
    rows = sizes.rows_in * (sizes.row_bytes + sizes.activation_bytes) if pipeline.reuse == "keep" else 0
    return numbers + gates + random + rows


def _whole_bytes(sizes: LayerSizes) -> int:
    """Bytes of all rows at once, where they are gated and summed, and where the gradients of tokens are: rows three times, and the
    sum where a token has several."""
    sums = sizes.tokens if sizes.rows_out > sizes.tokens else 0
    return (3 * sizes.rows_out + sums) * sizes.row_bytes


def _forward_bytes(sizes: LayerSizes, pipeline: Pipeline, parts: Sequence[_Part], number: int) -> int:
    """Bytes where a part has been computed: its rows and activations, unless these are kept, and what its experts gave, one by one
    and together."""
    computed = 2 * sizes.row_bytes
    if pipeline.reuse != "keep":
        computed += sizes.row_bytes + sizes.activation_bytes
    return _travelling_bytes(sizes, parts, number, times=1) + parts[number].rows_in * computed


def _backward_bytes(sizes: LayerSizes, pipeline: Pipeline, parts: Sequence[_Part], number: int) -> int:
    """Bytes where a part is differentiated: gradients of all rows that came back, and of the part's; its rows and
    activations, unless these are kept or read on the host; and the gradients that are made."""
    times = 2 if pipeline.sends_again else 1
    output = 0 if pipeline.is_plain else sizes.rows_out * sizes.row_bytes
    row = times * sizes.row_bytes
    if pipeline.copies_rows and not sizes.reads_host:
        row += sizes.row_bytes
    if pipeline.computes_again or (pipeline.copies_activations and not sizes.reads_host):
        row += sizes.activation_bytes
    part = parts[number]
    return _travelling_bytes(sizes, parts, number, times=times) + output + part.rows_in * row + _gradient_bytes(sizes, part)


def _travelling_bytes(sizes: LayerSizes, parts: Sequence[_Part], number: int, *, times: int) -> int:
    """Bytes of what travels while a part is computed: the next part on its way there, `times` rows for each, the one before on its
    way back; and all rows, once one is in its place."""
    following = times * sum(part.moved_rows for part in parts[number + 1 : number + 2])
    before = sum(part.moved_rows for part in parts[max(0, number - 1) : number])
    placed = sizes.rows_out if number > 1 else 0
    return (following + before + placed) * sizes.row_bytes


def _gradient_bytes(sizes: LayerSizes, part: _Part) -> int:
    """Most bytes of the gradients that a part's experts make, one after the other: of weights and rows, and within an expert either
    that of what `gate_up` gives beside them, or earlier also those of `silu` and of its factor, beside the one of `down`."""
    made = most = 0
    for rows in filter(None, part.expert_rows):
        own = 3 * sizes.matrix_bytes + rows * sizes.row_bytes
        most = max(most, made + own + 2 * rows * sizes.inner_bytes, made + sizes.matrix_bytes + 4 * rows * sizes.inner_bytes)
        made += own
    return most
