"""Every setting of the service, with its unit in the name, its default, and the trade-off in one sentence.

Precedence: flags, then `PARAMSTORE_*` environment variables, then the TOML file, then the defaults below. Only `load` combines
them; it validates once, at start, and raises ConfigError naming the setting and where it came from.
"""

from __future__ import annotations

import difflib
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from paramstore.errors import ConfigError
from paramstore.limits import HELD_STEPS, RETAINED_STEPS, STEPS_MAX
from paramstore.sizes import BARE_BYTES_MIN, format_size, parse_size

ENVIRONMENT_PREFIX = "PARAMSTORE_"
BUG_VARIABLE = "PARAMSTORE_BUG"
"""Names a bug that the tests plant (`bugs/canaries.py` of the test kit); a daemon refuses to start while it is set."""
PMEM_PREFIX = "pmem:"
"""Prefix of a volume's path that makes it a volume on persistent memory."""
VOLUMES_SEPARATOR = re.compile(r"(?<!^pmem)(?<!:pmem):")
"""Separates paths as in PATH, except that the colon of `pmem:DIR` separates nothing."""
SEGMENT_ALIGNMENT_BYTES = 2 << 20
"""Size of a huge page on x86-64, and on arm64 with 4 KiB pages. Memory is taken in multiples of it, so no budget may be smaller."""


class Retention(msgspec.Struct, frozen=True):
    """How many steps of a namespace have room: the newest `retained_steps`, and `held_steps` older ones for readers."""

    retained_steps: int = RETAINED_STEPS
    held_steps: int = HELD_STEPS


class PolicyConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of the policy, which chooses what is evicted. The parameters are of Algorithm 2 of MoESys; `lru` takes none."""

    name: str = "schedule"
    """`schedule` keeps what is needed soonest once a client declares its order of visits, and is `decayed_lfu` without;
    `decayed_lfu` keeps what is often used, `lru` what was used last."""
    threshold: float = 1.0
    """Hits below which a copy is a first-choice victim: higher forgets sooner."""
    beta: float = 0.5
    """Factor applied to every count at a decay: lower follows change sooner."""
    decay_steps: int = 64
    """K: accesses of the arena, in units of its slots, between two decays."""


class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One daemon's settings. Sizes are bytes; in a file or variable they may be written `64GiB`."""

    dir: Path = Path("paramstore-data")
    """Where catalog, lock, socket and (without `volumes`) the volume lie."""
    volumes: tuple[Path, ...] = ()
    """One directory per volume; records are spread over them. A path `pmem:DIR` makes a PMem volume. A store
    that exists takes no other."""
    add_volumes: tuple[Path, ...] = ()
    """Directories beside `volumes` that an existing store takes as new volumes, for ever; one that it has already is no error."""
    volume_size_bytes: int | None = None
    """Size of each volume, preallocated; None grows volumes at `create_namespace`."""
    host_budget_bytes: int = 1 << 30
    """All arenas and staging, exact and enforced: more saves I/O, less leaves memory to others."""
    gradient_budget_bytes: int | None = None
    """All upload areas of the node; None allows every expert at the gradient dtype once per writing session. Less saves memory and
    makes updates in backward wait; other pushes above it are refused."""
    socket: Path | None = None
    """Unix socket; its directory is made with 0700 where there is none. None: `run/paramstore.sock` in `dir`."""
    policy: PolicyConfig = PolicyConfig()
    retained_steps: int = RETAINED_STEPS
    """Newest committed steps that can be opened and rolled back to; each takes a namespace's state once on the volumes."""
    held_steps: int = HELD_STEPS
    """Older steps of readers for which room is reserved, each as large; more stay while there is room, else the oldest goes."""
    reader_slots: int | None = None
    """`param` slots of a training namespace that only readers may lease; writers may lease the others. None: a quarter of them,
    rounded down; none of fewer than 8."""
    extent_leases: int = 0
    """Extents that readers of inference namespaces may have leased at once, to read records from the volumes themselves. 0: none,
    since the descriptor that they get shows every byte of its volume."""
    io_workers: int = 8
    """Threads that read and write, per volume: 2 fill a disk, the others verify meanwhile; more cost staging memory."""
    update_workers: int = 0
    """Threads that run the optimizer; 0 means one per core."""
    piece_bytes: int = 16 << 20
    """Largest single read or write: 8 MiB fill a disk, 16 save a tenth of the CPU, more only delays what is urgent."""
    wait_timeout_s: float = 60.0
    """How long a client's call with `timeout_s=None` waits."""
    shutdown_timeout_s: float = 30.0
    """How long SIGTERM lets transfers under way finish."""
    ends_when_unused_s: float = 0.0
    """Seconds after its last session until the daemon ends, as by SIGTERM; 0: never. More finds experts in memory, less leaves
    that memory to others sooner."""
    flush_timeout_s: float = 120.0
    """How long a commit waits for a volume to take its note and flush. Beyond that the commit fails, and the volume is fenced: less
    hears of a hanging drive sooner, more bears one that is only slow."""
    allow_buffered: bool = True
    """Fall back to the page cache, and say so, where the file system refuses O_DIRECT."""
    pmem_granularity: str = "page"
    """Smallest flush unit libpmem2 may assume: `page`, `cache_line` or `byte`; finer needs real persistent memory."""
    dirty_limit_bytes: int | None = None
    """Dirty bytes of one namespace above which records are written early: a commit then waits for less, but records that are
    updated again before that commit are written twice. None: up to all of its `optim` slots."""
    volume_endurance_bytes: int | None = None
    """Bytes that may be written to the drive under each volume over its life (its data sheet's TBW); `status` tells how much of
    that is used up."""
    prefill: bool = True
    """Zero-fill new volume space in the background: never-written blocks halve the write rate."""
    scrub_days: float = 14.0
    """Everything on the volumes is read and checked once in so many days, in the background: fewer find rot sooner and read more.
    0: only what is asked for with `verify`."""

    @property
    def retention(self) -> Retention:
        return Retention(self.retained_steps, self.held_steps)

    @property
    def socket_path(self) -> Path:
        return self.socket if self.socket is not None else self.dir / "run" / "paramstore.sock"

    @property
    def volume_paths(self) -> tuple[Path, ...]:
        """The paths of all volumes: `volumes`, or the one in `dir`, and those of `add_volumes` that are not among them."""
        given = self.volumes or (self.dir / "volume",)
        places = set(map(_place, given))
        return (*given, *(path for path in self.add_volumes if _place(path) not in places))

    def adds(self, volume: Path) -> bool:
        """Whether a volume's path is one of `add_volumes`, however it is spelt."""
        return _place(volume) in map(_place, self.add_volumes)


