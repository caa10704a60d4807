"""Regular expressions and parsers take time in proportion to their input, however hostile.

The test finds every pattern in the source, builds hostile inputs from the pattern's own characters
and runs them in a process with a limit on its CPU time. A linear pattern takes milliseconds where a
quadratic one takes many seconds, so no verdict depends on fine timing.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib
import itertools
import re
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import qkv
from tests import sampling

ROOT = Path(qkv.__file__).parent
METHODS = ("match", "search", "fullmatch", "findall", "finditer", "split", "sub", "subn")
LOCALS: dict[str, dict[str, Any]] = {
    "database/sources/delimited.py": {"delimiter": ","},
    "cli/weights.py": {"word": r"(?:[^\W_])+", "sign": r"\S"},
    "database/filter/expressions.py": {"quote": "'"},
    "database/encoders/characters.py": {"run": "[\u0301\u0327]{30}"},
    "serve/validation.py": {"pattern": r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}$"},
}
"""Values for the local variables of patterns that are built when a function runs."""

SCREEN, FULL = 2_048, 32_768
"""Characters of the input that every pattern gets, and of that which a slow one gets."""
SUSPECT_SECONDS, MAX_SECONDS = 0.0005, 0.2
"""CPU time of the first above which the second is run, and the limit of that: linear patterns take
0.00005 and 0.001 seconds, quadratic ones 0.005 and 1.2."""
MAX_CPU_SECONDS = 120
PATTERNS = 40
"""The number of patterns that are tried in a day."""


class Pattern(NamedTuple):
    """A pattern where it is used, and how."""

    place: str
    pattern: str | bytes
    flags: int
    method: str


@functools.cache
def find_patterns() -> list[Pattern]:
    """Every regular expression in the package's source."""
    return list(_find_patterns(ROOT))


def _find_patterns(root: Path) -> Iterator[Pattern]:
    for path in sorted(root.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if "re." not in text:
            continue
        tree = ast.parse(text)
        name = str(path.relative_to(root))
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and isinstance(node.func.value, ast.Name)
                and node.func.value.id == "re"
                and node.func.attr in ("compile", *METHODS)
            ):
                pattern, flags = evaluate_pattern(node, name)
                for method in find_methods(node, tree):
                    yield Pattern(f"{name}:{node.lineno}", pattern, flags, method)


def evaluate_pattern(node: ast.Call, name: str) -> tuple[str | bytes, int]:
    module = "qkv." + name.removesuffix(".py").replace("/", ".")
    known: dict[str, Any] = {"re": re, **LOCALS.get(name, {})}
    free = {x.id for x in ast.walk(node.args[0]) if isinstance(x, ast.Name)} - set(known)
    if free:
        known = {**vars(importlib.import_module(module)), **known}
    position = {"sub": 4, "subn": 4}.get(node.func.attr, 1 if node.func.attr == "compile" else 2)  # type: ignore[attr-defined]
    flags = [x.value for x in node.keywords if x.arg == "flags"] + node.args[
        position : position + 1
    ]

    def value(part: ast.expr) -> Any:
        return eval(compile(ast.Expression(part), name, "eval"), known)

    return value(node.args[0]), int(value(flags[0])) if flags else 0


def find_methods(node: ast.Call, tree: ast.Module) -> list[str]:
    """How a pattern is applied: by the call itself, or by the uses of its compiled constant."""
    assert isinstance(node.func, ast.Attribute)
    if node.func.attr != "compile":
        return [node.func.attr]
    for other in ast.walk(tree):
        if isinstance(other, ast.Attribute) and other.value is node:
            return [other.attr]
    names = {
        target.id
        for other in ast.walk(tree)
        if isinstance(other, ast.Assign) and other.value is node
        for target in other.targets
        if isinstance(target, ast.Name)
    }
    used = {
        other.attr
        for other in ast.walk(tree)
        if isinstance(other, ast.Attribute)
        and isinstance(other.value, ast.Name)
        and other.value.id in names
    }
    return sorted(used & set(METHODS)) or ["search"]


