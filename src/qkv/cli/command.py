"""Run a command: compute its result, print it as text or JSON, and exit with a code.

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
    EXIT_NOTHING_FOUND: "nothing found: no such key, or no row matches --where",
    EXIT_USAGE: "invalid usage or input: a wrong option, source, column or value",
    EXIT_DAMAGED: "a file of the database is damaged; `qkv check` says which",
    EXIT_LOCKED: "another process is writing to the database",
    EXIT_MISSING_EXTRA: "an optional package is missing; the message says which",
    EXIT_BUG: "a bug in qkv; --debug shows where",
    EXIT_STOPPED: "stopped by Ctrl-C",
    EXIT_BROKEN_PIPE: "the reader of the output closed the pipe",
}
"""The meaning of each exit code. `qkv --help` and docs/cli.md print this table."""


@dataclass(frozen=True)
class Result:
    """The result of a command.

    `data` is what --json prints. `render` prints the result as text.
    """

    data: Any
    render: Callable[[], object]
    exit_code: int = EXIT_OK


class NothingFoundError(QkvError):
    """No key or row was found. With --json, the printed error contains the fields `data`."""

    def __init__(self, message: str, **data: Any):
        super().__init__(message)
        self.data = data


Command = Callable[..., Result | Iterable[Result]]

Json = Annotated[bool, typer.Option("--json", help="Print JSON on stdout, one object per line.")]
Debug = Annotated[
    bool,
    typer.Option("--debug", help="Log what is read and chosen; show tracebacks."),
]


Plugins = Annotated[
    list[str] | None,
    typer.Option(
        "--plugin",
        metavar="MODULE",
        help="Import a module or a .py file that registers your own scores, weightings, encoders "
        "or sources. Repeat for several.",
    ),
]


class GlobalOptions(NamedTuple):
    """Options that are accepted before and after the name of a command."""

    plugins: list[str]
    debug: bool


def as_command(function: Command) -> Callable[..., None]:
    """Return the function that typer runs for a command.

    It adds the options that all commands have, and prints each error on one line.
    """
    names: dict[str, Any] = {"as_json": Json, "debug": Debug, "plugins": Plugins}
    signature = inspect.signature(function, eval_str=True)
    groups = [p for p in signature.parameters.values() if dataclasses.is_dataclass(p.annotation)]
    keyword_only = inspect.Parameter.KEYWORD_ONLY
    common = [
        inspect.Parameter(
            name,
            keyword_only,
            annotation=annotation,
            default=None if name == "plugins" else False,
        )
        for name, annotation in names.items()
    ]
    common.append(inspect.Parameter("context", keyword_only, annotation=typer.Context))
    direct = [p for p in signature.parameters.values() if p not in groups]
    # A parameter whose type is a dataclass becomes one option for each field.
    fields = {p.name: inspect.signature(p.annotation, eval_str=True).parameters for p in groups}
    parameters = [*direct, *(x for group in fields.values() for x in group.values()), *common]

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
            values = {name: arguments.pop(name) for name in fields[group.name]}
            arguments[group.name] = group.annotation(**values)
        global_plugins, global_debug = context.obj
        debug = debug or global_debug
        try:
            with _debug_logging() if debug else contextlib.nullcontext():
                _import_plugins([*global_plugins, *(plugins or [])])
                with warnings.catch_warnings():
                    warnings.showwarning = lambda message, *_, **__: terminal.print_note(
                        f"qkv: {message}"
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
                    data = error.data if isinstance(error, NothingFoundError) else {}
                    terminal.print_json({"error": message, "code": code, **data})
                terminal.print_note(f"qkv: {message}")
        if code != EXIT_OK:
            raise typer.Exit(code)

    run_command.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=parameters, return_annotation=None
    )
    run_command.__annotations__ = {p.name: p.annotation for p in parameters}
    return run_command


def diagnose_error(error: BaseException) -> tuple[int, str]:
    """Return the exit code and the message of an error.

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
        return EXIT_USAGE, "not enough memory"
    if isinstance(error, OSError):
        name = f"{os.fspath(error.filename)!s}: " if error.filename is not None else ""
        return EXIT_USAGE, f"{name}{error.strerror or error}"
    kind = type(error).__name__
    return (
        EXIT_BUG,
        f"a bug, {kind}: {error}. Run it again with --debug and report the output.",
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
    """Print each result as text or JSON; return the largest exit code."""
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
    """Print all messages of the logger "qkv" on stderr inside the `with`."""
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
    """Redirect stdout to the null device: at exit the interpreter flushes it, which would fail."""
    try:
        descriptor = sys.stdout.fileno()
    except (OSError, ValueError):
        return
    null_device = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null_device, descriptor)
    os.close(null_device)


def _import_plugins(names: Iterable[str]) -> None:
    """Import the plug-ins that --plugin names: .py files or dotted module names."""
    for name in names:
        try:
            _run_file(Path(name)) if name.endswith(".py") else importlib.import_module(name)
        except Exception as error:
            is_ours = isinstance(error, ArgumentError)
            reason = error if is_ours else f"{type(error).__name__}: {error}"
            raise ArgumentError(f"--plugin {name} cannot be imported: {reason}") from error


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
