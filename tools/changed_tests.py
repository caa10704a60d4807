"""Print the test files of what changed since origin/main, or since the last commit without one.

python -m tools.changed_tests

The nearest come first: changed tests, then tests of the same name as a changed module
(`src/qkv/util/deadline.py` → `tests/util/test_deadline.py`), then tests that import it.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[1]


def run_git(*arguments: str) -> list[str]:
    """Return the lines that git prints; an empty list if it fails."""
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.split("\n")[:-1] if done.returncode == 0 else []


def list_changed_files() -> list[str]:
    base = "origin/main" if run_git("rev-parse", "--verify", "-q", "origin/main") else "HEAD"
    return run_git("diff", "--name-only", base) + run_git(
        "ls-files", "--others", "--exclude-standard"
    )


def select_tests(changed: Iterable[str], tests: dict[str, str]) -> list[str]:
    """Select from `tests`, a dict of path to text, those of the changed files, nearest first.

    >>> texts = {"tests/a.py": "from qkv.util import deadline", "tests/util/test_deadline.py": ""}
    >>> select_tests(["src/qkv/util/deadline.py"], texts)
    ['tests/util/test_deadline.py', 'tests/a.py']
    """
    changed = list(changed)
    modules = [path for path in changed if path.startswith("src/qkv/") and path.endswith(".py")]
    same_name = {
        re.sub(r"(\w+)\.py$", r"test_\1.py", path.replace("src/qkv/", "tests/")) for path in modules
    }
    importing = set()
    for path in modules:
        module = path.removeprefix("src/").removesuffix(".py").removesuffix("/__init__")
        parent, _, name = module.replace("/", ".").rpartition(".")
        pattern = re.compile(
            rf"from {re.escape(parent)}\.{name}\b|from {re.escape(parent)} import [^\n]*\b{name}\b"
            rf"|import {re.escape(parent)}\.{name}\b"
        )
        importing |= {test for test, text in tests.items() if pattern.search(text)}
    groups = [set(changed) & set(tests), same_name & set(tests), importing]
    return list(dict.fromkeys(test for group in groups for test in sorted(group)))


def main() -> None:
    paths = (ROOT / "tests").rglob("test_*.py")
    tests = {p.relative_to(ROOT).as_posix(): p.read_text(encoding="utf-8") for p in paths}
    print(" ".join(select_tests(list_changed_files(), tests)))


if __name__ == "__main__":
    main()
