"""The documents agree with the code: settings, messages, limits, errors, tests and names that they mention exist as they say."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import re
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

import paramstore
from paramstore.cli.serve import serve
from paramstore.config import Config
from paramstore.errors import CLASSES
from paramstore.sizes import format_size
from paramstore.wire import messages
from paramstore.wire.messages import Message

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted([ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "bench" / "README.md", *DOCS.rglob("*.md")])
SOURCES = (
    ROOT / "paramstore", ROOT / "client" / "paramstore_client", ROOT / "native" / "paramstore_native",
    ROOT / "testkit" / "paramstore_testkit", ROOT / "bench" / "paramstore_bench",
)  # fmt: skip
LIMIT_MODULES = (
    "paramstore.wire.codec", "paramstore.wire.messages", "paramstore.daemon.session", "paramstore.daemon.server",
    "paramstore.daemon.channel", "paramstore_client.connection.shared_socket", "paramstore.config", "paramstore.core.schema",
    "paramstore.storage.format.structures", "paramstore.engine.records.update",
)  # fmt: skip

NAME, FILE = r"`(?![\w./]+\.py`)[A-Za-z_]\w*(?:\.\w+)?`", r"`[\w./]+\.py`"
NAMES, FILES = rf"{NAME}(?:(?:, | and ){NAME})*", rf"{FILE}(?:(?:, | and ){FILE})*"
BESIDE = rf"(?P<names>{NAMES})(?:\sin\s|\s\()(?P<files>{FILES})|(?P<files_first>{FILES})\s\((?P<names_after>{NAMES})[:)]"
"""Names with the file that has them: "`Class`, `Class.method` in `path.py`", "`Class` (`path.py`)", "`path.py` (`Class`: ...)"."""

GPU = r"\b(?:GPUs?|CUDA|GPUDirect|HBM|torch\.cuda|device_map)\b"
NEVER_RUN = r"(?i:\b(?:never|no line|none of)\b[^.;|]{0,40}\brun on (?:a GPU|one)\b)"
NOT_OF_A_GPU = {
    ("README.md", "Try it"), ("README.md", "Requirements"),  # which build of torch, and that no GPU is needed
    ("docs/security.md", "Security"), ("docs/security.md", "The process"),  # no memory of one is shared; torch is imported
    ("docs/architecture.md", "Another optimizer"),  # what is simulated in the test kit
}  # fmt: skip
"""Sections that name a GPU, and claim nothing of what runs on one."""

NO_MODULES = {"paramstore.sock", "paramstore.sentinel"}
"""A file and a parameter that look like modules."""


def page_id(page: Path) -> str:
    return str(page.relative_to(ROOT))


def read(name: str) -> str:
    return (DOCS / name).read_text()


def prose(page: Path) -> str:
    """The page without its code blocks."""
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def slug(heading: str) -> str:
    """The anchor that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def message_classes() -> list[type[Message]]:
    found = [value for value in vars(messages).values() if isinstance(value, type) and issubclass(value, Message)]
    return [kind for kind in found if kind is not Message]


def constants() -> dict[str, object]:
    """Every constant of the modules whose limits are documented."""
    found: dict[str, object] = {}
    for name in LIMIT_MODULES:
        found |= {key: value for key, value in vars(importlib.import_module(name)).items() if key.isupper()}
    return found


@cache
def members() -> dict[str, set[str]]:
    """Per class (or alias) of the source its methods and attributes, those of its bases in the source too."""
    found: dict[str, set[str]] = defaultdict(set)
    bases: dict[str, set[str]] = defaultdict(set)
    for source in SOURCES:
        for file in source.rglob("*.py"):
            module = ast.parse(file.read_text())
            for alias in module.body:
                if isinstance(alias, ast.Assign) and isinstance(alias.targets[0], ast.Name):
                    found.setdefault(alias.targets[0].id, set())
            for node in ast.walk(module):
                if isinstance(node, ast.ClassDef):
                    found[node.name] |= _members_of(node)
                    bases[node.name] |= {base.id for base in node.bases if isinstance(base, ast.Name)}
    for name, names in bases.items():
        for base in names & found.keys():
            found[name] |= found[base]
    return found


def _members_of(node: ast.ClassDef) -> set[str]:
    names = set()
    for inner in ast.walk(node):
        if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(inner.name)
        elif isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Store):
            names.add(inner.attr)
        elif isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store):
            names.add(inner.id)
    return names


