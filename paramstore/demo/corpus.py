"""A reproducible byte-level corpus made of the files of installed packages: four domains, cached.

- The same recipe over the same package versions gives the same bytes: files are taken in the order of the hash of their
  name, so that any prefix is a fair sample, and duplicates are dropped.
- Whole files are held out for validation, chosen by the same hash: no file has bytes on both sides.
- The cache counts only if its manifest names this recipe, these versions and the checksums of the bytes found.

Raw sources are used as they are; docstrings, the one domain that must be parsed (3 MB/s), are the smallest share.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import sysconfig
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from paramstore.errors import ConfigError

RECIPE_VERSION = 1
"""Version of the recipe: goes up with each change here that changes the bytes, so that no older cache is taken for this one."""
STDLIB = "python"
FILE_BYTES_MAX = 256 << 10
"""Most bytes of a file that is used: longer ones are mostly generated tables."""
HELD_OUT_PER_256 = 13
"""Share of held-out files, in 256ths (5 %): those whose name's hash ends in a byte below this."""
SEPARATOR = b"\n\n\n"
MANIFEST = "manifest.json"
SKIPPED_FOLDERS = frozenset(
    {"__pycache__", "site-packages", "dist-packages", "test", "tests", "idle_test", "idlelib", "lib2to3", "ops", "encodings"}
)
"""Folders left out: tests repeat themselves, `encodings` are tables and torch's `ATen/ops` is generated."""


@dataclass(frozen=True, slots=True)
class Domain:
    """One kind of text and where it comes from. share: of the corpus' bytes."""

    name: str
    packages: tuple[str, ...]
    pattern: str
    share: float
    is_docstrings: bool = False


DOMAINS = (
    Domain("python", (STDLIB,), "*.py", 0.31),
    Domain("cpp", ("torch",), "*.h", 0.28),
    Domain("maths", ("sympy",), "*.py", 0.28),
    Domain("prose", ("networkx", "numpy"), "*.py", 0.13, is_docstrings=True),
)


@dataclass(frozen=True, slots=True)
class DomainText:
    """The bytes of one domain, uint8."""

    name: str
    train: torch.Tensor
    valid: torch.Tensor


@dataclass(frozen=True, slots=True)
class Corpus:
    """All domains, in the order they were asked for. sha256: of all bytes in that order, training text before held-out text."""

    domains: tuple[DomainText, ...]
    sha256: str

    @property
    def total_bytes(self) -> int:
        return sum(text.train.numel() + text.valid.numel() for text in self.domains)

    def byte_frequencies(self) -> torch.Tensor:
        """Computes the share of each byte value, [256], with equal weight for each domain."""
        shares = [torch.bincount(text.train.int(), minlength=256) / text.train.numel() for text in self.domains]
        return torch.stack(shares).mean(dim=0)


Progress = Callable[[str, int], None]
"""Called with a domain's name and how many bytes it has just gained."""


def open_corpus(
    directory: Path,
    *,
    size_bytes: int,
    domains: Sequence[Domain] = DOMAINS,
    on_progress: Progress = lambda _name, _bytes: None,
) -> Corpus:
    """Opens the corpus of at least `size_bytes` in `directory` if it is there and whole; else builds it and keeps it there.

    Raises ConfigError if the installed packages have too little text.
    """
    recipe = _recipe(size_bytes, domains)
    cached = _load(directory, recipe, domains)
    if cached is not None:
        return cached
    # A half-built folder has no manifest, so a crash while building leaves nothing that could be taken for a corpus.
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    checksums: dict[str, str] = {}
    for domain in domains:
        least_bytes = int(size_bytes * domain.share) + 1
        checksums |= _build_domain(directory, domain, size_bytes=least_bytes, on_progress=on_progress)
    manifest = {"recipe": recipe, "sha256": checksums}
    temporary = directory / f"{MANIFEST}.new"
    temporary.write_text(json.dumps(manifest, indent=1, sort_keys=True))
    os.replace(temporary, directory / MANIFEST)
    built = _load(directory, recipe, domains)
    if built is None:
        raise ConfigError(f"corpus {directory}: the files changed while they were written; run again")
    return built


