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

from qkv.cli import terminal
from qkv.errors import ArgumentError, MissingExtraError, QkvError

EXIT_OK, EXIT_NOTHING_FOUND, EXIT_USAGE, EXIT_DAMAGED, EXIT_LOCKED, EXIT_MISSING_EXTRA = range(6)
EXIT_BUG, EXIT_STOPPED, EXIT_BROKEN_PIPE = 70, 130, 141

EXIT_CODES = {
    EXIT_OK: "done",
    EXIT_NOTHING_FOUND: "nothing found: no such key, or no row that passes --where",
    EXIT_USAGE: "bad usage or bad input: a wrong option, source, column or value",
    EXIT_DAMAGED: "a file of the store is damaged; `qkv check` says which",
    EXIT_LOCKED: "another process is writing to the store",
    EXIT_MISSING_EXTRA: "an optional package is missing; the message says which",
    EXIT_BUG: "a bug in qkv; --debug shows where",
    EXIT_STOPPED: "stopped by Ctrl-C",
    EXIT_BROKEN_PIPE: "whoever read the output went away",
}
"""What each exit code means; `qkv --help` and docs/cli.md print this table."""


@dataclass(frozen=True)
class Result:
    """What a command found: as data for programs, drawn for people, and the exit code."""

    data: Any
    render: Callable[[], object]
    exit_code: int = EXIT_OK


class NothingFoundError(QkvError):
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


class GlobalOptions(NamedTuple):
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
    def run_command(
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
            with _debug_logging() if debug else contextlib.nullcontext():
                _import_plugins([*first, *(plugins or [])])
                with warnings.catch_warnings():
                    warnings.showwarning = lambda told, *_, **__: terminal.print_note(
                        f"qkv: {told}"
                    )
                    code = _print_results(function(**arguments), as_json)
        except (Exception, KeyboardInterrupt) as error:
            code, message = diagnose_error(error)
            if debug and code not in (EXIT_BROKEN_PIPE, EXIT_STOPPED):
                traceback.print_exception(error)
            if code == EXIT_BROKEN_PIPE:
                _silence_stdout()
            else:
                if as_json:
                    found = error.data if isinstance(error, NothingFoundError) else {}
                    terminal.print_json({"error": message, "code": code, **found})
                terminal.print_note(f"qkv: {message}")
        if code != EXIT_OK:
            raise typer.Exit(code)

    run_command.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=parameters, return_annotation=None
    )
    run_command.__annotations__ = {p.name: p.annotation for p in parameters}
    return run_command


def diagnose_error(error: BaseException) -> tuple[int, str]:
    """The exit code of an error, and what to say.

    >>> diagnose_error(KeyboardInterrupt())
    (130, 'stopped')
    """
    if isinstance(error, KeyboardInterrupt):
        return EXIT_STOPPED, "stopped"
    if isinstance(error, BrokenPipeError):
        return EXIT_BROKEN_PIPE, ""
    if isinstance(error, QkvError):
        return _exit_code(error), str(error)
    if isinstance(error, MemoryError):
        return EXIT_USAGE, "there is not enough memory for this"
    if isinstance(error, OSError):
        name = f"{os.fspath(error.filename)!s}: " if error.filename is not None else ""
        return EXIT_USAGE, f"{name}{error.strerror or error}"
    kind = type(error).__name__
    return (
        EXIT_BUG,
        f"a bug, {kind}: {error}. Run it again with --debug and report what that prints.",
    )


def _exit_code(error: QkvError) -> int:
    from qkv.database.errors import StoreDamagedError, StoreLockedError

    kinds = {
        NothingFoundError: EXIT_NOTHING_FOUND,
        StoreDamagedError: EXIT_DAMAGED,
        StoreLockedError: EXIT_LOCKED,
        MissingExtraError: EXIT_MISSING_EXTRA,
    }
    return next((code for kind, code in kinds.items() if isinstance(error, kind)), EXIT_USAGE)


def _print_results(results: Result | Iterable[Result], as_json: bool) -> int:
    code = EXIT_OK
    for result in [results] if isinstance(results, Result) else results:
        if as_json:
            terminal.print_json(result.data)
        else:
            terminal.make_encodable(sys.stdout)
            result.render()
            sys.stdout.flush()
        code = max(code, result.exit_code)
    return code


@contextlib.contextmanager
def _debug_logging() -> Iterator[None]:
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


def _silence_stdout() -> None:
    """Give stdout somewhere to go: the interpreter flushes it once more when it ends."""
    try:
        descriptor = sys.stdout.fileno()
    except (OSError, ValueError):
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)


def _import_plugins(names: Iterable[str]) -> None:
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
