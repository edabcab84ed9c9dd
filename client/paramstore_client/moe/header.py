"""The header that ranks exchange before each exchange of rows: what must be alike on all of them, and how many rows go where.

Every rank sees every rank's header before a row is sent, so all raise alike where one differs or refuses. A message between two
ranks has one length, whatever they send: a backend ends the process where lengths differ.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor

from paramstore.core.placement import ranks_named
from paramstore.errors import CLASSES, ParamStoreError, StepMismatch, from_wire
from paramstore_client.moe.pipeline_plan import REUSES, SPLITS

NUMBERS = 512
"""int64 numbers of one message: a header, and as many counts of rows as fit behind it."""
TOLD_AT = 28
"""Where counts begin, or the bytes of a refusal."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
MATCHED, REFUSED = 0, 1
PHASE_AT = 2
DTYPE_AT = TOLD_AT - 1
"""Where the dtype of what a rank's experts gave is told, by its place in DTYPES; UNKNOWN where it computed nothing."""
TIMED_AT = 20
"""Where a rank tells what it has measured, up to DTYPE_AT: no other one's is like it."""
UNKNOWN = len(DTYPES)


class Phase(enum.IntEnum):
    """What a header stands before: rows on their way to their experts, what these gave on its way back, and gradients of both; or
    another placement of experts; or, before FORWARD, how many rows ranks have for experts with replicas; of a table whose columns
    are spread, ids, columns, their gradients, a norm, the whole table."""

    FORWARD = 0
    RETURN = 1
    BACKWARD = 2
    RETURN_BACKWARD = 3
    PLACE = 4
    REPLICAS = 5
    IDS = 6
    COLUMNS = 7
    COLUMNS_BACKWARD = 8
    NORM = 9
    TABLE = 10


@dataclass(frozen=True, slots=True)
class Header:
    """What must be alike on all ranks, in words that an error can use.

    phase, call: which exchange it is: of which pass, after how many calls of layers. step: the one whose experts are seen. width:
    elements of a row. slots: how many counts there are for each expert. records: whether gradients are recorded. parts, split,
    reuse: those of the `Pipeline`. search: digest of the `PipelineSearch` that chooses it, 0 without.
    """

    phase: Phase
    call: int
    layer: int
    step: int
    dtype: int
    width: int
    experts: int
    top_k: int
    slots: int
    placement: int
    records: int
    parts: int
    split: int
    reuse: int
    search: int = 0

    def numbers(self) -> list[int]:
        return [getattr(self, name) for name in NAMES]

    @classmethod
    def of(cls, numbers: Sequence[int]) -> Header:
        phase, *rest = numbers[: len(NAMES)]
        return cls(Phase(phase), *rest)


NAMES = tuple(field.name for field in fields(Header))


def messages(
    header: Header, world_size: int, *, counts: Sequence[Tensor] = (), computed: torch.dtype | None = None,
    timed: Sequence[int] = (), device: torch.device,
) -> Tensor:  # fmt: skip
    """One rank's messages, [ranks, NUMBERS]: the header, and as many of the counts for each rank as fit. computed: the dtype of
    what its experts gave. timed: what it has measured."""
    told = np.zeros((world_size, NUMBERS), dtype=np.int64)  # by numpy, whose calls take a third of torch's time on so little
    numbers = header.numbers()
    told[:, PHASE_AT : PHASE_AT + len(numbers)] = numbers
    told[:, TIMED_AT : TIMED_AT + len(timed)] = timed
    told[:, DTYPE_AT] = UNKNOWN if computed is None else DTYPES.index(computed)
    for message, fitting in zip(told, counts, strict=False):
        message[TOLD_AT : TOLD_AT + len(fitting)] = fitting.numpy()[: NUMBERS - TOLD_AT]
    return torch.from_numpy(told).to(device)


def refusal(error: BaseException, *, phase: Phase, device: torch.device) -> Tensor:
    """The message of a rank that cannot go on, to each of the others, in place of its header of `phase`."""
    text = f"{type(error).__name__}\n{error}".encode()[: 8 * (NUMBERS - TOLD_AT)]
    told = torch.zeros(NUMBERS, dtype=torch.int64)
    told[0], told[1], told[PHASE_AT] = REFUSED, len(text), phase
    told[TOLD_AT:].view(torch.uint8)[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    return told.to(device)


def phases(told: Tensor) -> set[int]:
    """The phases of which ranks tell something, a refusal too."""
    return set(told.numpy()[:, PHASE_AT].tolist())


def check_told(told: Tensor, *, this: int) -> None:
    """Raises what another rank told it cannot go on for: its error, where it is one of ours, else a ParamStoreError that names it.
    Raises StepMismatch, which names ranks and values, where headers differ. told: [ranks, NUMBERS], on the host."""
    numbers = told.numpy()[:, :TIMED_AT]
    if numbers[0, 0] == MATCHED and (numbers == numbers[0]).all():
        return
    for rank, message in enumerate(told):
        if rank != this and message[0] == REFUSED:
            raise _refused(message, rank)
    check_alike([Header.of(numbers) for numbers in told[:, PHASE_AT:TIMED_AT].tolist()])


def _refused(told: Tensor, rank: int) -> ParamStoreError:
    text = told[TOLD_AT:].view(torch.uint8)[: int(told[1])].numpy().tobytes().decode(errors="replace")
    name, _, reason = text.partition("\n")
    if name in CLASSES:
        return from_wire(name, f"rank {rank}: {reason}")
    return ParamStoreError(f"rank {rank}: {name}: {reason}")


def check_alike(headers: Sequence[Header]) -> None:
    """Raises StepMismatch, which names ranks and values, where headers differ."""
    if all(header == headers[0] for header in headers):
        return
    for name in NAMES:
        ranks: dict[int, list[int]] = {}
        for rank, header in enumerate(headers):
            ranks.setdefault(getattr(header, name), []).append(rank)
        if len(ranks) > 1:
            told = "; ".join(f"{_named(name, value)} on {ranks_named(having)}" for value, having in ranks.items())
            raise StepMismatch(f"expert-parallel ranks differ in {name}: {told}. No row was sent")


def _named(field: str, value: int) -> str:
    if field == "phase":
        return Phase(value).name.lower().replace("_", " of ")
    if field == "search":
        return "none" if value == 0 else f"{value % (1 << 32):08x}" + (", on trial" if value >> 32 else "")
    known = {"dtype": DTYPES, "split": SPLITS, "reuse": REUSES}.get(field, ())
    return str(known[value] if value < len(known) else value)