def list_literals(pattern: str) -> str:
    """What is left of a pattern without its classes, groups, repetitions and alternatives."""
    for what, instead in (
        (r"\\\[|\\\]", ""),
        (r"\[\^?\]?(?:\\.|[^\]])*\]", ""),  # a class
        (r"\(\?(?:P<\w+>|<?[=!:]|[a-zA-Z]+:?)|(?<!\\)[()|^$]", ""),
        (r"(?<!\\)(?:[*+?]|\{\d*,?\d*\})", ""),
        (r"(?<!\\)\.|\\[wWdDsSbBAZ1-9]", ""),
        (r"\\(.)", r"\1"),
    ):
        pattern = re.sub(what, instead, pattern)
    return pattern


def list_hostile_inputs(pattern: str | bytes) -> list[Callable[[int], str]]:
    """Functions from a length to a text: repetitions of the pattern's own characters, after and
    before what may make it fail."""
    text = pattern.decode("latin-1") if isinstance(pattern, bytes) else pattern
    literals = list_literals(text)
    marks = [x for x in dict.fromkeys(literals + re.sub(r"\w", "", text)) if x not in "()[]?*+^$"]
    marks = [*marks[:6], "a", "1", " "]
    quotes = [x for x in "\"'`" if x in text]
    spans = itertools.combinations(range(min(len(literals), 24) + 1), 2)
    parts = [literals[i:j] for i, j in spans if j - i in (2, 3, 4, 5, 8) or j - i == len(literals)]
    pumps = [*marks, *map("".join, itertools.product(marks, repeat=2)), *parts]

    ends = [("", ""), *((x, "\x00") for x in dict.fromkeys(("", literals[:1], "a", *quotes)))]

    def repeated(first: str, pump: str, last: str) -> Callable[[int], str]:
        return lambda size: first + pump * (size // len(pump)) + last

    return [repeated(first, pump, last) for pump in dict.fromkeys(pumps) for first, last in ends]


def measure_seconds(result: Pattern, text: str) -> float:
    """CPU time of one application of the pattern."""
    compiled = re.compile(result.pattern, result.flags)
    subject: Any = text.encode("latin-1", "ignore") if isinstance(result.pattern, bytes) else text
    call: Callable[..., Any] = getattr(compiled, result.method)
    start = time.process_time()
    if result.method in ("sub", "subn"):
        call("" if isinstance(subject, str) else b"", subject)
    elif result.method == "finditer":
        for _ in call(subject):
            pass
    else:
        call(subject)
    return time.process_time() - start


def find_slow_inputs(result: Pattern) -> Iterator[str]:
    """Inputs for which the pattern's time grows faster than their length."""
    for build in list_hostile_inputs(result.pattern):
        if (
            measure_seconds(result, build(SCREEN)) > SUSPECT_SECONDS
            and measure_seconds(result, build(FULL)) > MAX_SECONDS
        ):
            yield f"{build(SCREEN)[:12]!r}…"


def run_limited(code: str, seconds: int = MAX_CPU_SECONDS) -> subprocess.CompletedProcess[str]:
    """Run Python code that may hang, with a limit on its CPU time."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))

    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        preexec_fn=limit,
        check=False,
    )


def report_slow_patterns() -> None:
    """Print each pattern, and after it an input that makes it slow."""
    for result in sampling.sample(find_patterns(), PATTERNS):
        print(f"\n{result.place} {result.method} {result.pattern!r}", end="", flush=True)
        for slow in find_slow_inputs(result):
            print(f" SLOW: {slow}", end="", flush=True)
            break


def test_every_pattern_is_found() -> None:
    """As many as a search for their calls finds."""
    calls = [
        line
        for path in ROOT.rglob("*.py")
        for line in path.read_text(encoding="utf-8").splitlines()
        if re.search(rf"\bre\.(compile|{'|'.join(METHODS)})\(", line)
    ]
    assert len({result.place for result in find_patterns()}) == len(calls)


def test_every_pattern_takes_linear_time() -> None:
    ran = run_limited("from tests.test_patterns import *; report_slow_patterns()")
    lines = ran.stdout.strip().splitlines()
    assert ran.returncode == 0, f"did not end: {lines[-1]} {ran.stderr[-500:]}"
    assert not [line for line in lines if "SLOW" in line]
    assert len(lines) == len(sampling.sample(find_patterns(), PATTERNS))


@pytest.mark.parametrize(
    ("pattern", "method"),
    [
        (rb'"((?:[^"\\]|\\.)*)"\s*:', "finditer"),
        (r"(a+)+b", "search"),
        (r"(://[^:/@]*):.*@", "sub"),
        (r"""(?P<quote>["'])(?:\\.|(?!(?P=quote)).)*(?P=quote)""", "match"),
    ],
)
def test_a_slow_pattern_is_caught(pattern: Any, method: str) -> None:
    result = Pattern("", pattern, 0, method)
    code = "from tests.test_patterns import *; "
    ran = run_limited(f"{code}print(next(find_slow_inputs({result!r}), 'none'))", seconds=2)
    assert ran.returncode < 0 or "none" not in ran.stdout, ran.stderr


