"""Measure how clear function names are: the share of one-word names, and ambiguous names.

python -m tools.names [--most SHARE]

Functions say verb and object (`load_calibration`). One word is complete only if the module or the
class completes it (`masks.causal`, `Database.ask`). A name that several modules define must mean
the same in all of them: such names are listed in PROTOCOLS, or belong to classes with a common
base.
"""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

SOURCE = Path(__file__).parents[1] / "src" / "qkv"
MOST = 0.35
MOST_MODULES = 3

PROTOCOLS = {
    # engines and their kernels
    "run", "describe", "warm", "build_runner", "build_direct_runner", "unsupported_reason",
    "slower_reason", "shape_based_reason", "is_data_dependent", "fold", "state", "fake",
    "forward", "backward", "attend", "weights", "explain", "compute_output",
    # scores, weightings, masks, encoders and frameworks: each class has its own
    "init", "merge", "finish", "check", "form", "profile", "encode", "fit", "build", "settings",
    "arrays", "width", "name", "bounds",
    # layers and estimators
    "call", "reset_parameters", "extra_repr", "get_config", "predict", "transform",
    # a database, wherever it is: here, on a server, in shards
    "ask", "add", "extend", "update", "remove", "rows", "count", "info", "columns", "close",
    "open", "show", "plot", "to_html", "register", "main", "wrapper",
    # what every autograd function, every table of names and every launch has
    "_save_for_backward", "pull_back", "reference", "resolve", "run_tile",
}  # fmt: skip
"""Names that mean the same in every module that defines them."""


class Function(NamedTuple):
    name: str
    module: str
    owner: str | None


def list_functions(source: Path = SOURCE) -> list[Function]:
    """Return every function and method below a folder, including nested ones and properties."""
    found = []
    for path in sorted(source.rglob("*.py")):
        module = path.relative_to(source.parent).with_suffix("").as_posix().replace("/", ".")
        tree = ast.parse(path.read_text(encoding="utf-8"))
        owners = {
            id(child): node.name
            for node in ast.walk(tree)
            if isinstance(node, ast.ClassDef)
            for child in node.body
        }
        found += [
            Function(node.name, module, owners.get(id(node)))
            for node in ast.walk(tree)
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            and not (node.name.startswith("__") and node.name.endswith("__"))
        ]
    return found


def one_word_share(functions: list[Function]) -> float:
    """Return the share of names without an inner underscore."""
    return sum("_" not in x.name.strip("_") for x in functions) / len(functions)


def list_ambiguous(functions: list[Function]) -> dict[str, list[str]]:
    """Return module-level functions that more than MOST_MODULES modules define, by name."""
    modules: dict[str, set[str]] = defaultdict(set)
    for x in functions:
        if x.owner is None and x.name not in PROTOCOLS:
            modules[x.name].add(x.module)
    return {
        name: sorted(where) for name, where in sorted(modules.items()) if len(where) > MOST_MODULES
    }


def main(arguments: list[str]) -> int:
    most = float(arguments[1]) if arguments[:1] == ["--most"] else MOST
    functions = list_functions()
    share, ambiguous = one_word_share(functions), list_ambiguous(functions)
    print(f"{share:.1%} of {len(functions):,} function names have one word (at most {most:.0%})")
    for name, modules in ambiguous.items():
        print(f"{name} is defined in {len(modules)} modules: {', '.join(modules)}")
    return int(share > most or bool(ambiguous))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
