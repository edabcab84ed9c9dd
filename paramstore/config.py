"""Every setting of the service: unit in the name, default, and the trade-off in one sentence.

Precedence: flags, then `PARAMSTORE_*` environment variables, then the TOML file, then the defaults below. `load` is the
one place where they meet; it validates once, at start, and raises ConfigError naming the setting and where it came from.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path

import msgspec

from paramstore.errors import ConfigError

ENVIRONMENT_PREFIX = "PARAMSTORE_"
VOLUMES_SEPARATOR = re.compile(r"(?<!^pmem)(?<!:pmem):")
"""As in PATH, but the colon of `pmem:DIR` separates nothing."""
SIZE_PATTERN = re.compile(r"(\d+(?:\.\d+)?)\s*(B|KiB|MiB|GiB|TiB|KB|MB|GB|TB)?")
SIZE_UNITS = {
    "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40,
    "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
}  # fmt: skip

RETAINED_STEPS = 2
"""Newest committed steps that stay readable."""
HELD_STEPS = 2
"""Old steps that readers may keep alive beyond the retained ones."""


def parse_size(text: object) -> int:
    """Bytes in `64GiB`, `1.5MB` or a plain number. Raises ConfigError."""
    if isinstance(text, int):
        return text
    match = SIZE_PATTERN.fullmatch(text.strip()) if isinstance(text, str) else None
    if match is None:
        raise ConfigError(f"size {text!r}: write a number and one of {', '.join(SIZE_UNITS)}, as in 64GiB")
    return int(Fraction(match[1]) * SIZE_UNITS[match[2] or "B"])


def format_size(size_bytes: int) -> str:
    """`size_bytes` in the largest binary unit that keeps it at or above 1, for people."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if size_bytes >= SIZE_UNITS[unit]:
            return f"{size_bytes / SIZE_UNITS[unit]:.4g} {unit}"
    return f"{size_bytes} B"


class PolicyConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which slots go first. The parameters are those of Algorithm 2 of MoESys; `lru` takes none of them."""

    name: str = "decayed_lfu"
    """`decayed_lfu` keeps what is often used, `lru` what was used last."""
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
    """One directory per volume; records are spread over them. A path `pmem:DIR` makes a PMem volume."""
    volume_size_bytes: int | None = None
    """Size of each volume, preallocated; None grows volumes at `create_namespace`."""
    host_budget_bytes: int = 1 << 30
    """All arenas and staging, exact and enforced: more saves I/O, less leaves memory to others."""
    gradient_budget_bytes: int | None = None
    """All upload areas of the node; None allows every expert at the gradient dtype once per writing session."""
    socket: Path | None = None
    """Unix socket; its directory is 0700. None: `run/paramstore.sock` in `dir`."""
    policy: PolicyConfig = PolicyConfig()
    io_workers: int = 8
    """Threads that read and write, per volume: 2 fill a disk, the others verify meanwhile; more cost staging memory."""
    update_workers: int = 0
    """Threads that run the optimizer; 0 means one per core."""
    piece_bytes: int = 16 << 20
    """Largest single read or write: 8 MiB fill a disk, 16 save a tenth of the CPU, more only delays what is urgent."""
    wait_timeout_s: float = 60.0
    """What `timeout_s=None` means to a client."""
    shutdown_timeout_s: float = 30.0
    """How long SIGTERM lets transfers under way finish."""
    allow_buffered: bool = True
    """Fall back to the page cache, and say so, where the file system refuses O_DIRECT."""
    pmem_granularity: str = "page"
    """Smallest flush unit libpmem2 may assume: `page`, `cache_line` or `byte`; finer needs real persistent memory."""
    prefill: bool = True
    """Zero-fill new volume space in the background: never-written blocks halve the write rate."""

    @property
    def socket_path(self) -> Path:
        return self.socket if self.socket is not None else self.dir / "run" / "paramstore.sock"

    @property
    def volume_paths(self) -> tuple[Path, ...]:
        return self.volumes or (self.dir / "volume",)


SIZE_SETTINGS = ("volume_size_bytes", "host_budget_bytes", "gradient_budget_bytes", "piece_bytes")
SHORT_NAMES = {"volume_size": "volume_size_bytes", "host_budget": "host_budget_bytes", "gradient_budget": "gradient_budget_bytes"}
"""Flags and variables leave out the unit, since a size carries its own."""


def load(
    flags: Mapping[str, object] | None = None, *, environ: Mapping[str, str] | None = None, file: Path | None = None
) -> Config:
    """The settings in force. flags: only those that were given. Raises ConfigError; nothing is touched on disk."""
    variables = os.environ if environ is None else environ
    values: dict[str, object] = {}
    _overlay(values, _from_file(file), origin=str(file))
    _overlay(values, _from_environment(variables), origin="environment")
    _overlay(values, dict(flags or {}), origin="flags")
    try:
        config = msgspec.convert(values, Config, strict=False, dec_hook=_decode_path)
    except msgspec.ValidationError as error:
        raise ConfigError(f"settings: {error}") from error
    _check(config)
    return config


def _decode_path(kind: type, value: object) -> object:
    if kind is Path and isinstance(value, str | Path):
        return Path(value)
    raise TypeError(f"{value!r} is not a path")


def _overlay(values: dict[str, object], layer: Mapping[str, object], *, origin: str) -> None:
    for given, value in layer.items():
        name = SHORT_NAMES.get(given, given)
        if name not in Config.__struct_fields__:
            raise ConfigError(f"{origin}: there is no setting {given!r}; settings are {', '.join(Config.__struct_fields__)}")
        if name in SIZE_SETTINGS and value is not None:
            try:
                value = parse_size(value)
            except ConfigError as error:
                raise ConfigError(f"{origin}: {given}: {error}") from error
        before = values.get(name)
        if isinstance(before, dict) and isinstance(value, Mapping):
            value = {**before, **value}  # a table is overlaid setting by setting
        values[name] = value


def _from_file(file: Path | None) -> dict[str, object]:
    if file is None:
        return {}
    try:
        table = msgspec.toml.decode(file.read_bytes())
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"settings file {file}: {error}") from error
    return dict(table)


def _from_environment(variables: Mapping[str, str]) -> dict[str, object]:
    """`PARAMSTORE_HOST_BUDGET=4GiB`, `PARAMSTORE_POLICY__NAME=lru`; PARAMSTORE_ADDRESS is the client's."""
    table: dict[str, object] = {}
    policy: dict[str, object] = {}
    known = {*Config.__struct_fields__, *SHORT_NAMES}
    for variable, text in variables.items():
        name = variable.removeprefix(ENVIRONMENT_PREFIX).lower()
        if not variable.startswith(ENVIRONMENT_PREFIX):
            continue
        if name.startswith("policy__"):
            policy[name.removeprefix("policy__")] = text
        elif name == "volumes":
            table[name] = VOLUMES_SEPARATOR.split(text) if text else []
        elif name in known:
            table[name] = text
    if policy:
        table["policy"] = policy
    return table


def _check(config: Config) -> None:
    if config.policy.name not in ("decayed_lfu", "lru"):
        raise ConfigError(f"policy.name={config.policy.name!r}: this version has decayed_lfu and lru")
    if not 0.0 <= config.policy.beta <= 1.0 or config.policy.decay_steps < 1 or not config.policy.threshold >= 0:
        raise ConfigError(f"policy: beta must be in [0, 1], decay_steps at least 1, threshold not negative; got {config.policy}")
    if config.pmem_granularity not in ("page", "cache_line", "byte"):
        raise ConfigError(f"pmem_granularity={config.pmem_granularity!r}: use page, cache_line or byte")
    if config.piece_bytes < 1 << 20 or config.piece_bytes % (1 << 20):
        raise ConfigError(f"piece_bytes={config.piece_bytes}: use a multiple of 1 MiB")
    if not 1 <= config.io_workers <= 64 or not 0 <= config.update_workers <= 256:
        raise ConfigError(f"io_workers={config.io_workers} must be 1 to 64, update_workers={config.update_workers} 0 to 256")
    for name in ("wait_timeout_s", "shutdown_timeout_s"):
        if not getattr(config, name) > 0:
            raise ConfigError(f"{name}={getattr(config, name)}: must be above 0")
    for name in SIZE_SETTINGS:
        value = getattr(config, name)
        if value is not None and value <= 0:
            raise ConfigError(f"{name}={value}: must be above 0")
