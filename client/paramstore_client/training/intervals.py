"""Unions of time intervals, and how much of one lies in another."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

Interval = tuple[float, float]
"""(start, end), start <= end."""


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The union as disjoint intervals in order; those that touch become one."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def length(intervals: Sequence[Interval]) -> float:
    """Total length of disjoint intervals."""
    return sum(end - start for start, end in intervals)


def common(one: Sequence[Interval], other: Sequence[Interval]) -> list[Interval]:
    """The intersection of two unions, each disjoint and in order, as `union` gives it."""
    found: list[Interval] = []
    left = right = 0
    while left < len(one) and right < len(other):
        start, end = max(one[left][0], other[right][0]), min(one[left][1], other[right][1])
        if start < end:
            found.append((start, end))
        if one[left][1] < other[right][1]:
            left += 1
        else:
            right += 1
    return found
