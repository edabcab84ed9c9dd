"""How large files, folders, classes, functions and signatures may be; that each module has a use, and each test module a module.

What is otherwise stands in a table with its size or its reason: an entry may only shrink, and goes when it is needed no more.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections import Counter
from pathlib import Path

from paramstore_testkit.source import OURS, ROOT, Function, classes, functions, imported, imported_from, mirrored, modules, tree

FILE_LINES, BODY_LINES, FOLDER_MODULES, CLASS_METHODS, CLASS_ATTRIBUTES, PARAMETERS = 400, 50, 16, 30, 20, 8

CROWDED: dict[str, int] = {}
LARGE = {
    "paramstore.storage.space.extents.Space": (40, 12),  # one set of guarantees over one set of ranges
    "paramstore.storage.catalog.ledger.Ledger": (38, 7),  # the rules of one table
    "paramstore_client.namespace.Namespace": (74, 21),  # one page for its users
}
"""Methods and attributes. They stay, for the reasons beside them."""
WIDE = {
    "paramstore_bench.update_phase._step": 9,
    "paramstore.cli.import_.import_checkpoint": 11,
    "paramstore.cli.plan.plan": 12,
    "paramstore.cli.run.run": 13,
    "paramstore.cli.run.serve_model": 9,
    "paramstore.cli.serve.serve": 10,
    "paramstore.cli.trace.plot": 9,
    "paramstore.cli.trace.replay": 9,
    "paramstore.engine.transfers.arithmetic.update": 10,
    "paramstore.engine.planner.param_copies.start": 9,
    "paramstore.optim.update.update": 11,
    "paramstore.testing.memory_namespace.of_swiglu": 9,
    "paramstore_client.client.create_namespace": 9,
    "paramstore_client.client.open_namespace": 10,
    "paramstore_client.hf.import_checkpoint.import_checkpoint": 11,
    "paramstore_client.hf.loading.stored_models.from_config": 15,
    "paramstore_client.hf.loading.stored_models.from_pretrained": 17,
    "paramstore_testkit.oracles.plain_arithmetic.update": 10,
    "paramstore_testkit.sim.client.ask": 9,
    "paramstore_testkit.training.moe_models.of": 9,
}
OF_THE_WHOLE = {"tests/crash", "tests/end_to_end", "tests/faults", "tests/gpu", "tests/properties", "tests/security"}
"""Folders of tests that are of no one module."""
WITHOUT_A_MODULE = {
    "tests": 4, "tests/cli": 1, "tests/client": 2, "tests/client/connection": 1, "tests/client/device": 1,
    "tests/client/gradients": 1, "tests/client/hf": 8, "tests/client/nn": 1, "tests/daemon": 5, "tests/engine": 6,
    "tests/engine/capacity": 3, "tests/engine/planner": 3, "tests/engine/steps": 6, "tests/engine/transfers": 1,
    "tests/fsck": 3, "tests/optim": 1, "tests/storage": 2, "tests/storage/space": 1, "tests/upkeep": 2,
}  # fmt: skip
"""Number of test modules in the other folders that mirror no module: most are the second of one."""
UNUSED = {
    "paramstore.hf", "paramstore.moe", "paramstore.nn", "paramstore.training",  # short names, for users' programs
    "paramstore.testing.catalogs", "paramstore.testing.clock", "paramstore.testing.policies", "paramstore.testing.volume_contract",
    "paramstore.testing.worker_contract", "paramstore.testing.workers",  # contracts and fakes, for tests alone
    "paramstore_testkit.soak",  # `make soak` runs it
}  # fmt: skip
"""Modules that nobody imports, for the reasons beside them."""


def test_no_file_is_long() -> None:
    assert {name: lines for name, path in modules() if (lines := path.read_text().count("\n")) > FILE_LINES} == {}


def test_no_function_is_long() -> None:
    assert {name: lines for name, node in functions() if (lines := _body_lines(node)) > BODY_LINES} == {}


def test_no_module_has_an_except_star() -> None:
    """Before Python 3.11.4, as in Debian 12, an error that is raised in one comes out in a group."""
    assert [name for name, path in modules() if any(isinstance(node, ast.TryStar) for node in ast.walk(tree(path)))] == []


def test_no_folder_is_crowded() -> None:
    counts = Counter(name.rpartition(".")[0] for name, path in modules() if path.name != "__init__.py")
    assert {folder: count for folder, count in counts.items() if count > FOLDER_MODULES} == CROWDED


def test_no_class_is_large() -> None:
    """What a class inherits from one of this project's counts as its own; frozen records may have as many fields as they need."""
    by_name = dict(classes())
    sizes = {name: _size(name, by_name) for name in by_name}
    assert {name: size for name, size in sizes.items() if size[0] > CLASS_METHODS or size[1] > CLASS_ATTRIBUTES} == LARGE