def found_by_import(name: str) -> object:
    """What a program gets that imports as much of `name` as is a module; None if there is no such thing."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        try:
            found: object = importlib.import_module(".".join(parts[:count]))
        except ModuleNotFoundError:
            continue
        for part in parts[count:]:
            found = getattr(found, part, None)
        return found
    return None


def beside(text: str) -> Iterator[tuple[list[str], list[str]]]:
    """Names, and the files or folders that a page says have them: in its sentences, and in tables "| file | class |"."""
    for found in re.finditer(BESIDE, text):
        names, files = found["names"] or found["names_after"], found["files"] or found["files_first"]
        yield re.findall(r"`([^`]+)`", names), re.findall(r"`([^`]+)`", files)
    for table in re.findall(r"^\| (?:file|where) \| class \|.*\n\|[-|]+\|\n((?:\|.*\n)+)", text, flags=re.MULTILINE):
        for row in table.splitlines():
            _, files, names, *_ = row.split("|")
            yield re.findall(r"`([^`]+)`", names), re.findall(r"`([^`]+)`", files)


@cache
def defined_in(path: str) -> set[str]:
    """Names that the file defines, or the files of the folder, and members of its classes as `Class.member`. A file that stands
    behind another in its row may be named by its own name alone."""
    places = (ROOT, ROOT / "paramstore", ROOT / "client", ROOT / "client" / "paramstore_client")
    found = [place / path for place in places if (place / path).exists()]
    found = found or [file for source in SOURCES for file in source.rglob(path)]
    files = [file for one in found for file in (one.rglob("*.py") if one.is_dir() else [one])]
    return {name for file in files for node in ast.parse(file.read_text()).body for name in _names_of(node)}


def _names_of(node: ast.stmt) -> Iterator[str]:
    if isinstance(node, ast.ClassDef):
        inherited = [members()[base.id] for base in node.bases if isinstance(base, ast.Name) and base.id in members()]
        yield from (f"{node.name}.{name}" for name in _members_of(node).union(*inherited))
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        yield node.name
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    yield from (target.id for target in targets if isinstance(target, ast.Name))


def settings_table() -> ModuleType:
    spec = importlib.util.spec_from_file_location("settings_table", DOCS / "settings_table.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_setting_is_on_the_page_with_its_default_and_trade_off() -> None:
    assert settings_table().page() == read("configuration.md"), "run `python docs/settings_table.py`"


def test_every_flag_of_serve_is_on_the_page() -> None:
    flags = {name.replace("_", "-") for name in inspect.signature(serve).parameters} - {"directory"} | {"dir"}
    assert {flag for flag in flags if f"`--{flag}`" not in read("configuration.md")} == set()


@pytest.mark.parametrize("name", ["configuration.md", "protocol.md"])
def test_every_limit_has_the_value_of_its_constant(name: str) -> None:
    known, checked = constants(), 0
    for row in re.findall(r"^\| (.+) \|$", read(name), flags=re.MULTILINE):
        for constant in re.findall(r"`([A-Z][A-Z_]+)`", row):
            value = known.get(constant)
            if isinstance(value, int | float):
                forms = {str(value), f"{value} bytes", f"{value:g} s", format_size(int(value))}
                assert forms & {cell.strip() for cell in row.split("|")}, f"{constant} is {value}"
                checked += 1
    assert checked >= 5


def test_what_is_fixed_is_no_setting() -> None:
    fixed = re.findall(r"^\| `([A-Z_]+)`", read("configuration.md"), flags=re.MULTILINE)
    assert "CHUNK_BYTES" in fixed
    assert {name.lower() for name in fixed}.isdisjoint(Config.__struct_fields__)


@pytest.mark.parametrize("kind", message_classes(), ids=lambda kind: kind.__name__)
def test_every_message_is_in_the_protocol_with_its_fields(kind: type[Message]) -> None:
    assert f"| `{kind.__name__}({', '.join(kind.__struct_fields__)})` |" in read("protocol.md")


@pytest.mark.parametrize("name", sorted(CLASSES))
def test_every_error_class_is_explained(name: str) -> None:
    assert f"| `{name}` |" in read("protocol.md")


def test_every_error_named_in_the_protocol_exists() -> None:
    endings = "Error|Mismatch|Failed|Dropped|Fenced|Cancelled|Timeout|Exists|Key"
    found = set(re.findall(rf"\b([A-Z][a-z]+(?:{endings}))\b", read("protocol.md")))
    assert found - CLASSES.keys() == set()


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_every_test_that_a_page_names_exists(page: Path) -> None:
    for path, name in re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", page.read_text()):
        assert (ROOT / path).is_file(), path
        assert not name or f"def {name}(" in (ROOT / path).read_text(), f"{path}::{name}"


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_every_link_to_a_file_or_heading_of_ours_resolves(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{page_id(page)} links to {target}"
        if anchor:
            anchors = {slug(heading) for heading in re.findall(r"^#+ (.+)$", file.read_text(), flags=re.MULTILINE)}
            assert anchor in anchors, f"{page_id(page)} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_every_source_file_that_a_page_names_exists(page: Path) -> None:
    places = (ROOT, ROOT / "paramstore", ROOT / "client", DOCS, page.parent)
    for path in re.findall(r"`([\w./-]+\.(?:py|md))`", prose(page)):
        found = any((place / path).exists() for place in places) or any(list(source.rglob(path)) for source in SOURCES)
        assert found, f"{page_id(page)} names {path}"


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_every_class_and_method_that_a_page_names_exists(page: Path) -> None:
    for name, member in re.findall(r"`(?:ps\.)?([A-Z][a-z]\w*)(?:\.(\w+))?(?:\(|`)", prose(page)):
        assert name in members(), f"{page_id(page)} names {name}"
        assert not member or member in members()[name], f"{page_id(page)} names {name}.{member}"


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_every_name_is_defined_in_the_file_that_stands_beside_it(page: Path) -> None:
    missing = {
        name: files for names, files in beside(prose(page)) for name in names if not any(name in defined_in(file) for file in files)
    }
    assert missing == {}


def test_every_way_to_name_a_file_is_found() -> None:
    text = """
