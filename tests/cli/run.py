"""The command line as tests call it, and a table to ask."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from qkv.cli import app

ROOT = Path(__file__).resolve().parents[2]
HERE = {
    **{name: x for name, x in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR")},
    "PYTHONPATH": str(ROOT / "src"),
}
"""The environment of a process that runs this very package, from any folder."""

BOOKS = [
    ("The Alchemist", "Paulo Coelho", 1988, "fiction"),
    ("Emma", "Jane Austen", 1815, "romance"),
    ("Dune", "Frank Herbert", 1965, "science fiction"),
    ("Dracula", "Bram Stoker", 1897, "horror"),
    ("Ulysses", "James Joyce", 1922, "fiction"),
    ("The Odyssey", "Homer", -700, "poetry"),
    ("Persuasion", "Jane Austen", 1817, "romance"),
    ("The Trial", "Franz Kafka", 1925, "fiction"),
]
NAMES = ("title", "author", "year", "genre")


def qkv(*arguments: object, stdin: str | None = None) -> Any:
    return CliRunner().invoke(app, [str(a) for a in arguments], input=stdin)


def data(*arguments: object, code: int = 0, stdin: str | None = None) -> Any:
    """The one JSON object that the command prints."""
    result = qkv(*arguments, "--json", stdin=stdin)
    assert result.exit_code == code, result.output
    (line,) = result.stdout.splitlines()
    return json.loads(line)


def process(*arguments: object, env: dict[str, str] | None = None, **options: Any) -> Any:
    return subprocess.Popen(
        [sys.executable, "-m", "qkv.cli", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=HERE | (env or {}),
        **options,
    )


def run(*arguments: object, **options: Any) -> tuple[int, str, str]:
    with process(*arguments, **options) as started:
        out, err = started.communicate(timeout=300)
    return started.returncode, out, err
