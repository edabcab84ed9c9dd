"""What a layer's pipeline does, as a value: into how many parts it is split, and what of them is kept for backward; and among
which pipelines a search may choose."""

from __future__ import annotations

import zlib
from dataclasses import dataclass

from paramstore.core.arguments import choice, whole_number, wrong

SPLITS = ("experts", "tokens")
REUSES = ("keep", "S1", "S2", "S3", "S4")
MOST_PARTS = 64


@dataclass(frozen=True, slots=True)
class Pipeline:
    """How the ranks split a layer's work, and what they keep of it between forward and backward: alike on all.

    parts: how many exchanges there are of each kind, one beside computing the part before: the granularity n of MPMoE. split:
    "experts": a part has some of each rank's experts, and all of their rows: no bit changes, but where a row is no multiple of 16
    bytes: the CPU's library rounds by where it begins. "tokens": it has some of each rank's tokens, as in the paper; gradients of
    weights are sums of as many partial sums, and each part leases its experts anew.
    reuse: strategy of MPMoE's table III by which memory of rows and activations is used again by other layers, parts and passes:
    - "keep": both are kept where they are.
    - "S1": both are copied to the host. "S2": rows are sent again, activations copied. "S3": rows are copied, activations computed
      again. "S4": rows are sent, and activations computed again; needs no memory of the host.
    Under hooks for saved tensors (`save_on_cpu`, a checkpoint) all is kept, as these say. host_bytes: most bytes on the host of one
    model's layers; None: no limit. Raises ConfigError.
    """

    parts: int = 1
    split: str = "experts"
    reuse: str = "keep"
    host_bytes: int | None = None

    def __post_init__(self) -> None:
        whole_number("parts", self.parts, least=1, most=MOST_PARTS)
        choice("split", self.split, SPLITS)
        choice("reuse", self.reuse, REUSES)
        if self.host_bytes is not None:
            whole_number("host_bytes", self.host_bytes)

    @property
    def is_plain(self) -> bool:
        return self.parts == 1 and self.reuse == "keep"

    @property
    def expert_parts(self) -> int:
        return self.parts if self.split == "experts" else 1

    @property
    def chunks(self) -> int:
        """How many chunks of tokens travel one after the other."""
        return self.parts if self.split == "tokens" else 1

    @property
    def sends_again(self) -> bool:
        """Whether backward sends rows again."""
        return self.reuse in ("S2", "S4")

    @property
    def copies_rows(self) -> bool:
        """Whether rows wait on the host."""
        return self.reuse in ("S1", "S3")

    @property
    def copies_activations(self) -> bool:
        """Whether activations wait on the host."""
        return self.reuse in ("S1", "S2")

    @property
    def computes_again(self) -> bool:
        """Whether backward computes activations again."""
        return self.reuse in ("S3", "S4")

    @property
    def numbers(self) -> tuple[int, int, int]:
        """What ranks compare."""
        return self.parts, SPLITS.index(self.split), REUSES.index(self.reuse)


@dataclass(frozen=True, slots=True)
class PipelineSearch:
    """Lets ranks find a layer's pipeline by themselves, for each number of rows: in its first calls they measure it in one part and
    in some, and rows between them; a model of the rest names the best, which then takes turns with one part: the clock decides.

    splits: those among which it chooses; "experts" alone changes no bit. reuses: the strategies among which it chooses, by time;
    "keep" is nearly always the quickest, so leave it out where memory is short. most_parts: the most that it tries.
    host_bytes: as of `Pipeline`; a strategy whose copies do not fit raises CapacityError when it is tried, twice: then it is left
    out. Under hooks for saved tensors, which are around on all ranks or on none, a layer has one part, and nothing is tried.

    Raises ConfigError.
    """

    splits: tuple[str, ...] = ("experts",)
    reuses: tuple[str, ...] = ("keep",)
    most_parts: int = 8
    host_bytes: int | None = None

    def __post_init__(self) -> None:
        for name, known in (("splits", SPLITS), ("reuses", REUSES)):
            given = getattr(self, name)
            for each in given if isinstance(given, tuple) else ():
                choice(f"each of {name}", each, known)
            if not isinstance(given, tuple) or not given or len(set(given)) < len(given):
                raise wrong(name, given, f"a tuple of some of {', '.join(map(repr, known))}, none of them twice")
        whole_number("most_parts", self.most_parts, least=1, most=MOST_PARTS)
        if self.host_bytes is not None:
            whole_number("host_bytes", self.host_bytes)

    @property
    def digest(self) -> int:
        """What ranks compare."""
        return zlib.crc32(repr((self.splits, self.reuses, self.most_parts)).encode())


def pipelines_of(search: PipelineSearch, parts: int) -> tuple[Pipeline, ...]:
    """Those of so many parts among which it chooses; the first one of one part is what the others stand beside."""
    splits = search.splits if parts > 1 else search.splits[:1]
    return tuple(Pipeline(parts, split, reuse, search.host_bytes) for split in splits for reuse in search.reuses)
