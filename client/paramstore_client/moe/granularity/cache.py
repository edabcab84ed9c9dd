"""Numbers of rows for which a pipeline was found: MPMoE, Algorithm 1.

The paper's hash table and its set of ranges are one table here. Its listing starts the search at 2 parts, its text at 1: so does
this. It names the next smaller and the next larger known number of rows without saying so: they are read as that.
"""

from __future__ import annotations

from bisect import bisect_left

from paramstore_client.moe.pipeline_plan import Pipeline

STEPS = 8
"""Numbers of rows are told apart by so many steps between a power of two and the next."""


def rows_class(rows: int) -> int:
    """The number of rows that stands for `rows`: at most one in STEPS smaller."""
    shift = max(0, rows.bit_length() - STEPS.bit_length())
    return rows >> shift << shift


class GranularityCache:
    """Which pipeline was found for how many rows."""

    def __init__(self) -> None:
        self._rows: list[int] = []
        self._found: list[Pipeline] = []

    def known(self, rows: int) -> Pipeline | None:
        """The pipeline of that number of rows, or of the next smaller and the next larger one where they have the same."""
        floor, ceiling = self._around(rows)
        return floor if floor == ceiling else None

    def bounds(self, rows: int, *, most: int) -> tuple[int, int]:
        """The least and the most parts that are to be searched: more rows have as many parts as fewer, or more."""
        floor, ceiling = self._around(rows)
        least = 1 if floor is None else floor.parts
        return least, most if ceiling is None else max(least, ceiling.parts)

    def learn(self, rows: int, found: Pipeline) -> None:
        """Notes what was found for a number of rows that was not `known`."""
        at = bisect_left(self._rows, rows)
        self._rows.insert(at, rows)
        self._found.insert(at, found)

    def _around(self, rows: int) -> tuple[Pipeline | None, Pipeline | None]:
        at = bisect_left(self._rows, rows)
        if at < len(self._rows) and self._rows[at] == rows:
            return self._found[at], self._found[at]
        return (self._found[at - 1] if at else None), (self._found[at] if at < len(self._rows) else None)
