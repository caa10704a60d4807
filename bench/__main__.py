"""Run every CPU script in one process, and print at the end which goals were met.

python -m bench [--small] [dot sparse …]
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator

from bench._results import show_goals
from bench._side_by_side import Row, save_results

SCRIPTS = (
    "start",
    "dot",
    "additive",
    "sparse",
    "lookup",
    "gaussian",
    "estimators",
    "window",
    "memory",
    "database",
    "certified",
    "large",
    "layers",
    "compiled",
    "small",
    "serve",
    "cluster",
    "page",
)


def script(name: str) -> Iterator[Row]:
    """Yield the rows of a script; a failed import stops only this script."""
    yield from importlib.import_module(f"bench.{name}").rows()


def main(names: list[str]) -> None:
    unknown = set(names) - set(SCRIPTS)
    if unknown:
        sys.exit(f"no script {', '.join(sorted(unknown))}; there are {', '.join(SCRIPTS)}")
    rows = []
    for name in names or SCRIPTS:
        print(f"--- {name}", flush=True)
        rows += save_results(name, script(name))
    show_goals(rows)


if __name__ == "__main__":
    main([name for name in sys.argv[1:] if not name.startswith("-")])
