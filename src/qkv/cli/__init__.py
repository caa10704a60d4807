"""The command line: `qkv ask books.csv "the alchemist"`.

Typer is loaded here, NumPy and the database when a command runs, rich where it draws: so help is
quick.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
from typing import Annotated, NoReturn

import typer

from qkv.cli import ask, demo, keep, learn, rows, sentence, serve
from qkv.cli.command import CODES, STOPPED, Command, Debug, Given, as_command

COMMANDS: dict[str, Command] = {
    "ask": ask.ask,
    "get": ask.get,
    "plot": ask.plot,
    "rows": rows.rows,
    "export": rows.export,
    "import": keep.import_,
    "add": keep.add,
    "remove": keep.remove,
    "info": keep.info,
    "versions": keep.versions,
    "check": keep.check,
    "compact": keep.compact,
    "learn": learn.learn,
    "calibrate": learn.calibrate,
    "weights": sentence.weights,
    "serve": serve.serve,
    "demo": demo.demo,
}

app = typer.Typer(
    # Rich's help pages are pretty and take as long again as everything else.
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    context_settings={"help_option_names": ["--help", "-h"]},
    epilog="\b\nExit codes:\n" + "\n".join(f"{code:5}  {what}" for code, what in CODES.items()),
)
for name, function in COMMANDS.items():
    app.command(name)(as_command(function))


def _version(wanted: bool) -> None:
    if wanted:
        import qkv

        print(f"qkv {qkv.__version__}")
        raise typer.Exit


@app.callback()
def _qkv(
    context: typer.Context,
    plugin: Annotated[
        list[str] | None,
        typer.Option(
            metavar="MODULE",
            help="A module, or a .py file, that registers scores, weightings or encoders of your "
            "own; give it again for several.",
        ),
    ] = None,
    debug: Debug = False,
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Ask a table in words: attention as a database query.

    Every row answers, weighted by how well its key matches. Results go to stdout, everything else
    to stderr. Every command takes --json.
    """
    context.obj = Given(plugin or [], debug)


def main() -> None:
    """The entry point of the `qkv` command."""
    try:
        app(prog_name="qkv")
    except KeyboardInterrupt:
        _stop()
    except SystemExit as end:
        if end.code == STOPPED:
            _stop()
        raise


def _stop() -> NoReturn:
    """End as one that was stopped.

    Where the interrupt came while a module made a dataclass, Python would end by the signal, though
    it was caught.
    """
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(STOPPED)