def test_no_signature_is_long() -> None:
    """Constructors may take what they need."""
    counts = {name: _parameters(node) for name, node in functions() if node.name != "__init__"}
    assert {name: count for name, count in counts.items() if count > PARAMETERS} == WIDE


def test_every_test_module_mirrors_a_module() -> None:
    """The scripts of `bench` count as modules of `paramstore_bench`, beside whose tests theirs lie."""
    known = {".".join(part.strip("_") for part in name.split(".")) for name, _ in modules()}
    known |= {f"paramstore_bench.{path.stem}" for path in (ROOT / "bench").glob("*.py")}
    folders = (path.relative_to(ROOT).parent for name, path in mirrored() if name not in known)
    assert Counter(str(folder) for folder in folders if "/".join(folder.parts[:2]) not in OF_THE_WHOLE) == WITHOUT_A_MODULE


def test_every_module_has_a_use() -> None:
    """What users install is imported by more than tests and test kit; the kit's modules by more than their own tests."""
    files = dict(modules())
    kit = {name for name in files if name.split(".")[0] in OURS}
    programs = {str(path): path for folder in ("bench", "examples") for path in (ROOT / folder).rglob("*.py")}
    others = {str(path): path for path in (ROOT / "tests").rglob("*.py") if "testkit" not in path.parts and path != Path(__file__)}
    uses = {user: _uses(path, files) - {user} for user, path in (files | programs | others).items()}
    used = {name for user, names in uses.items() for name in names if name in kit or user not in kit | others.keys()}
    assert {name for name, path in files.items() if name not in used and path.name != "__init__.py"} == UNUSED


def _uses(path: Path, files: dict[str, Path]) -> set[str]:
    """Modules that a file imports, or names in a text of its own, as for `python -m`."""
    return {*imported(tree(path), files), *re.findall(r'"(\w+(?:\.\w+)+)"', path.read_text())}


def _body_lines(node: Function) -> int:
    start = node.body[0].lineno if ast.get_docstring(node) is None else (node.body[0].end_lineno or 0) + 1
    return (node.end_lineno or 0) - start + 1


def _parameters(node: Function) -> int:
    return len([*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs])


def _is_record(node: ast.ClassDef) -> bool:
    """A frozen dataclass or a settings' or message's struct: fields, and little else."""
    said = [ast.unparse(each) for each in (*node.decorator_list, *node.bases, *node.keywords)]
    return any("frozen=True" in each or each in ("msgspec.Struct", "Message") for each in said)


def _size(name: str, by_name: dict[str, ast.ClassDef]) -> tuple[int, int]:
    methods, attributes = _members(name, by_name)
    return len(methods), 0 if _is_record(by_name[name]) else len(attributes)


def _members(name: str, by_name: dict[str, ast.ClassDef]) -> tuple[set[str], set[str]]:
    """Names of a class's methods and of its attributes, its bases' among them."""
    node, module = by_name[name], name.rpartition(".")[0]
    methods = {inner.name for inner in node.body if isinstance(inner, Function)}
    attributes = {
        inner.target.id for inner in node.body if isinstance(inner, ast.AnnAssign) and isinstance(inner.target, ast.Name)
    } | {
        inner.attr for inner in ast.walk(node)
        if isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Store) and ast.unparse(inner.value) == "self"
    }  # fmt: skip
    for base in node.bases:
        origin = imported_from(module).get(ast.unparse(base), f"{module}.{ast.unparse(base)}")
        if origin in by_name:
            inherited = _members(origin, by_name)
            methods, attributes = methods | inherited[0], attributes | inherited[1]
    return methods, attributes


def test_the_types_of_every_script_of_the_benches_are_checked() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mypy"]
    assert settings["modules"] == sorted(path.stem for path in (ROOT / "bench").glob("*.py"))