SIZE_SETTINGS = (
    "volume_size_bytes", "host_budget_bytes", "gradient_budget_bytes", "piece_bytes", "dirty_limit_bytes", "volume_endurance_bytes",
)  # fmt: skip
SHORT_NAMES = {
    "volume_size": "volume_size_bytes", "host_budget": "host_budget_bytes", "gradient_budget": "gradient_budget_bytes",
    "dirty_limit": "dirty_limit_bytes", "volume_endurance": "volume_endurance_bytes",
}  # fmt: skip
"""Names without the unit, which flags and variables use, since a size there has a unit of its own."""
FLAGS = {
    "dir": "--dir", "volumes": "--volume", "add_volumes": "--add-volume", "volume_size": "--volume-size",
    "host_budget": "--host-budget", "gradient_budget": "--gradient-budget", "socket": "--socket", "policy.name": "--policy",
    "retained_steps": "--retained-steps", "held_steps": "--held-steps",
}  # fmt: skip
OTHER_VARIABLES = frozenset({
    "PARAMSTORE_ADDRESS", "PARAMSTORE_DEBUG",  # the client's
    "PARAMSTORE_NATIVE",  # of paramstore_native
    "PARAMSTORE_KILL_CYCLES", "PARAMSTORE_KILL_SEED",  # of the crash tests
    "PARAMSTORE_SIGNAL_TRIES", "PARAMSTORE_SIGNAL_SEED",  # of the commands' tests
})  # fmt: skip
"""Variables with our prefix that are not settings. Any other unknown one is refused, since it is most likely misspelt."""


@dataclass(frozen=True, slots=True)
class _Rule:
    """The rule for a setting: the type it is converted to, in words what it must be, and whether a converted value is that."""

    kind: object
    words: str
    holds: Callable[[Any], bool] = lambda _: True


def _between(least: int, most: int) -> _Rule:
    return _Rule(int, f"an integer from {least} to {most}", lambda value: least <= value <= most)


