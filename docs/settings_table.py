"""Writes the tables of `docs/configuration.md` out of `paramstore/config.py`: `python docs/settings_table.py`.

The text of a setting is the docstring under it, so a setting without one fails here. `tests/test_docs.py` checks that the
page is what this program would write.
"""

from __future__ import annotations

import ast
from itertools import pairwise
from pathlib import Path

import msgspec

from paramstore import config
from paramstore.config import ENVIRONMENT_PREFIX, SHORT_NAMES, SIZE_SETTINGS, Config, PolicyConfig
from paramstore.sizes import format_size

PAGE = Path(__file__).with_name("configuration.md")
BEGIN, END = "<!-- settings: begin -->", "<!-- settings: end -->"
SHORT_OF = {full: short for short, full in SHORT_NAMES.items()}


def documented(source: str, class_name: str) -> dict[str, str]:
    """The docstring under each attribute of a class, on one line."""
    module = ast.parse(source)
    body = next(node for node in module.body if isinstance(node, ast.ClassDef) and node.name == class_name).body
    texts = {}
    for attribute, text in pairwise(body):
        if isinstance(attribute, ast.AnnAssign) and isinstance(attribute.target, ast.Name) and isinstance(text, ast.Expr):
            texts[attribute.target.id] = " ".join(ast.literal_eval(text.value).split())
    return texts


def tables() -> str:
    """Both tables: the settings of a daemon, then those of its policy."""
    source = Path(config.__file__).read_text()
    rows = documented(source, Config.__name__)
    rows["policy"] = "A table: see below."
    policy = documented(source, PolicyConfig.__name__)
    return f"{_table(Config, rows, prefix='')}\n\n### policy\n\n{_table(PolicyConfig, policy, prefix='policy__')}"


def page() -> str:
    """The whole page, its tables made anew."""
    text = PAGE.read_text()
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{tables()}\n\n{END}{after}"


def _table(kind: type[msgspec.Struct], texts: dict[str, str], *, prefix: str) -> str:
    lines = ["| setting | default | what it must be | variable | what it trades |", "|---|---|---|---|---|"]
    for field in msgspec.structs.fields(kind):
        name = SHORT_OF.get(field.name, field.name)
        variable = "" if field.name == "policy" else f"`{ENVIRONMENT_PREFIX}{(prefix + name).upper()}`"
        words = _words(prefix.replace("__", ".") + field.name)
        lines.append(f"| `{field.name}` | {_default(field.name, field.default)} | {words} | {variable} | {texts[field.name]} |")
    return "\n".join(lines)


def _words(name: str) -> str:
    """What a value must be, as the error of a wrong one says it."""
    rule = config._RULES.get(name)
    return "" if rule is None else rule.words


def _default(name: str, value: object) -> str:
    if value is None or value == () or isinstance(value, PolicyConfig):
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if name in SIZE_SETTINGS and isinstance(value, int):
        return format_size(value)
    return f"`{value}`" if isinstance(value, str | Path) else str(value)


if __name__ == "__main__":
    PAGE.write_text(page())
