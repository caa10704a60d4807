"""Find import cycles between the modules of `src/qkv`.

An import counts wherever it stands: at the top of a file, under `if TYPE_CHECKING`, or in a
function. `python -m tools.import_cycles` prints the cycles and exits with 1 if there are any.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src"

Graph = dict[str, dict[str, int]]
"""For each module, the modules that it imports and the line of the first import."""


def list_modules(source: Path = SOURCE) -> dict[str, Path]:
    """Return the path of every module by its dotted name."""
    modules = {}
    for path in sorted((source / "qkv").rglob("*.py")):
        parts = path.relative_to(source).with_suffix("").parts
        modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return modules


def find_imports(tree: ast.AST, known: dict[str, Path]) -> dict[str, int]:
    """Return the modules of the library that a module imports, with their lines."""
    found: dict[str, int] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            submodules = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name in known else node.module for name in submodules]
        else:
            continue
        for name in names:
            if name in known:
                found.setdefault(name, node.lineno)
    return found


def build_graph(modules: dict[str, Path]) -> Graph:
    """Return the import graph of the library."""
    graph: Graph = {}
    for name, path in modules.items():
        imports = find_imports(ast.parse(path.read_text()), modules)
        graph[name] = {target: line for target, line in imports.items() if target != name}
    return graph


def find_cycles(graph: Graph) -> list[list[str]]:
    """Return one shortest cycle through each module that is part of a cycle, without repeats.

    >>> find_cycles({"a": {"b": 1}, "b": {"a": 1}, "c": {"a": 1}})
    [['a', 'b']]
    """
    cycles: dict[frozenset[str], list[str]] = {}
    for start in sorted(graph):
        paths, seen = [[start]], {start}
        while paths:
            path = paths.pop(0)
            if start in graph[path[-1]]:
                cycles.setdefault(frozenset(path), path)
                break
            for target in graph[path[-1]]:
                if target not in seen:
                    seen.add(target)
                    paths.append([*path, target])
    return list(cycles.values())


def main() -> int:
    """Print each cycle with the lines of its imports; return 1 if there are any."""
    graph = build_graph(list_modules())
    cycles = find_cycles(graph)
    for cycle in cycles:
        print(" -> ".join([*cycle, cycle[0]]))
        for module, target in zip(cycle, [*cycle[1:], cycle[0]], strict=True):
            print(f"    {module}, line {graph[module][target]}, imports {target}")
    print(f"{len(cycles)} import cycles in {len(graph)} modules")
    return 1 if cycles else 0


if __name__ == "__main__":
    sys.exit(main())