PARSED = 65_536
"""Characters of the input that parsers get: linear ones take 0.4 seconds at most."""
MAX_PARSER_SECONDS = 1.5
UNITS = [
    *("a", "1", " ", "\n", "\r", "\t", ",", ";", "|", '"', "'", "`", "\\", ".", "-", ":", "=", "/"),
    *(
        "(",
        "[",
        "{",
        "<",
        "\x00",
        "é",
        "\u0301",
        "\u0301\u0327",
        "\u0591\u05b0",
        "▁",
        "’",
        "\U0001f600",
    ),
    *('""', '\\"', '","', '"\n', ",\n", "a,", "a;", "a b ", "a'", "1.", "1,", "1e", "-1", "2024-"),
    *("a=1 and ", "a<", "not ", "a in (", '{"a":', "[[", "[{", '{"a":1}\n', "a\n", "://", "%5B"),
]
"""What hostile inputs repeat."""


def list_parsers() -> dict[str, Callable[[str], object]]:
    """What reads text of a stranger: functions that may refuse it, by an error of ours."""
    from qkv import Database
    from qkv.database import parsing
    from qkv.database.encoders import Characters, Lexical, Words
    from qkv.database.encoders.base import has_text_extra
    from qkv.database.filter import expressions
    from qkv.database.sources import delimited, json, type_inference
    from qkv.errors import unknown_name_error
    from qkv.page import limits as bounds
    from qkv.serve import validation

    names = Database({f"name {i}": i for i in range(100)}, encoder="characters")
    ages = Database({i: i for i in range(10)})

    @functools.cache
    def compile_once(text: str) -> object:
        """The condition of a text that is the same for all units."""
        return expressions.compile_condition(text, ["a"])

    parsers: dict[str, Callable[[str], object]] = {
        "CSV": lambda x: delimited.read_delimited(f"a,b\n{x}".encode(), "x", "x.csv", None),
        "CSV header": lambda x: delimited.read_delimited(x.encode(), "x", "x.csv", None),
        "CSV in quotes": lambda x: delimited.read_delimited(
            f'a,b\n1,"{x}'.encode(), "x", "x.csv", None
        ),
        "CSV delimiter": delimited.sniff_delimiter,
        "JSON": lambda x: json.read_json(x.encode(), "x", "x.json"),
        "JSON lines": lambda x: json.read_json(f'{{"a":1}}\n"{x}'.encode(), "x", "x.jsonl"),
        "JSON list": lambda x: json.read_json(f'[{{"a":1}},{{"a":"{x}'.encode(), "x", "x.json"),
        "JSON body": lambda x: validation.parse_validated_json(x.encode(), {}),
        "JSON text body": lambda x: validation.parse_validated_json(f'{{"a":"{x}'.encode(), {}),
        "numbers": lambda x: type_inference.parse_numbers([x]),
        "columns": lambda x: type_inference.infer_types({"a": [x, "1"]}, ()),
        "decimal commas": lambda x: type_inference.replace_decimal_commas(
            {"a": [x], "b": [f"1{x}"]}, ()
        ),
        "thousands": lambda x: type_inference.remove_thousands_commas(
            {"a": [f"{x},"], "b": [f"1,{x}"]}, ()
        ),
        "dates": lambda x: type_inference.parse_dates([x, f"2024-01-31{x}"]),
        "where": lambda x: expressions.compile_condition(x[:10_000], ["a"]),
        "where, comparisons": lambda x: compile_once("a" + "<a" * 5_000),
        "where, members": lambda x: compile_once(f"a in ({'a,' * 5_000})"),
        "where, names": lambda x: expressions.compile_condition("b > 1", ["a", "b", x]),
        "a key of a number": lambda x: parsing.parse_cell_like(x, 1),
        "a key of a date": parsing.parse_moment,
        "a key of two columns": lambda x: parsing.parse_cell_like(x, ("a", 1)),
        "a key of bytes": lambda x: parsing.parse_cell_like(x, b"a"),
        "a key of JSON": lambda x: parsing.parse_cell_like(x, {"a": 1}),
        "a score": lambda x: parsing.parse_score(x),
        "a score's number": lambda x: parsing.parse_score(f"gaussian:{x}"),
        "an unknown name": lambda x: str(
            unknown_name_error("column", x, ["a", x[:1000], "b" * 1000])
        ),
        "characters": lambda x: Characters().encode([x]),
        "lexical": lambda x: Lexical().fit(["a", x]).encode_sparse([x], query=True),
        "ask": lambda x: names.ask(x),
        "ask a number": lambda x: ages.ask(x),
        "the nearest keys": lambda x: str(_refusal(lambda: names[x])),
        "limits": lambda x: _check_bounds(bounds, x),
    }
    if has_text_extra():
        parsers["words"] = lambda x: Words().encode([x])
    return parsers


