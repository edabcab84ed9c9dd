"""Nothing in the source makes code out of data: no call of these names, however it is imported; each exception has its reason."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
SOURCES = (
    ROOT / "paramstore", ROOT / "client" / "paramstore_client", ROOT / "native" / "paramstore_native", ROOT / "testkit",
    ROOT / "bench" / "paramstore_bench",
)  # fmt: skip
BANNED_MODULES = frozenset({
    "pickle", "_pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "yaml", "runpy", "code", "codeop", "pty",
})  # fmt: skip
BANNED_CALLS = frozenset({
    "eval", "exec", "compile", "__import__", "builtins.eval", "builtins.exec", "builtins.compile", "builtins.__import__",
    "os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput", "torch.load", "torch.jit.load",
    "torch.hub.load", "torch.package.PackageImporter", "numpy.load", "pandas.read_pickle", "types.FunctionType", "types.CodeType",
    "importlib.import_module", "importlib.reload",
})  # fmt: skip
BANNED_STARTS = ("os.exec", "os.spawn", "os.posix_spawn")
BANNED_FLAGS = frozenset({"shell", "allow_pickle"})
"""Keywords that may be nothing but False."""

ALLOWED = {
    ("client/paramstore_client/__init__.py", "importlib.import_module"):
        "public names that need torch are looked up in a table of this file, when they are first used",
    ("client/paramstore_client/hf/compat/serving.py", "importlib.import_module"):
        "modules of transformers' server, named in this file",
    ("testkit/paramstore_testkit/training/moe_families.py", "importlib.import_module"):
        "modeling files of the transformers that is installed, found in its folder: tests import nothing else by it",
    ("testkit/paramstore_testkit/training/attached_rank.py", "torch.load"):
        "a rank of a test's job reads what its own job saved, weights only, as the jobs that it stands for do",
    ("bench/paramstore_bench/decode_model.py", "torch.load"):
        "a training of a bench goes on from the state that it saved itself, weights only, in the directory that its user names",
    ("bench/paramstore_bench/guesses/byte_model.py", "torch.load"):
        "as that one: the state of the bench's own training, weights only, in the directory that its user names",
    ("bench/paramstore_bench/decode/llama_peer.py", "importlib.import_module"):
        "two packages that are there or not, named in this file",
    ("testkit/paramstore_testkit/interrupts.py", "types.CodeType"):
        "the kind of what a frame runs: none is made by it",
    ("testkit/paramstore_testkit/streams/faults.py", "compile"):
        "a wait of our own source is taken away, to see that a test notices",
    ("testkit/paramstore_testkit/streams/faults.py", "importlib.import_module"):
        "modules of paramstore_client.device, found in their folder",
    ("testkit/paramstore_testkit/streams/faults.py", "types.CodeType"):
        "the kind of what a function's code holds: none is made by it",
}  # fmt: skip


def places() -> dict[str, str]:
    return {
        file.relative_to(ROOT).as_posix(): file.read_text() for source in SOURCES for file in sorted(source.rglob("*.py"))
    }  # fmt: skip


def imported_names(tree: ast.AST) -> dict[str, str]:
    """What each imported name stands for."""
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.asname: alias.name for alias in node.names if alias.asname}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return names


def dotted(node: ast.expr, names: dict[str, str]) -> str:
    """`a.b.c` with its first part resolved; "" for anything else."""
    if isinstance(node, ast.Name):
        return names.get(node.id, node.id)
    if isinstance(node, ast.Attribute):
        inner = dotted(node.value, names)
        return f"{inner}.{node.attr}" if inner else ""
    return ""


def findings(source: str) -> Iterator[tuple[int, str]]:
    """(line, what) of each use of a banned name."""
    tree = ast.parse(source)
    names = imported_names(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names if alias.name.split(".")[0] in BANNED_MODULES)
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in BANNED_MODULES:
            yield node.lineno, node.module
        elif isinstance(node, ast.Name | ast.Attribute):
            name = dotted(node, names)
            if name in BANNED_CALLS or name.startswith(BANNED_STARTS):
                yield node.lineno, name
        elif isinstance(node, ast.Call):
            for keyword in node.keywords:
                is_off = isinstance(keyword.value, ast.Constant) and keyword.value.value is False
                if keyword.arg in BANNED_FLAGS and not is_off:
                    yield node.lineno, f"{keyword.arg}=..."


def refined(source: str) -> list[tuple[int, str]]:
    """`findings` without imports of modules that the text itself names."""
    constant = {
        node.lineno for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call) and len(node.args) == 1 and isinstance(node.args[0], ast.Constant)
    }  # fmt: skip
    return [(line, name) for line, name in findings(source) if not (name == "importlib.import_module" and line in constant)]


@pytest.fixture(scope="module")
def used() -> dict[tuple[str, str], list[int]]:
    """(file, name): lines, of all that is banned and used."""
    found: dict[tuple[str, str], list[int]] = {}
    for place, source in places().items():
        for line, name in refined(source):
            found.setdefault((place, name), []).append(line)
    return found


@pytest.mark.slow
def test_no_banned_name_is_used_without_a_reason(used: dict[tuple[str, str], list[int]]) -> None:
    assert {place: lines for place, lines in used.items() if place not in ALLOWED} == {}


@pytest.mark.slow
def test_every_exception_is_still_one(used: dict[tuple[str, str], list[int]]) -> None:
    assert ALLOWED.keys() - used.keys() == set()


def test_all_three_packages_are_read() -> None:
    found = places()
    assert {
        "paramstore/daemon/session.py", "client/paramstore_client/connection/inbox.py", "native/paramstore_native/statx.py",
    } <= found.keys()  # fmt: skip


@pytest.mark.parametrize(
    "source",
    [
        "import pickle", "from pickle import loads", "import marshal as quick", "import yaml", "eval('1')", "exec(data)",
        "compile(data, '', 'exec')", "__import__(name)", "from os import system\nsystem('ls')", "import os as o\no.execv('a', [])",
        "import torch as t\nt.load('f')", "from torch import load as read\nread('f')", "import numpy as np\nnp.load('f')",
        "import subprocess\nsubprocess.run('ls', shell=True)", "run('ls', shell=is_wanted)", "load('f', allow_pickle=True)",
        "import importlib\nimportlib.import_module(name)", "import builtins\nbuiltins.exec('')", "run = eval", "map(eval, lines)",
        "from importlib import import_module\nimport_module(data['kind'])",
    ],
)  # fmt: skip
def test_a_banned_name_is_found_however_it_is_imported(source: str) -> None:
    assert refined(source) != []


@pytest.mark.parametrize(
    "source",
    [
        "import re\nre.compile('a')", "import numpy as np\nnp.asarray([1])", "run(['ls'], shell=False)", "self.load(1)",
        "import importlib\nimportlib.import_module('paramstore_client')", "import json\njson.load(file)", "model.eval",
        "from paramstore.config import load\nload({})",
    ],
)  # fmt: skip
def test_what_is_harmless_is_let_be(source: str) -> None:
    assert refined(source) == []