def _recipe(size_bytes: int, domains: Sequence[Domain]) -> dict[str, object]:
    """Everything that decides the corpus' bytes, as JSON knows it."""
    packages = sorted({package for domain in domains for package in domain.packages})
    recipe = {
        "version": RECIPE_VERSION,
        "size_bytes": size_bytes,
        "versions": {package: _version(package) for package in packages},
        "domains": [asdict(domain) for domain in domains],
        "file_bytes_max": FILE_BYTES_MAX,
        "held_out_per_256": HELD_OUT_PER_256,
        "skipped_folders": sorted(SKIPPED_FOLDERS),
    }
    parsed: dict[str, object] = json.loads(json.dumps(recipe))
    return parsed


def _version(package: str) -> str:
    """Version of the package's distribution; Python's for what belongs to no distribution, since that is the standard library."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return platform.python_version()


def _load(directory: Path, recipe: Mapping[str, object], domains: Sequence[Domain]) -> Corpus | None:
    """Reads the cached corpus; None if anything about it is not as the recipe says."""
    try:
        manifest = json.loads((directory / MANIFEST).read_bytes())
    except (OSError, ValueError):
        return None
    if manifest.get("recipe") != recipe:
        return None
    digest = hashlib.sha256()
    texts = []
    for domain in domains:
        sides = []
        for side in ("train", "valid"):
            path = _text_path(directory, domain.name, side)
            data = path.read_bytes() if path.exists() else b""
            if hashlib.sha256(data).hexdigest() != manifest["sha256"].get(path.name):
                return None
            digest.update(data)
            sides.append(torch.from_numpy(np.frombuffer(bytearray(data), dtype=np.uint8)))
        texts.append(DomainText(domain.name, *sides))
    return Corpus(tuple(texts), digest.hexdigest())


def _text_path(directory: Path, domain: str, side: str) -> Path:
    return directory / f"{domain}.{side}.bin"


def _build_domain(directory: Path, domain: Domain, *, size_bytes: int, on_progress: Progress) -> dict[str, str]:
    """Writes both sides of one domain; returns the checksum of each file by its name."""
    sides = {"train": bytearray(), "valid": bytearray()}
    seen: set[bytes] = set()
    for order, text in _texts(domain):
        digest = hashlib.sha256(text).digest()
        if digest in seen:
            continue
        seen.add(digest)
        sides["valid" if order[-1] < HELD_OUT_PER_256 else "train"] += text + SEPARATOR
        on_progress(domain.name, len(text) + len(SEPARATOR))
        if sum(map(len, sides.values())) >= size_bytes:
            break
    else:
        found = sum(map(len, sides.values()))
        raise ConfigError(f"corpus domain {domain.name!r}: {', '.join(domain.packages)} have {found} bytes, it needs {size_bytes}")
    checksums = {}
    for side, data in sides.items():
        path = _text_path(directory, domain.name, side)
        path.write_bytes(data)
        checksums[path.name] = hashlib.sha256(data).hexdigest()
    return checksums


def _texts(domain: Domain) -> Iterator[tuple[bytes, bytes]]:
    """Yields (hash of the name, text) of every usable file of a domain, in the order of the hash."""
    files = []
    for package in domain.packages:
        root = _package_root(package)
        for path in root.rglob(domain.pattern):
            relative = path.relative_to(root)
            if SKIPPED_FOLDERS.isdisjoint(relative.parts):
                files.append((hashlib.sha256(f"{package}/{relative.as_posix()}".encode()).digest(), path))
    for order, path in sorted(files):
        text = _read(path)
        if text and domain.is_docstrings:
            text = _docstrings(text)
        if text:
            yield order, text


def _package_root(package: str) -> Path:
    if package == STDLIB:
        return Path(sysconfig.get_paths()["stdlib"])
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise ConfigError(f"corpus: package {package!r} is not installed; it comes with torch")
    return Path(spec.origin).parent


def _read(path: Path) -> bytes:
    """The file's bytes, or none if it is too long or not UTF-8 text."""
    try:
        if path.stat().st_size > FILE_BYTES_MAX:
            return b""
        data = path.read_bytes()
        data.decode()
    except (OSError, UnicodeDecodeError):
        return b""
    return data


def _docstrings(source: bytes) -> bytes:
    """Joins all docstrings of a module, in the order of the tree, with a blank line between them."""
    try:
        with warnings.catch_warnings(action="ignore"):  # these would be about other people's escape sequences
            tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return b""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = [ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, documented)]
    return "\n\n".join(text for text in found if text).encode()
