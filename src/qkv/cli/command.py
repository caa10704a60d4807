"""One way for every command: find the result, print it for people or as JSON, end with a code.

A command is a function that returns a `Result`, or yields several. It prints nothing itself.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import importlib.util
import inspect
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from qkv.cli import screen
from qkv.errors import ArgumentError, MissingExtra, QkvError

OK, NOTHING, USAGE, DAMAGED, LOCKED, EXTRA = range(6)
BUG, STOPPED, PIPE = 70, 130, 141

CODES = {
    OK: "done",
    NOTHING: "nothing found: no such key, or no row that passes --where",
    USAGE: "bad usage or bad input: a wrong option, source, column or value",
    DAMAGED: "a file of the store is damaged; `qkv check` says which",
    LOCKED: "another process is writing to the store",
    EXTRA: "an optional package is missing; the message says which",
    BUG: "a bug in qkv; --debug shows where",
    STOPPED: "stopped by Ctrl-C",
    PIPE: "whoever read the output went away",
}
"""What each exit code means; `qkv --help` and docs/cli.md print this table."""


@dataclass(frozen=True)
class Result:
    """What a command found: as data for programs, drawn for people, and the exit code."""

    data: Any
    draw: Callable[[], object]
    code: int = OK


class Nothing(QkvError):
    """What was looked for is not there; `data` joins the error in JSON."""

    def __init__(self, message: str, **data: Any):
        super().__init__(message)
        self.data = data


Command = Callable[..., Result | Iterable[Result]]

Json = Annotated[bool, typer.Option("--json", help="Print JSON on stdout, one object to a line.")]
Debug = Annotated[
    bool,
    typer.Option("--debug", help="Tell what is read and chosen; show where an error is raised."),
]


Plugins = Annotated[
    list[str] | None,
    typer.Option(
        "--plugin",
        metavar="MODULE",
        help="A module, or a .py file, that registers scores, weightings or encoders of your own; "
        "give it again for several.",
    ),
]


class Preface(NamedTuple):
    """What stood before the command and may stand behind it too."""

    plugins: list[str]
    debug: bool


def as_command(function: Command) -> Callable[..., None]:
    """The function as typer wants it: with options for every command, and errors made one line."""
    names: dict[str, Any] = {"as_json": Json, "debug": Debug, "plugins": Plugins}
    signature = inspect.signature(function, eval_str=True)
    groups = [p for p in signature.parameters.values() if dataclasses.is_dataclass(p.annotation)]
    alone = inspect.Parameter.KEYWORD_ONLY
    more = [
        inspect.Parameter(x, alone, annotation=told, default=None if x == "plugins" else False)
        for x, told in names.items()
    ]
    more.append(inspect.Parameter("context", alone, annotation=typer.Context))
    own = [p for p in signature.parameters.values() if p not in groups]
    inside = {p.name: inspect.signature(p.annotation, eval_str=True).parameters for p in groups}
    parameters = [*own, *(x for group in inside.values() for x in group.values()), *more]

    @functools.wraps(function)
    def run(
        *,
        context: typer.Context,
        plugins: list[str] | None = None,
        as_json: bool = False,
        debug: bool = False,
        **arguments: Any,
    ) -> None:
        for group in groups:
            given = {name: arguments.pop(name) for name in inside[group.name]}
            arguments[group.name] = group.annotation(**given)
        first, before = context.obj
        debug = debug or before
        try:
            with _listening() if debug else contextlib.nullcontext():
                _plug_in([*first, *(plugins or [])])
                with warnings.catch_warnings():
                    warnings.showwarning = lambda told, *_, **__: screen.note(f"qkv: {told}")
                    code = _print(function(**arguments), as_json)
        except (Exception, KeyboardInterrupt) as error:
            code, message = diagnose(error)
            if debug and code not in (PIPE, STOPPED):
                traceback.print_exception(error)
            if code == PIPE:
                _silence()
            else:
                if as_json:
                    found = error.data if isinstance(error, Nothing) else {}
                    screen.print_json({"error": message, "code": code, **found})
                screen.note(f"qkv: {message}")
        if code != OK:
            raise typer.Exit(code)

    run.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=parameters, return_annotation=None
    )
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    return run


def diagnose(error: BaseException) -> tuple[int, str]:
    """The exit code of an error, and what to say.

    >>> diagnose(KeyboardInterrupt())
    (130, 'stopped')
    """
    if isinstance(error, KeyboardInterrupt):
        return STOPPED, "stopped"
    if isinstance(error, BrokenPipeError):
        return PIPE, ""
    if isinstance(error, QkvError):
        return _code(error), str(error)
    if isinstance(error, MemoryError):
        return USAGE, "there is not enough memory for this"
    if isinstance(error, OSError):
        name = f"{os.fspath(error.filename)!s}: " if error.filename is not None else ""
        return USAGE, f"{name}{error.strerror or error}"
    kind = type(error).__name__
    return BUG, f"a bug, {kind}: {error}. Run it again with --debug and report what that prints."


def _code(error: QkvError) -> int:
    from qkv.database.faults import Damaged, Locked

    kinds = {Nothing: NOTHING, Damaged: DAMAGED, Locked: LOCKED, MissingExtra: EXTRA}
    return next((code for kind, code in kinds.items() if isinstance(error, kind)), USAGE)


def _print(results: Result | Iterable[Result], as_json: bool) -> int:
    code = OK
    for result in [results] if isinstance(results, Result) else results:
        if as_json:
            screen.print_json(result.data)
        else:
            screen.make_encodable(sys.stdout)
            result.draw()
            sys.stdout.flush()
        code = max(code, result.code)
    return code


@contextlib.contextmanager
def _listening() -> Iterator[None]:
    """Have the logger "qkv" tell all on stderr, for the length of a command."""
    import logging

    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("qkv %(relativeCreated)6.0f ms: %(message)s"))
    logger = logging.getLogger("qkv")
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)


def _silence() -> None:
    """Give stdout somewhere to go: the interpreter flushes it once more when it ends."""
    try:
        descriptor = sys.stdout.fileno()
    except (OSError, ValueError):
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)


def _plug_in(names: Iterable[str]) -> None:
    """Import modules of the caller's own: files that end in .py, or by their dotted names."""
    for name in names:
        try:
            _run_file(Path(name)) if name.endswith(".py") else importlib.import_module(name)
        except Exception as error:
            told = error if isinstance(error, ArgumentError) else f"{type(error).__name__}: {error}"
            raise ArgumentError(f"--plugin {name} cannot be imported: {told}") from error


def _run_file(path: Path) -> None:
    if not path.is_file():
        raise ArgumentError("there is no such file")
    name = f"plugin_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
