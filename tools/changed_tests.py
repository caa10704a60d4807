"""The test files of what changed since origin/main, or since the last commit where there is none.

python -m tools.changed_tests

These are the changed tests, and the tests that import a changed module of `src/qkv`.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[1]


def run_git(*arguments: str) -> list[str]:
    """The lines that git prints, none where it fails."""
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.split("\n")[:-1] if done.returncode == 0 else []


def list_changed_files() -> list[str]:
    base = "origin/main" if run_git("rev-parse", "--verify", "-q", "origin/main") else "HEAD"
    return run_git("diff", "--name-only", base) + run_git(
        "ls-files", "--others", "--exclude-standard"
    )


def select_tests(changed: Iterable[str], tests: dict[str, str]) -> list[str]:
    """The tests, by path and text, that changed or that import a changed module.

    >>> select_tests(["src/qkv/util/deadline.py"], {"tests/a.py": "from qkv.util import deadline"})
    ['tests/a.py']
    """
    changed, found = list(changed), set()
    for path in changed:
        if path in tests:
            found.add(path)
        if not path.startswith("src/qkv/") or not path.endswith(".py"):
            continue
        module = path.removeprefix("src/").removesuffix(".py").removesuffix("/__init__")
        parent, _, name = module.replace("/", ".").rpartition(".")
        pattern = re.compile(
            rf"from {re.escape(parent)}\.{name}\b|from {re.escape(parent)} import [^\n]*\b{name}\b"
            rf"|import {re.escape(parent)}\.{name}\b"
        )
        found |= {test for test, text in tests.items() if pattern.search(text)}
    return sorted(found)


def main() -> None:
    paths = (p for p in (ROOT / "tests").rglob("test_*.py"))
    tests = {p.relative_to(ROOT).as_posix(): p.read_text(encoding="utf-8") for p in paths}
    print(" ".join(select_tests(list_changed_files(), tests)))


if __name__ == "__main__":
    main()
