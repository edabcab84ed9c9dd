"""Expert keys and the set of them that a namespace has.

An expert key is the plain tuple (layer, expert): hot tables are keyed by it, so it is never wrapped in a class.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from paramstore.core.arguments import indices, text, whole_number, wrong
from paramstore.errors import ConfigError, UnknownKey

ExpertKey = tuple[int, int]
"""(layer, expert), both indices; free of ranks."""

NAME_PATTERN = re.compile(r"(?!\.+$)[A-Za-z0-9._-]{1,64}")
"""A name must not be dots alone: it may end up in a path one day."""
LAYERS_MAX = 4096
LAYER_INDEX_MAX = (1 << 31) - 1
"""Keys are stored as 32-bit numbers."""
EXPERTS_MAX = 65536
KEYS_MAX = 1 << 17
"""The most keys of a namespace: every table has a row for each, made on the event loop, and a request that names all of them is one
frame. The largest models have a fifth of that."""
RUN_KEYS = 1024
"""Keys of one run: at 0.25 us each, what a policy has counted of them is read in a quarter of a millisecond. The file of counts has
runs of so many."""


def check_name(name: str) -> str:
    """Returns `name`, if it can name a namespace; else raises ConfigError."""
    if not NAME_PATTERN.fullmatch(text("name", name)):
        raise ConfigError(f"namespace name {name!r}: use 1 to 64 of letters, digits, '.', '_' and '-', not dots alone")
    return name


@dataclass(frozen=True, slots=True)
class KeySpace:
    """The keys of one namespace: every (layer, expert) with `layer` in `layers` and 0 <= expert < `experts`."""

    layers: tuple[int, ...]
    experts: int

    @classmethod
    def of(cls, layers: int | Iterable[int], experts: int) -> KeySpace:
        """Makes a key space. layers: a count, or indices of the layers with experts. Raises ConfigError on an empty or absurd
        one."""
        if isinstance(layers, Iterable):
            found = indices("layers", layers)
        else:
            found = tuple(range(whole_number("layers", layers, most=LAYERS_MAX)))
        if not 1 <= len(found) <= LAYERS_MAX or len(set(found)) != len(found) or max(found) > LAYER_INDEX_MAX:
            raise wrong("layers", layers, f"1 to {LAYERS_MAX} distinct indices of 0 to {LAYER_INDEX_MAX}, or a count")
        experts = whole_number("experts", experts, least=1, most=EXPERTS_MAX)
        if len(found) * experts > KEYS_MAX:
            raise ConfigError(
                f"{len(found)} layers of {experts} experts are {len(found) * experts} keys, a namespace has at most {KEYS_MAX}"
            )
        return cls(layers=tuple(sorted(found)), experts=experts)

    def __len__(self) -> int:
        return len(self.layers) * self.experts

    def __iter__(self) -> Iterator[ExpertKey]:
        return ((layer, expert) for layer in self.layers for expert in range(self.experts))

    def runs(self) -> Iterator[list[ExpertKey]]:
        """Yields the keys in order, in lists of at most RUN_KEYS, each of one layer."""
        for layer in self.layers:
            for first in range(0, self.experts, RUN_KEYS):
                yield [(layer, expert) for expert in range(first, min(first + RUN_KEYS, self.experts))]

    def __contains__(self, key: object) -> bool:
        return (
            isinstance(key, tuple)
            and len(key) == 2
            and isinstance(key[1], int)
            and 0 <= key[1] < self.experts
            and key[0] in self.layers
        )

    def check(self, keys: Iterable[ExpertKey], *, namespace: str) -> None:
        """Checks that every key is in the space; raises UnknownKey naming the first that is not."""
        layers, experts = frozenset(self.layers), self.experts
        for key in keys:
            if key[0] not in layers or not 0 <= key[1] < experts:
                raise UnknownKey(
                    f"key {tuple(key)} is not in namespace {namespace!r}: layers {_span(self.layers)}, experts 0 to {experts - 1}"
                )


def _span(layers: tuple[int, ...]) -> str:
    if layers == tuple(range(layers[0], layers[-1] + 1)):
        return f"{layers[0]} to {layers[-1]}"
    return ", ".join(map(str, layers[:16])) + (", ..." if len(layers) > 16 else "")