_BUDGET = _Rule(
    int, f"a size of at least {format_size(SEGMENT_ALIGNMENT_BYTES)}, as in 64GiB", lambda value: value >= SEGMENT_ALIGNMENT_BYTES
)
_OPTIONAL_BUDGET = _Rule(int | None, _BUDGET.words, lambda value: value is None or _BUDGET.holds(value))
_OPTIONAL_SIZE = _Rule(int | None, "a size above 0, as in 64GiB", lambda value: value is None or value > 0)
_SECONDS = _Rule(float, "a number above 0", lambda value: 0.0 < value < math.inf)
_PATHS = _Rule(tuple[Path, ...], "a list of paths, none of them empty")
_SWITCH = _Rule(bool, "true or false")
_RULES = {
    "dir": _Rule(Path, "a path, and not empty"),
    "volumes": _PATHS,
    "add_volumes": _PATHS,
    "volume_size_bytes": _OPTIONAL_SIZE,
    "host_budget_bytes": _BUDGET,
    "gradient_budget_bytes": _OPTIONAL_BUDGET,
    "socket": _Rule(Path | None, "a path, and not empty"),
    "retained_steps": _between(RETAINED_STEPS, STEPS_MAX),
    "held_steps": _between(0, STEPS_MAX),
    "reader_slots": _Rule(int | None, "an integer, at least 0", lambda value: value is None or value >= 0),
    "extent_leases": _between(0, 1 << 20),
    "io_workers": _between(1, 64),
    "update_workers": _between(0, 256),
    "piece_bytes": _Rule(int, "a multiple of 1 MiB", lambda value: value > 0 and value % (1 << 20) == 0),
    "wait_timeout_s": _SECONDS,
    "shutdown_timeout_s": _SECONDS,
    "ends_when_unused_s": _Rule(float, "a number of seconds; 0 for never", lambda value: 0.0 <= value < math.inf),
    "flush_timeout_s": _SECONDS,
    "allow_buffered": _SWITCH,
    "pmem_granularity": _Rule(str, "page, cache_line or byte", lambda value: value in ("page", "cache_line", "byte")),
    "dirty_limit_bytes": _OPTIONAL_SIZE,
    "volume_endurance_bytes": _OPTIONAL_SIZE,
    "prefill": _SWITCH,
    "scrub_days": _Rule(float, "a number of days up to 3650; 0 for never", lambda value: 0.0 <= value <= 3650.0),
    "policy.name": _Rule(str, "schedule, decayed_lfu or lru", lambda value: value in ("schedule", "decayed_lfu", "lru")),
    "policy.threshold": _Rule(float, "a number, and not negative", lambda value: 0.0 <= value < math.inf),
    "policy.beta": _Rule(float, "a number from 0 to 1", lambda value: 0.0 <= value <= 1.0),
    "policy.decay_steps": _Rule(int, "an integer, at least 1", lambda value: value >= 1),
}


@dataclass(frozen=True, slots=True)
class _Given:
    """A given value, and in words where it came from."""

    value: object
    source: str


def load(
    flags: Mapping[str, object] | None = None, *, environ: Mapping[str, str] | None = None, file: Path | None = None,
    origin: str = "flag",
) -> Config:  # fmt: skip
    """Returns the settings in force. flags: only those that were given. origin: what messages call them ("flag", "ServeOptions").

    Raises ConfigError naming setting and source; nothing is touched on disk.
    """
    variables = os.environ if environ is None else environ
    if BUG_VARIABLE in variables:
        bug = variables[BUG_VARIABLE]
        raise ConfigError(f"{BUG_VARIABLE}={bug!r} plants a bug for tests: no store is served with it, unset it")
    given = {**_from_file(file), **_from_environment(variables), **_from_flags(flags or {}, origin)}
    plain: dict[str, Any] = {}
    policy: dict[str, Any] = {}
    for name, item in given.items():
        table, _, entry = name.rpartition(".")
        (policy if table else plain)[entry] = _checked(name, item)
    return Config(**plain, policy=PolicyConfig(**policy))


