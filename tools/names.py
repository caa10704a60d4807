"""Check how clear names are: one-word functions, ambiguous functions, and metaphors.

python -m tools.names [--most SHARE]

Functions say verb and object (`load_calibration`). One word is complete only if the module or the
class completes it (`masks.causal`, `Database.ask`). A function that several modules define must
mean the same in all of them: such names are listed in PROTOCOLS. Methods are not checked, because
most overloads belong to classes with a common base. No function, class or parameter has a word of
METAPHORS in its name.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

SOURCE = Path(__file__).parents[1] / "src" / "qkv"
MOST = 0.2
MOST_MODULES = 3

PROTOCOLS = {
    # the functions of an engine, which `engines.choice` calls
    "build_direct_runner", "describe", "is_data_dependent", "run", "shape_based_reason",
    "slower_reason", "unsupported_reason",
    # the arguments of `Framework.custom_gradient` and of autograd functions
    "_save_for_backward", "backward", "forward", "pull_back", "reference",
    # a kernel's launch with one tile, and the table of names of scores, weightings, masks, encoders
    "resolve", "run_tile",
}  # fmt: skip
"""Functions that more than MOST_MODULES modules define, with the same meaning in all of them."""

METAPHORS = {
    "bear", "bury", "desk", "door", "doors", "heal", "house", "ledger", "lend", "lent", "mend",
    "nobody", "promise", "room", "rooms", "settle", "shelf", "told", "wish",
}  # fmt: skip
"""Words that only the authors would search for: say buffer, entry point, repair, insert."""


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


def list_unused_protocols(functions: list[Function]) -> list[str]:
    """Return the names of PROTOCOLS that too few modules define to be ambiguous."""
    modules = {name: {x.module for x in functions if x[::2] == (name, None)} for name in PROTOCOLS}
    return sorted(name for name, where in modules.items() if len(where) <= MOST_MODULES)


def list_metaphors(source: Path = SOURCE) -> list[str]:
    """Return the place and name of each function, class and parameter with a word of METAPHORS."""
    places = []
    for path in sorted(source.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                name = node.name
            elif isinstance(node, ast.arg):
                name = node.arg
            else:
                continue
            words = re.findall(r"[A-Z]?[a-z]+", name)
            if METAPHORS & {word.lower() for word in words}:
                places.append(f"{path.relative_to(source.parent)}:{node.lineno}: {name}")
    return places


def main(arguments: list[str]) -> int:
    most = float(arguments[1]) if arguments[:1] == ["--most"] else MOST
    functions = list_functions()
    share, ambiguous = one_word_share(functions), list_ambiguous(functions)
    unused, metaphors = list_unused_protocols(functions), list_metaphors()
    print(f"{share:.1%} of {len(functions):,} function names have one word (at most {most:.0%})")
    for name, modules in ambiguous.items():
        print(f"{name} is defined in {len(modules)} modules: {', '.join(modules)}")
    for name in unused:
        print(f"{name} is in PROTOCOLS, but at most {MOST_MODULES} modules define it: remove it")
    for place in metaphors:
        print(f"{place}: say what it is, not what it is like")
    return int(share > most or bool(ambiguous or unused or metaphors))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
