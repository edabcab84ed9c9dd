"""Makes the rows of what ranks found, beside what is asked of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from statistics import median

from paramstore.bench.pairs import Pairs
from paramstore.bench.report.rows import SUBJECT, Row, Target, judged
from paramstore_bench.moe.found import Compared
from paramstore_bench.moe.sizes import Sizes
from paramstore_bench.moe.task import Part

COUNT_TARGET = Target("ratio", "<=", 0.26)
"""On bytes of gradients, and on leases, of a step of all ranks: one rank of four has each expert, where all four had it."""
UPDATE_TARGET, STEP_TARGET = Target("ratio", ">=", 1.8), Target("ratio", ">=", 1.15)
LAYERS = {
    Part.BARE: ("transformers' all-to-all, bare", Target("ratio", ">=", 1 / 1.05)),
    Part.LOADED: ("transformers' all-to-all, as loaded", Target("ratio", ">=", 1 / 1.05)),
    Part.CAPACITY: ("fixed capacity, none dropped", Target("ratio", ">=", 3.0)),
    Part.AUTO: ("one part, the pipeline searched for", Target("ratio", ">=", 1 / 1.05)),
}
"""What one layer stands beside, and how fast it is asked to be. The first is 1.05 times the other's time at most."""
ELASTIC_TARGET = Target("ratio", ">=", 1.12)
"""MoESys has 1.18 with one task on a node."""
WITHOUT = "without expert parallelism"


def service_rows(sizes: Sizes, found: Compared) -> Iterable[Row]:
    """Makes the rows of training through a daemon."""
    case, parts = str(sizes), _parts(found)
    for name, unit, key in (("gradients pushed", "bytes a step", "pushed_bytes"), ("experts leased", "a step", "leased")):
        counts = [(pair.ours.parts[key], pair.limit.parts[key]) for pair in found.pairs.pairs]
        ratios = [mine / theirs for mine, theirs in counts]
        yield judged(
            Row(
                name=name, case=case, subject=SUBJECT, value=median(mine for mine, _ in counts), unit=unit, against=WITHOUT,
                limit=median(theirs for _, theirs in counts), ratio=median(ratios), ratio_min=min(ratios), ratio_max=max(ratios),
                target=COUNT_TARGET,
            )
        )  # fmt: skip
    update = Pairs(
        tuple(
            replace(pair, ours=replace(pair.ours, seconds=pair.ours.parts["update_s"]),
                    limit=replace(pair.limit, seconds=pair.limit.parts["update_s"])) for pair in found.pairs.pairs
        )
    )  # fmt: skip
    yield _timed("gradient norm and apply", case, update, against=WITHOUT, target=UPDATE_TARGET)
    yield _timed("training step", case, found.pairs, against=WITHOUT, target=STEP_TARGET, parts=parts)


def layer_row(part: Part, sizes: Sizes, found: Compared) -> Row:
    """Makes the row of one layer, forward and backward, beside what the part says."""
    (against, target), taken = LAYERS[part], found.pairs.parts()
    cpu = {name: taken[name] for name in ("ours_cpu_s", "limit_cpu_s")}
    return _timed("layer", str(sizes), found.pairs, against=against, target=target, parts={**cpu, **_parts(found)})


def elastic_row(sizes: Sizes, found: Compared) -> Row:
    """Makes the row of several tasks on ranks of equal shares of a processor."""
    case = f"tasks of 4 : 2 : 1 : 1, {sizes}"
    return _timed(
        "tasks spread over ranks", case, found.pairs, against="one task on each rank", target=ELASTIC_TARGET,
        parts=_parts(found), unit="samples/s a rank",
    )  # fmt: skip


def _timed(
    name: str, case: str, pairs: Pairs, *, against: str, target: Target, parts: dict[str, float] | None = None,
    unit: str = "tokens/s",
) -> Row:  # fmt: skip
    return judged(
        Row(
            name=name, case=case, subject=SUBJECT, value=pairs.rate, unit=unit, against=against, limit=pairs.limit_rate,
            ratio=pairs.ratio, ratio_min=pairs.ratio_min, ratio_max=pairs.ratio_max, target=target,
            parts={"ours_s": pairs.parts()["ours_s"], "limit_s": pairs.parts()["limit_s"], **(parts or {})},
        )
    )  # fmt: skip


def _parts(found: Compared) -> dict[str, float]:
    sides = {"ours": [pair.ours for pair in found.pairs.pairs], "limit": [pair.limit for pair in found.pairs.pairs]}
    parts = {
        f"{side}_{name}": median(sample.parts[name] for sample in samples)
        for side, samples in sides.items() for name in samples[0].parts
    }  # fmt: skip
    return {**parts, **found.facts, **{f"difference_{name}": value for name, value in found.differences.items()}}
