"""The command line: `qkv ask books.csv "the alchemist"`.

Imports are lazy, so that `qkv --help` is fast. This module loads typer. Naming a command loads the
command's module. Running a command loads NumPy and the database.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import keyword
import os
import re
import sys
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup

from qkv.cli.command import EXIT_CODES, EXIT_STOPPED, Debug, GlobalOptions, Plugins, as_command

COMMAND_MODULES = {
    "ask": "ask",
    "get": "ask",
    "plot": "ask",
    "join": "join",
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
    "index": "learn",
    "weights": "weights",
    "serve": "serve",
    "demo": "demo",
}
"""The module in `qkv.cli` that defines each command."""


FOREIGN_COMMANDS = {
    **dict.fromkeys(("describe", "schema", "show", "head", "inspect"), "info SOURCE"),
    **dict.fromkeys(("search", "query", "find"), "ask SOURCE QUERY"),
    **dict.fromkeys(("lookup", "select"), "get SOURCE KEY"),
    **dict.fromkeys(("merge", "match"), "join LEFT RIGHT"),
    **dict.fromkeys(("load", "create"), "import SOURCE PATH"),
}
"""Commands that other programs have, and what to use here."""


class LazyCommandGroup(TyperGroup):
    """A group of commands that builds each command when it is first named.

    Building all commands at the start would be slow.
    """

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMAND_MODULES)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and args[0] in FOREIGN_COMMANDS:
            ctx.fail(f"No such command {args[0]!r}. Use: qkv {FOREIGN_COMMANDS[args[0]]}")
        return super().resolve_command(ctx, args)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        # For an unknown name, build all commands: click suggests the nearest one.
        for name in [cmd_name] if cmd_name in COMMAND_MODULES else COMMAND_MODULES:
            if name not in self.commands:
                self.commands[name] = _build_command(name)
        return super().get_command(ctx, cmd_name)


class NumberArgumentCommand(TyperCommand):
    """A command whose arguments may be negative numbers: -5 is no option."""

    def make_parser(self, ctx: Any) -> Any:
        parser: Any = super().make_parser(ctx)
        process_options = parser._process_opts

        def process_argument(argument: str, state: Any) -> None:
            if re.match(r"-\.?\d", argument):
                state.largs.append(argument)
            else:
                process_options(argument, state)

        parser._process_opts = process_argument
        return parser


def _build_command(name: str) -> Any:
    module = importlib.import_module(f"qkv.cli.{COMMAND_MODULES[name]}")
    function = getattr(module, f"{name}_" if keyword.iskeyword(name) else name)
    single = typer.Typer(
        rich_markup_mode=None, pretty_exceptions_enable=False, add_completion=False
    )
    single.command(name, cls=NumberArgumentCommand)(as_command(function))
    return typer.main.get_command(single)


app = typer.Typer(
    cls=LazyCommandGroup,
    # rich would take twice as long to render the help.
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
    """Query a table with attention: every row answers, weighted by how well its key matches.

    Results go to stdout, everything else to stderr. Every command accepts --json.
    """
    context.obj = GlobalOptions(plugins or [], debug)


def main() -> None:
    """Run the command line with the arguments of this process."""
    try:
        app(prog_name="qkv")
    except KeyboardInterrupt:
        _exit_now(EXIT_STOPPED)
    except SystemExit as end:
        if isinstance(end.code, str):
            raise
        _exit_now(end.code or 0)


def _exit_now(code: int) -> NoReturn:
    """Exit with this code, without tearing down the interpreter.

    Tearing it down takes half as long as importing NumPy. After Ctrl-C during an import, a normal
    exit could also die from the signal, although the exception was handled.
    """
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)