def _refusal(call: Callable[[], object]) -> BaseException | None:
    try:
        call()
    except KeyError as error:
        return error
    return None


def _check_bounds(bounds: Any, text: str) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        for form in ("csv", "jsonl"):
            path = Path(folder, f"x.{form}")
            path.write_bytes(text.encode() or b"a")
            with contextlib.suppress(qkv.QkvError):
                bounds.check_file(path, form)


def report_slow_parsers(size: int = PARSED) -> None:
    """Print each parser, and the input that makes it slow, or that it breaks at."""
    import warnings

    warnings.simplefilter("ignore")
    for name, parse in list_parsers().items():
        print(f"\n{name}", end="", flush=True)
        for unit in sampling.sample(UNITS, 16):
            start = time.process_time()
            try:
                parse((unit * size)[:size])
            except (qkv.QkvError, ValueError):
                pass
            except Exception as error:
                print(f" BROKEN: {unit!r} {type(error).__name__}: {error}"[:200], end="")
            if (took := time.process_time() - start) > MAX_PARSER_SECONDS:
                print(f" SLOW: {unit!r} {took:.0f} s", end="", flush=True)
                break


def test_every_parser_takes_linear_time() -> None:
    ran = run_limited("from tests.test_patterns import *; report_slow_parsers()")
    lines = ran.stdout.strip().splitlines()
    assert ran.returncode == 0, f"did not end: {lines[-1:]} {ran.stderr[-500:]}"
    assert not [line for line in lines if "SLOW" in line or "BROKEN" in line]
    assert len(lines) == len(list_parsers())
