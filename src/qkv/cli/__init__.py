"""The command line: `qkv ask books.csv "the alchemist"`.

Typer is loaded here, a command's module when it is named, NumPy and the database when it runs, rich
where it draws: so help is quick.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import keyword
import os
import sys
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from qkv.cli.command import EXIT_CODES, EXIT_STOPPED, Debug, GlobalOptions, Plugins, as_command

COMMAND_MODULES = {
    "ask": "ask",
    "get": "ask",
    "plot": "ask",
    "rows": "rows",
    "export": "rows",
    "import": "manage",
    "add": "manage",
    "remove": "manage",
    "info": "manage",
    "versions": "manage",
    "check": "manage",
    "compact": "manage",
    "learn": "learn",
    "calibrate": "learn",
    "weights": "weights",
    "serve": "serve",
    "demo": "demo",
}
"""The module of each command."""


class LazyCommandGroup(TyperGroup):
    """Commands that are made when they are asked for: all of them take longer than one to run."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMAND_MODULES)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        for name in (
            [cmd_name] if cmd_name in COMMAND_MODULES else COMMAND_MODULES
        ):  # all, to name the nearest
            if name not in self.commands:
                self.commands[name] = _build_command(name)
        return super().get_command(ctx, cmd_name)


def _build_command(name: str) -> Any:
    module = importlib.import_module(f"qkv.cli.{COMMAND_MODULES[name]}")
    function = getattr(module, f"{name}_" if keyword.iskeyword(name) else name)
    alone = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False, add_completion=False)
    alone.command(name)(as_command(function))
    return typer.main.get_command(alone)


app = typer.Typer(
    cls=LazyCommandGroup,
    # Rich's help pages are pretty and take as long again as everything else.
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    context_settings={"help_option_names": ["--help", "-h"]},
    epilog="\b\nExit codes:\n"
    + "\n".join(f"{code:5}  {what}" for code, what in EXIT_CODES.items()),
)


def _print_version(wanted: bool) -> None:
    if wanted:
        import qkv

        print(f"qkv {qkv.__version__}")
        raise typer.Exit


@app.callback()
def _qkv(
    context: typer.Context,
    plugins: Plugins = None,
    debug: Debug = False,
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Ask a table in words: attention as a database query.

    Every row answers, weighted by how well its key matches. Results go to stdout, everything else
    to stderr. Every command takes --json.
    """
    context.obj = GlobalOptions(plugins or [], debug)


def main() -> None:
    """The entry point of the `qkv` command."""
    try:
        app(prog_name="qkv")
    except KeyboardInterrupt:
        _exit_now(EXIT_STOPPED)
    except SystemExit as end:
        if isinstance(end.code, str):
            raise
        _exit_now(end.code or 0)


def _exit_now(code: int) -> NoReturn:
    """End at once: to take all modules apart takes the system as long as half of NumPy's import.

    And where an interrupt came while a module made a dataclass, Python would end by the signal,
    though it was caught.
    """
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)