`A.b`, `C` in `d/e.py`; `F`, of `g.py`. The `H` (`i.py`) and `j.py` (`K`, `L`: these).

| file | class | does |
|---|---|---|
| `m/n.py`, `o.py` | `P`, `Q` | `R` in `s.py` |
| `t/` | | `U` |
"""
    assert list(beside(text)) == [
        (["A.b", "C"], ["d/e.py"]), (["H"], ["i.py"]), (["K", "L"], ["j.py"]), (["R"], ["s.py"]),
        (["P", "Q"], ["m/n.py", "o.py"]), ([], ["t/"]),
    ]  # fmt: skip
    found = {page: len(list(beside(prose(DOCS / page)))) for page in ("architecture.md", "glossary.md")}
    assert min(found.values()) > 80, found


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_every_module_and_name_of_one_that_a_page_names_exists(page: Path) -> None:
    for name in re.findall(r"`((?:ps|paramstore\w*)(?:\.\w+)+)", prose(page)):
        if name not in NO_MODULES:
            assert found_by_import(re.sub("^ps\\b", "paramstore", name)) is not None, f"{page_id(page)} names {name}"


def test_every_section_that_claims_something_of_a_gpu_says_that_none_of_it_has_run_on_one() -> None:
    """Until `bench/bench_device.py` has: its results lie in bench/results then, and this test goes."""
    assert not list((ROOT / "bench" / "results").glob("device-*.json")), "it has run: say what held, and delete this test"
    naming = set()
    for page in (ROOT / "README.md", ROOT / "bench" / "README.md", *DOCS.glob("*.md")):
        blocks = re.compile(r"^```(\w*)\n.*?^```$", re.DOTALL | re.MULTILINE)
        text = blocks.sub(lambda block: block[0] if block[1] == "mermaid" else "", page.read_text())
        for section in re.split(r"^#+ ", text, flags=re.MULTILINE):
            if re.search(GPU, section):
                place = (page_id(page), section.partition("\n")[0])
                naming.add(place)
                assert place in NOT_OF_A_GPU or re.search(NEVER_RUN, section.replace("\n", " ")), place
    assert naming >= NOT_OF_A_GPU


def test_every_decision_is_in_the_list_of_decisions() -> None:
    first = read("decisions/0001-record-architecture-decisions.md")
    others = sorted(page.name for page in (DOCS / "decisions").glob("*.md"))[1:]
    assert [name for name in others if f"]({name})" not in first] == []


def test_every_decision_has_its_four_sections() -> None:
    for page in (DOCS / "decisions").glob("[0-9]*.md"):
        wanted = ["**Context.**", "**Decision.**", "**Consequences.**"]
        if not page.name.startswith("0001"):
            wanted.append("**Measured.**")
        assert [section for section in wanted if section not in page.read_text()] == [], page.name


def test_every_extra_that_users_may_install_is_in_the_readme() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"].keys() - {"dev"}
    assert [name for name in extras if f"extra `{name}`" not in (ROOT / "README.md").read_text()] == []


def test_the_changelog_has_this_version() -> None:
    assert f"## [{paramstore.__version__}]" in (ROOT / "CHANGELOG.md").read_text()
