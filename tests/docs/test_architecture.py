"""ARCHITECTURE.md and CONTRIBUTING.md name files and functions that exist."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = (
    *(ROOT, ROOT / "src/qkv", ROOT / "frontend/src/equation"),
    *(p for p in (ROOT / "src/qkv").rglob("*") if p.is_dir()),
)


@cache
def known_names() -> set[str]:
    """Every name that the package or its tests define."""
    result = set()
    paths = [p for folder in ("src", "tests", "tools") for p in (ROOT / folder).rglob("*.py")]
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                result.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                result.add(node.id)
            elif isinstance(node, ast.Attribute):
                result.add(node.attr)
            elif isinstance(node, ast.arg | ast.keyword) and node.arg:
                result.add(node.arg)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                result.add(node.value)
    return result | {p.stem for p in paths}


def names_in(page: str) -> list[str]:
    """What stands in backticks outside of code blocks and looks like a path or a name."""
    text = re.sub(r"```.*?```", "", (ROOT / page).read_text(encoding="utf-8"), flags=re.DOTALL)
    quoted = re.findall(r"`([^`\n]+)`", text)
    to_be_created = re.findall(r"For\s+example,\s+`([^`\n]+)`", text)
    return [x for x in quoted if re.fullmatch(r"[\w./]+(\(\))?", x) and x not in to_be_created]


@pytest.mark.parametrize("page", ["ARCHITECTURE.md", "CONTRIBUTING.md"])
def test_names_exist(page):
    missing = []
    for name in names_in(page):
        plain = name.removesuffix("()")
        if "/" in plain or plain.endswith((".py", ".md", ".toml", ".js", ".ts", ".txt")):
            built = plain.startswith((".venv", "build/", "demo/", "origin/"))
            if not built and not any((folder / plain.strip("/")).exists() for folder in FOLDERS):
                missing.append(name)
        elif plain.split(".")[-1] not in known_names() and not plain.startswith((".", "torch.")):
            missing.append(name)
    assert not missing