def _checked(name: str, item: _Given) -> object:
    """Converts the value of setting `name` to its type. Raises ConfigError."""
    rule, value = _RULES[name], item.value
    if name in SIZE_SETTINGS and value is not None:
        try:
            value = parse_size(value)
        except ConfigError as error:
            raise ConfigError(f"{item.source}: {name}: {error}") from error
    try:
        converted: object = msgspec.convert(value, rule.kind, strict=False, dec_hook=_decode_path)
    except (msgspec.ValidationError, UnicodeEncodeError) as error:
        raise ConfigError(f"{item.source}: {name}={item.value!r}: must be {rule.words}") from error
    if not rule.holds(converted):
        is_bare = name in SIZE_SETTINGS and isinstance(item.value, int) and 0 < item.value < BARE_BYTES_MIN
        meant = f"; did you mean '{item.value}GiB'?" if is_bare else ""
        raise ConfigError(f"{item.source}: {name}={item.value!r}: must be {rule.words}{meant}")
    if rule is _PATHS:
        _check_distinct(converted, f"{item.source}: {name}")  # type: ignore[arg-type]  # its rule made it a tuple of paths
    return converted


def _check_distinct(volumes: tuple[Path, ...], source: str) -> None:
    """Raises ConfigError where two volumes would lie in one directory, however it is spelt."""
    seen: dict[str, Path] = {}
    for volume in volumes:
        if (place := _place(volume)) in seen:
            raise ConfigError(f"{source}: {seen[place]} and {volume} are one directory: each volume needs its own")
        seen[place] = volume


def volume_directory(volume: Path) -> Path:
    """The directory that a volume's path names, without the prefix of persistent memory."""
    return Path(str(volume).removeprefix(PMEM_PREFIX))


def _place(volume: Path) -> str:
    return os.path.realpath(volume_directory(volume))


def _decode_path(kind: type, value: object) -> object:
    text = os.fspath(value) if isinstance(value, str | os.PathLike) else None
    if kind is Path and isinstance(text, str) and text.removeprefix(PMEM_PREFIX).strip():
        with suppress(UnicodeEncodeError):
            os.fsencode(text)
            return Path(text)
    raise TypeError(f"{value!r} is not a path")


def _full_name(given: str, source: str) -> str:
    """Returns the full name of the setting that `given` names. Raises ConfigError if there is none."""
    name = SHORT_NAMES.get(given, given).replace("policy__", "policy.")
    if name not in _RULES:
        near = difflib.get_close_matches(name, [*SHORT_NAMES, *_RULES], n=1)
        offer = f"did you mean {near[0]!r}?" if near else f"settings are {', '.join(_RULES)}"
        raise ConfigError(f"{source}: there is no setting {given!r}; {offer}")
    return name


def _flattened(table: Mapping[str, object], source: str) -> Iterator[tuple[str, object]]:
    """Yields the entries of a table of settings, those in its table `policy` as `policy.<entry>`; a plain text there is
    `policy.name`. Raises ConfigError."""
    for name, value in table.items():
        if name != "policy":
            yield name, value
        elif isinstance(value, str):
            yield "policy.name", value
        elif isinstance(value, Mapping):
            yield from ((f"policy.{entry}", inner) for entry, inner in value.items())
        else:
            raise ConfigError(f"{source}: policy={value!r}: must be a table with name, threshold, beta or decay_steps")


def _from_flags(flags: Mapping[str, object], origin: str) -> dict[str, _Given]:
    given = {}
    for name, value in _flattened(flags, origin):
        source = f"{origin} {FLAGS[name]}" if origin == "flag" and name in FLAGS else origin
        given[_full_name(name, source)] = _Given(value, source)
    return given


def _from_file(file: Path | None) -> dict[str, _Given]:
    if file is None:
        return {}
    source = f"settings file {file}"
    try:
        table = msgspec.toml.decode(file.read_bytes())
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{source}: {error}") from error
    return {_full_name(name, source): _Given(value, source) for name, value in _flattened(table, source)}


def _from_environment(variables: Mapping[str, str]) -> dict[str, _Given]:
    """Reads settings from variables such as `PARAMSTORE_HOST_BUDGET=4GiB`, `PARAMSTORE_POLICY__NAME=lru`."""
    given = {}
    for variable, text in variables.items():
        if variable.startswith(ENVIRONMENT_PREFIX) and variable not in OTHER_VARIABLES:
            source = f"variable {variable}"
            ((name, value),) = _flattened({variable.removeprefix(ENVIRONMENT_PREFIX).lower(): text}, source)
            full_name = _full_name(name, source)
            if _RULES[full_name] is _PATHS:
                value = VOLUMES_SEPARATOR.split(text) if text else []
            given[full_name] = _Given(value, source)
    return given
